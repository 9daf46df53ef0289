"""What the documents, and the list of long tests, name exists; the table of arguments names all."""

import ast
import inspect
import re
from pathlib import Path

from sagebwd_jax import attention

TESTS = Path(__file__).parent


def names_of(path):
    """Every test of a file as name or Class::name."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return found


def test_table_of_the_arguments_is_complete():
    rows = re.findall(r"^\| (`.*?) \|", (TESTS.parent / "docs" / "arguments.md").read_text(), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(inspect.signature(attention).parameters)


def test_tests_of_the_user_cases_exist():
    named = re.findall(r"`(test_\w+\.py)::([\w:]+)`", (TESTS.parent / "docs" / "user_cases.md").read_text())
    assert len(named) > 80
    missing = [f"{file}::{name}" for file, name in named if name not in names_of(TESTS / file)]
    assert not missing


def test_tests_that_are_left_to_make_test_more_exist():
    lines = [x for x in (TESTS / "more_tests.txt").read_text().splitlines() if not x.startswith("#")]
    named = [line.split("[")[0].split("::", 1) for line in lines]
    missing = [f"{file}::{name}" for file, name in named if name not in names_of(TESTS / file)]
    assert not missing
