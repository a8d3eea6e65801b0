# Everything a person or CI runs. `make train` and `make test` install what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= starter
SEED ?= 1

.PHONY: help install train test check docs starter clean

help:
	@echo "make install        create $(VENV) and install Plait with its exact dependencies"
	@echo "make train          run the main job (RECIPE=$(RECIPE) SEED=$(SEED))"
	@echo "make test           run the tests"
	@echo "make check          lint, types and house rules"
	@echo "make docs           write docs/parallelism.md again, from the cost formulas"
	@echo "make starter        pre-train the starter model again (about 15 minutes)"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch by its exact version first: a range would fetch gigabytes of CUDA on some machines.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

train: install
	$(BIN)/plait train $(RECIPE) --seed $(SEED)

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/rules

docs: install
	$(BIN)/python -m plait.cost.document docs/parallelism.md

starter: install
	$(BIN)/plait sft starter_sft --out build/starter

clean:
	rm -rf $(VENV) build
