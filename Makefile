# Every target does its own set-up.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all check lint compile clean

demo: .venv/.installed  ## the whole survival pipeline on this machine
	@$(BIN)/python pipeline.py --local --recipe survival --run-name demo

test: .venv/.installed  ## the tests, in about 15 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 -m "not slow" --cov --cov-report=term:skip-covered --cov-fail-under=85

test-all: .venv/.installed  ## the slow ones too
	$(BIN)/python -m pytest -n 2

check: .venv/.installed  ## style, types, import arrows, compiled files
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python pipeline.py --check

compile: .venv/.installed  ## regenerate compiled/
	$(BIN)/python pipeline.py

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tailtune needs Python 3.11 or newer; set PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing pinned dependencies into .venv (once, a few minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info
