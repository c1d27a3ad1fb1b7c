# Two commands do all the set-up: `make demo` and `make test`. `make check` is the static half of the loop.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# The CPU build of torch suffices for development; TORCH= keeps one that is installed already or another build.
TORCH ?= torch==2.13.0

.PHONY: demo test structural fuzz load check format clean

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(if $(TORCH),$(BIN)/python -m pip install --quiet $(TORCH))
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/ooospec demo $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(ARGS)

structural: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python tests/structural.py $(DATA) docs/results/*/rows.jsonl.gz

load: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python tests/load.py $(COUNT)

fuzz: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python tests/test_fuzz.py $(COUNT)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
