# Every target does its own set-up.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test coverage test-all check lint compile lock images image-pipeline image-trainer try-images clean

# Variables of `make images`; the build arguments (images/README.md) go through the environment.
REGISTRY ?= localhost
TAG ?= $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' tailtune/__init__.py)

demo: .venv/.installed  ## the whole survival pipeline on this machine
	@$(BIN)/python pipeline.py --local --recipe survival --run-name demo

test: .venv/.installed  ## the tests without the slow ones
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow" $(COVERAGE)

coverage:  ## the same, and fail below 85 % coverage; takes longer
	@$(MAKE) test COVERAGE="--cov --cov-report=term:skip-covered --cov-fail-under=85"

test-all: .venv/.installed  ## the slow ones too
	$(BIN)/python -m pytest -n 3 --dist worksteal

check: .venv/.installed  ## style, types, import arrows, compiled files
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python pipeline.py --check

compile: .venv/.installed  ## regenerate compiled/
	$(BIN)/python pipeline.py

lock: .venv/.installed  ## lock the requirements of the images, with PyPI hashes
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt uv
	UV=$(BIN)/uv images/lock

ifneq ($(and $(BASE_IMAGE),$(filter images,$(MAKECMDGOALS))),)
$(error BASE_IMAGE is of one image; use make image-pipeline or make image-trainer)
endif
images: image-pipeline image-trainer  ## both container images, with podman or buildah

image-pipeline image-trainer: image-%:
	images/build images/$*/Containerfile $(REGISTRY)/tailtune-$*:$(TAG) \
	  --build-arg VERSION=$(TAG) --build-arg GIT_COMMIT=$$(git describe --always --dirty --abbrev=12 --exclude '*')

try-images:  ## build the CPU image on a base of Debian's and run the pipeline in it as a random user; needs root
	images/try

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tailtune needs Python 3.11 or newer; set PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing pinned dependencies into .venv (once, a few minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info
