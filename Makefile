# make run          the app on the demo model, installed into .venv here
# make test         everything that is checked, with its own set-up
# make bench        the benchmarks; results are written to tests/benchmarks/results/
# make bench-cpu    against llama.cpp (built first, some minutes) and the hardware's limit; not part of bench
# make gpu-check    what only a CUDA GPU can tell, in 8 minutes without a network; JSON goes to OUT=folder
# make screenshots  the pictures in screenshots/, from the real app on the demo model
# make clean        takes away what these made (not your runs and settings)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: run test lint bench bench-cpu gpu-check screenshots clean
.DELETE_ON_ERROR:

run: $(VENV)/.installed
	@exec $(BIN)/pdq-tui demo

# The pinned torch first: an open range takes a build of several GB on a machine without a GPU.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing pdq-tui into $(VENV) (torch included: some minutes the first time)" >&2
	@$(PIP) install --constraint constraints.txt torch
	@$(PIP) install --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the tests need" >&2
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pdq-tui needs Python 3.11 or newer; name one: make PYTHON=python3.12 …" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)

test: $(VENV)/.installed-dev lint
	@sh tests/setup.sh
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/engine
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/cli tests/tui tests/proc

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.installed-dev
	$(BIN)/python -m tests.benchmarks.engine --out tests/benchmarks/results/engine.json
	$(BIN)/python -m tests.benchmarks.app --out tests/benchmarks/results/app.json
	$(BIN)/python -m tests.benchmarks.store --out tests/benchmarks/results/store.json

bench-cpu: $(VENV)/.installed-dev
	$(BIN)/python -m tests.benchmarks.cpu --out tests/benchmarks/results/cpu.json

# No set-up of its own, and no network: a borrowed GPU machine has the packages that it has.
OUT ?= gpu-check
gpu-check:
	@if [ -x $(BIN)/python ]; then exec $(BIN)/python -m tests.gpu.check --out $(OUT); \
	  else exec $(PYTHON) -m tests.gpu.check --out $(OUT); fi

screenshots: $(VENV)/.installed-dev
	$(BIN)/python screenshots/make.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
