"""Where the tests run: on the CPU unless `-m gpu` asks for a GPU; under which implementation; JAX's strict settings."""

import os
import re
from pathlib import Path

import helpers
import pytest


def _wants_gpu(config):
    """Whether the marker expression asks for the tests marked gpu."""
    return re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr", "")) is not None


def pytest_configure(config):
    if not _wants_gpu(config):
        # The CUDA plugin may be installed, for the compile tests, where there is no GPU.
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Nearly all of the time is XLA's, compiling: half of it without its optimisations.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    import jax

    if not _wants_gpu(config):
        jax.config.update("jax_platforms", "cpu")


def _listed() -> set[str]:
    """The tests that make test leaves to make test-more."""
    lines = (Path(__file__).parent / "more_tests.txt").read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


def pytest_collection_modifyitems(config, items):
    listed = _listed()
    for item in items:
        if item.nodeid.removeprefix("tests/") in listed:
            item.add_marker("more")
    if not _wants_gpu(config):
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="runs with -m gpu"))


@pytest.fixture(autouse=True)
def strict_jax(request):
    """No silent broadcast over a missing axis and no silent change of dtype in attention; training is left alone."""
    if not helpers.is_about_attention(request.path.stem):
        yield
        return
    import jax

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(params=["xla", "triton-interpreted", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request):
    """Each implementation; the kernels in Pallas' interpreter and, on a GPU, compiled."""
    with helpers.using(request.param):
        yield request.param


@pytest.fixture(params=["xla", "triton-interpreted"])
def cpu_implementation(request):
    """The same, for cases that only trace, or are not worth the minutes of a GPU."""
    with helpers.using(request.param):
        yield request.param


@pytest.fixture(scope="module")
def eight_devices():
    """The CPU as eight devices, which is what a mesh needs; one device again after the module."""
    import jax
    from jax.extend import backend

    def split(count):
        jax.clear_caches()
        backend.clear_backends()
        jax.config.update("jax_num_cpu_devices", count)

    if jax.default_backend() != "cpu":
        pytest.skip("meshes are tested on CPUs")
    split(8)
    yield
    split(-1)


@pytest.fixture(scope="module", autouse=True)
def clear_compiled():
    """Compiled programs of a whole session would take gigabytes."""
    yield
    import jax

    helpers.shared_forward_and_backward.cache_clear()
    jax.clear_caches()
