# Everything works from a fresh clone: the environment is made and filled on first use.
# It is filled again when pyproject.toml or constraints.txt change.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CORE := $(VENV)/.installed-core
DEV := $(VENV)/.installed-dev
BENCH := $(VENV)/.installed-bench

.DEFAULT_GOAL := help
.PHONY: help demo test test-deep check bench bench-quick clean

help:
	@echo "make demo         run the order example"
	@echo "make test         everything CI runs: format, lint, types, import contracts, tests"
	@echo "make test-deep    the proofs that take longer: chaos, failovers, generated programs"
	@echo "make check        the same without the tests"
	@echo "make bench        measure beside the peers and write docs/benchmarks; make bench-quick for a short look"
	@echo "make clean        remove the environment, caches and build output"

demo: $(CORE)
	@$(BIN)/python examples/orders_demo.py

test: $(DEV)
	@scripts/check

test-deep: $(DEV)
	@$(BIN)/pytest -m deep -rA --timeout 3600

check: $(DEV)
	@scripts/check --static

# The peers install themselves into environments of their own, below .venv-peers.
bench: $(BENCH)
	@$(BIN)/python -m benchmarks --write

bench-quick: $(BENCH)
	@$(BIN)/python -m benchmarks --quick

clean:
	rm -rf $(VENV) .venv-peers build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CORE): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing onefold into $(VENV)"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

# What developers need includes what the demo needs, so this fills both.
$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing onefold and its development tools into $(VENV)"
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $(CORE) $@

$(BENCH): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing onefold and what its benchmarks need into $(VENV)"
	@$(PIP) install -c constraints.txt -e ".[bench]"
	@touch $(CORE) $@

$(BIN)/python:
	@for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        $$python -m venv $(VENV) && exit 0; \
	        rm -rf $(VENV); \
	        echo "$$python cannot create $(VENV); its venv module may be missing (python3-venv on Debian)." >&2; \
	        exit 1; \
	    fi; \
	done; \
	echo "onefold needs Python 3.11 or newer, and none was found as python3 or python3.11 to python3.14." >&2; \
	exit 1
