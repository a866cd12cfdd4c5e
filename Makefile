# Everything runs in ./.venv, which `make setup` fills from requirements/cpu.lock.
# Needs: Linux, Python 3.11+, make. Override: make test PYTHON=python3.12 PYTEST_ARGS='-k router'
PYTHON ?= python3
VENV ?= .venv
# Processes that run tests at the same time (see tests/groups.py); 0 runs them in pytest's own.
PROCESSES ?= 2
PYTEST_ARGS ?=
ACCURACY_ARGS ?=
EVALUATION_ARGS ?=
BIN := $(VENV)/bin
OLDEST := .venv-oldest

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-oldest results soak evaluation accuracy specialists docs docs-serve \
        lint format lock clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: ## Create the virtual environment and install the locked dependencies
	@$(PYTHON) scripts/setup.py --venv $(VENV)

demo: setup ## Serve four roles on one shared prefill and run the ReAct example on them
	@$(BIN)/python -m examples.react.demo

test: setup ## Run all tests, on real vLLM engines
	@$(BIN)/python -m pytest -n $(PROCESSES) $(PYTEST_ARGS)

test-fast: setup ## Run the tests that start no engine
	@$(BIN)/python -m pytest -n $(PROCESSES) -m "not engine" $(PYTEST_ARGS)

test-oldest: ## Run the SDK's tests on the oldest openai it supports
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet --no-deps -r requirements/oldest-openai.lock
	@PYTHONPATH=. $(OLDEST)/bin/python -m pytest tests/sdk $(PYTEST_ARGS)

results: setup ## Measure exactness and faults again and write docs/results/
	@PREFILLSHARE_WRITE_RESULTS=1 $(BIN)/python -m pytest tests/engine_faults/test_histories.py tests/faults/test_scenarios.py $(PYTEST_ARGS)

soak: setup ## Kill a worker every 20 s for half an hour under load; writes docs/results/soak.json
	@$(BIN)/python -m benchmarks.soak --minutes 30 --kill-every 20

evaluation: setup ## Run the paper's evaluation into results/ and docs/results/; hours, and can go on
	@$(BIN)/prefillshare bench run react roles_scaling memory input_length low_overlap concurrency \
		swarm reflexion long_output $(EVALUATION_ARGS); measured=$$?; \
	if [ $$measured -le 1 ]; then $(BIN)/prefillshare bench report results --docs docs/results || exit; fi; \
	exit $$measured

accuracy: setup ## Train and evaluate what docs/training.md shows; hours on two cores, and can go on
	@$(BIN)/python -m benchmarks.accuracy.sharing_ratio --seeds 3
	@$(BIN)/python -m benchmarks.accuracy.training_cost --threads 1
	@$(BIN)/python -m benchmarks.accuracy.tables $(ACCURACY_ARGS)

specialists: setup ## Train the demo's four adapters again and measure them (about an hour)
	@$(BIN)/python -m examples.specialists.build

docs: setup ## Build the documentation site into site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html"

docs-serve: setup ## Show the documentation at http://127.0.0.1:8100 while you write
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --strict --dev-addr 127.0.0.1:8100

lint: setup ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup ## Rewrite files to the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: ## Resolve the dependencies again and rewrite requirements/cpu.lock
	@$(PYTHON) scripts/lock.py

clean: ## Remove the virtual environment and every cache of the checkout
	rm -rf $(VENV) $(OLDEST) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build site demo-report.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
