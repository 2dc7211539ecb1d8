# `make help` lists the targets. Each makes the environment first where it is missing or out of date.
#   VENV=/tmp/x make test                   another environment
#   PYTHON=python3.13 make test             the interpreter that a new environment is made with
#   make test TEST_ARGS="-k journal -x"     more arguments for pytest
#   make test WORKERS=0                     in one process; two share the tests by default
#   make demo ARGS="--help"                 arguments for the demo, and for `make bench`

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.forebay-stamp
SOAK ?= 20
SEEDS ?= 10000
FUZZ ?= 3600
ARGS ?=
TEST_ARGS ?=
WORKERS ?= 2

# The first that runs, is new enough, and can make environments (some distributions split that off).
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
ifeq ($(origin PYTHON),undefined)
PYTHON = $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c '$(USABLE)' >/dev/null 2>&1 && echo $$p && break; done)
endif

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types format soak bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

install: $(STAMP)  ## make or renew the environment

$(STAMP): pyproject.toml constraints.txt
	@python="$(PYTHON)"; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		if [ -z "$$python" ] || ! "$$python" -c '$(USABLE)' >/dev/null 2>&1; then \
			echo "Forebay needs Python 3.11 or newer with venv and ensurepip; not so: \
	$${python:-python3.11, python3.12, python3.13, python3}. \
	Install one, or name one: make PYTHON=/path/to/python3.11" >&2; \
			exit 1; \
		fi; \
		echo "Making $(VENV) with $$python (minutes the first time)"; \
		"$$python" -m venv "$(VENV)"; \
	fi
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input \
		-c constraints.txt -e '.[gym,ui,dev]'
	@touch $@

demo: $(STAMP)  ## run the demo: train, kill -9, go on
	@$(BIN)/forebay demo $(ARGS)

test: $(STAMP)  ## run the tests
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(TEST_ARGS)

lint: $(STAMP)  ## check style and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(STAMP)  ## check the types
	@$(BIN)/python -m mypy

format: $(STAMP)  ## put the code in the house format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

soak: $(STAMP)  ## SEEDS simulated runs, slow and property tests SOAK times larger, FUZZ seconds of fuzzing
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS)
	@FOREBAY_SOAK=$(SOAK) $(BIN)/python -m pytest -q -m slow --timeout=0 $(TEST_ARGS)
	@FOREBAY_SOAK=$(SOAK) $(BIN)/python -m pytest -q --timeout=0 tests/properties
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt atheris \
		|| echo "atheris cannot be installed here: the fuzzing goes by chance, not by coverage"
	@$(BIN)/python -m tests.fuzz --seconds $(FUZZ)

bench: $(STAMP)  ## run the benchmarks
	@$(BIN)/python -m benchmarks $(ARGS)

clean:  ## remove caches and build outputs; the environment and runs/ stay
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name .git -prune -o -path './.venv*' -prune -o -path './runs' -prune \
		-o -type d -name __pycache__ -prune -exec rm -rf {} +
