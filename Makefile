# Every target sets up .venv by itself; nothing is done when nothing changed.
#
#   VARIANT=cpu|cuda     which lock to install (requirements/$(VARIANT).txt)
#   PYTHON=python3.11    the interpreter .venv is made from
#   SECONDS=3600         how long `make fuzz` draws cases; SEED=... draws those of another run again
#   TORCH_PIP_ARGS=...   more pip arguments for torch alone, such as an index that has its CPU
#                        build. The default build works with VARIANT=cpu too; it is only larger.

PYTHON ?= python3
VARIANT ?= cpu
SECONDS ?= 3600
TORCH_PIP_ARGS ?=
TORCH_VERSION := 2.13.0

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCKED := $(VENV)/.locked-$(VARIANT)-torch-$(TORCH_VERSION)
INSTALLED := $(VENV)/.installed-$(VARIANT)
DOCS_VENV := .venv-docs
DOCS_LOCKED := $(DOCS_VENV)/.locked
LOCKS := requirements/$(VARIANT).txt requirements/dev.txt

# One thread per process: several ranks share the cores in the demo and in the tests.
export OMP_NUM_THREADS := 1
# No look-up of newer versions while linting.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

ifeq ($(filter $(VARIANT),cpu cuda),)
$(error VARIANT=$(VARIANT) is unknown; use VARIANT=cpu or VARIANT=cuda)
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo bench test test-all fuzz lint docs clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(INSTALLED)  ## train a small model on 4 local ranks
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp train --config configs/runs/demo.toml

bench: $(INSTALLED)  ## compare ways to train on 4 local ranks, in under 3 minutes
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp bench --config configs/runs/bench.toml

# Tests with several ranks keep all cores busy by themselves, unit tests one each.
test: $(INSTALLED)  ## run the tests, without the long ones
	$(BIN)/pytest -m "not slow" --numprocesses auto --dist loadfile tests/unit
	$(BIN)/pytest -m "not slow" --ignore tests/unit

test-all: $(INSTALLED)  ## run all tests
	$(BIN)/pytest tests/unit
	$(BIN)/pytest --ignore tests/unit

fuzz: $(INSTALLED)  ## run random cases on two cores, for SECONDS=3600
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

lint: $(INSTALLED)  ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

docs: $(DOCS_LOCKED)  ## build the documentation into build/docs; a broken link or reference fails
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) $(DOCS_VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A changed lock starts from an empty environment: pip would leave behind what a lock dropped,
# and the two fbgemm packages own the same files, so one can't be installed over the other.
$(LOCKED): $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | tail -n 1); Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet $(TORCH_PIP_ARGS) torch==$(TORCH_VERSION)
	$(PIP) install --quiet --no-deps $(addprefix -r ,$(LOCKS))
	touch $@

$(INSTALLED): $(LOCKED) pyproject.toml
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# The documentation has an environment of its own: nothing of it is needed to train, test or lint.
$(DOCS_LOCKED): requirements/docs.txt
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	touch $@
