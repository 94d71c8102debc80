# The verbs a person types. `make speedrun` and `make test` do all the set-up themselves.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup speedrun test test-full test-gpu lint regress bench bench-multi clean

setup: .venv/.runtime

.venv/.runtime: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; set PYTHON=python3.x"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	@touch $@

.venv/.dev: .venv/.runtime
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

speedrun: .venv/.runtime
	$(BIN)/python -m harness speedrun $(ARGS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

test: .venv/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-full: .venv/.dev
	$(BIN)/python -m pytest -m 'not gpu' --timeout 3600 $(ARGS)

test-gpu: .venv/.dev
	$(BIN)/python -m pytest -m gpu --timeout 600 $(ARGS)

regress: .venv/.runtime
	$(BIN)/python -m harness regress --run-sample

bench: .venv/.runtime
	$(BIN)/python -m harness bench

bench-multi: .venv/.runtime
	$(BIN)/python -m harness bench-multi $(ARGS)

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache
