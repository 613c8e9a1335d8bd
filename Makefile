# `make demo` and `make test` need Python 3.11+, pip and make; they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# Its Engram, a test oracle, needs torch and transformers; what else it asks for is not installed.
ENGRAM_ORACLE := nemo-automodel==0.7.0
PROMPT ?= It was a fine morning in the country, and

# Options for installing torch. On Linux without a GPU this one saves a download of some GB:
#   make demo TORCH_FROM="--index-url https://download.pytorch.org/whl/cpu"
TORCH_FROM ?=

.PHONY: demo test conformance lint types clean
.DEFAULT_GOAL := demo

$(VENV)/.base: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "deltagram needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH_FROM) $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(ENGRAM_ORACLE)
	touch $@

demo: $(VENV)/.base
	@printf '\n%s' "$(PROMPT)"
	@$(BIN)/deltagram generate "$(PROMPT)" --max-tokens 120 --temperature 0.7 --seed 7

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest

# Clients that others wrote against a server of the shipped model; openai also in its first major version.
conformance: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[conformance]'
	$(PYTHON) -m venv $(VENV)/openai-1
	$(VENV)/openai-1/bin/pip install --quiet --disable-pip-version-check 'openai<2'
	DELTAGRAM_CLIENTS=$(abspath $(BIN)/python):$(abspath $(VENV)/openai-1/bin/python) \
	$(BIN)/python -m pytest -m conformance tests/serving/conformance

clean:
	rm -rf $(VENV) build dist
