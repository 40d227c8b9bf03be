PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: setup test lint demo bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[ray,train,dev]' --constraint constraints.txt
	touch $@

test: setup lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

demo: setup
	$(BIN)/roost plan examples/heterogeneous/cluster.yaml --inventory examples/heterogeneous/machines.yaml --grid
	$(BIN)/python examples/workers/relay.py

bench: setup
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/runtime.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info
