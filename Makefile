# make train: train the tiny model twice on the CPU, with exact attention and with SageBwd, and compare the losses.
# make test: the test suite; make test-more: the rest of what CI runs; make test-slow: what takes minutes.
# make check: format, lint and types. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test test-more test-slow check format clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/train.stamp: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[train]'
	touch $@

$(VENV)/dev.stamp: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

train: $(VENV)/train.stamp
	$(BIN)/python -m train.compare --preset tiny

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 -m 'not gpu and not slow and not more'

test-more: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 -m 'more and not gpu and not slow'

test-slow: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 -m 'slow and not gpu'

check: $(VENV)/dev.stamp
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

format: $(VENV)/dev.stamp
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .ruff_cache
