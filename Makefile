# make train: train the tiny model twice on the CPU, with exact attention and with SageBwd, and compare the losses.
# make test: the test suite; make test-more: the rest of what CI runs; make test-slow: what takes minutes.
# make check: format, lint and types. PYTHON picks the interpreter (3.11 or newer).
# make test-matrix: the core of the suite on every JAX that pyproject.toml admits, oldest first, each in an environment
# of its own (.venv-0.10, .venv-0.11, .venv-0.12); make test-jax-0.12: on one of them. JAX 0.11 and up need Python 3.12:
# PYTHON_0.11 and PYTHON_0.12 pick it, else the first of $(PYTHON), python3.13 and python3.12 that is new enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

JAX_VERSIONS := 0.10 0.11 0.12
JAX_0.10 := jax==0.10.2
JAX_0.11 := jax>=0.11,<0.12
JAX_0.12 := jax>=0.12,<0.13
PYTHON_0.10 ?= $(PYTHON)
PYTHON_0.11 ?= $(PYTHON_312)
PYTHON_0.12 ?= $(PYTHON_312)
IS_OLD := import sys; sys.exit(sys.version_info < (3, 12))
NEWER := python3.13 python3.12
PYTHON_312 = $(shell for p in $(PYTHON) $(NEWER); do $$p -c '$(IS_OLD)' 2>/dev/null && echo $$p && break; done)
# What a release of JAX is most likely to break, three minutes of it on 2 cores: tests/test_NAME.py.
CORE := errors steps against_oracle masks transforms hopper flax_adapters

.PHONY: train test test-more test-slow test-matrix check format clean

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
	$(BIN)/python -m train.compare --preset tiny --mesh data=1

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 -m 'not gpu and not slow and not more'

test-more: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 -m 'more and not gpu and not slow'

test-slow: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 -m 'slow and not gpu'

test-matrix: $(JAX_VERSIONS:%=test-jax-%)

test-jax-%: .venv-%/core.stamp
	.venv-$*/bin/python -c 'import jax, sys; print(f"JAX {jax.__version__}, Python {sys.version.split()[0]}")'
	.venv-$*/bin/python -m pytest -n 2 -m 'not gpu and not slow and not more' $(CORE:%=tests/test_%.py)

.PRECIOUS: .venv-%/core.stamp
.venv-%/core.stamp: pyproject.toml
	$(if $(PYTHON_$*),,$(error JAX $* needs Python 3.12 or newer: make test-matrix PYTHON_$*=PATH names one))
	$(PYTHON_$*) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --upgrade pip
	.venv-$*/bin/python -m pip install --quiet --editable '.[test]' '$(JAX_$*)'
	touch $@

check: $(VENV)/dev.stamp
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

format: $(VENV)/dev.stamp
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf $(VENV) $(JAX_VERSIONS:%=.venv-%) runs build dist .pytest_cache .ruff_cache
