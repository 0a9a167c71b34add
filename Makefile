PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# Versions to install; `make CONSTRAINTS=other.txt` takes others (another torch build, say).
CONSTRAINTS ?= constraints.txt

.PHONY: demo test lint gpu-test bench install install-test clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip

# Where no C++ compiler exists, the one that comes as a wheel (extra `compiler`) builds the CPU kernels.
COMPILER := $(shell command -v c++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 || echo ,compiler)

install: $(BIN)/python
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[demo$(COMPILER)]'

install-test: $(BIN)/python
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[demo,test$(COMPILER)]'

# The main job on a real model: fetch Qwen2.5-Coder 0.5B, answer one question, continue one text.
demo: install
	$(BIN)/slimserve qwen25-coder-0.5b -p "What is the capital of France?"
	$(BIN)/slimserve qwen25-coder-0.5b --raw --temperature 0.8 --top-p 0.95 --seed 7 --max-tokens 96 -p "def fibonacci(n):"

# Most tests keep one core busy; `make test PYTEST_ARGS=` runs them one after another.
test: PYTEST_ARGS ?= -n 2 --dist worksteal
test: install-test lint
	$(BIN)/slimserve fetch qwen25-coder-0.5b smollm2-135m gemma3-270m || true
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not gpu and not slow"

lint: install-test
	$(BIN)/ruff check src tests
	$(BIN)/mypy

# On a machine with a CUDA device whose python already has torch and triton; only the files that hold such tests are
# collected, so that what other tests import need not be there. PYTEST_ARGS="-n 12" compiles kernels in parallel.
GPU_TESTS ?= $(shell grep -l "mark.gpu\|triton_marks\|on_devices" tests/test_*.py)
gpu-test:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu -q $(PYTEST_ARGS) $(GPU_TESTS)

bench: install
	$(BIN)/slimserve bench floor qwen25-coder-0.5b

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
