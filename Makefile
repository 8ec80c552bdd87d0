# Every target sets up .venv by itself; nothing is done when nothing changed.
#
#   VARIANT=cpu|cuda     which lock to install (requirements/$(VARIANT).txt)
#   PYTHON=python3.11    the interpreter .venv is made from
#   SECONDS=3600         how long `make fuzz` draws cases; SEED=... draws those of another run again
#   LANES=3              how many tests run side by side; each lane has its own ranks
#   SLICES=24            `make test` runs one of so many slices of the long tests
#   TORCH_PIP_ARGS=...   more pip arguments for torch alone, such as an index that has its CPU
#                        build. The default build works with VARIANT=cpu too; it is only larger.

PYTHON ?= python3
VARIANT ?= cpu
SECONDS ?= 3600
LANES ?= 3
SLICES ?= 24
TORCH_PIP_ARGS ?=
TORCH_VERSION := 2.13.0

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCKED := $(VENV)/.locked-$(VARIANT)-torch-$(TORCH_VERSION)
INSTALLED := $(VENV)/.installed-$(VARIANT)
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
.PHONY: help demo bench test test-all fuzz lint clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(INSTALLED)  ## train a small model on 4 local ranks
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp train --config configs/runs/demo.toml

bench: $(INSTALLED)  ## compare ways to train on 4 local ranks, in under 3 minutes
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp bench --config configs/runs/bench.toml

# Tests with several ranks wait more than they compute, so there are more lanes than cores.
IN_LANES := -m "not alone" --numprocesses $(LANES) --dist loadfile --no-loadscope-reorder --timeout 900

test: $(INSTALLED)  ## run the tests, and a slice of the long ones
	$(BIN)/pytest $(IN_LANES) --slow-slice commit/$(SLICES)
	$(BIN)/pytest -m alone --slow-slice commit/$(SLICES)

test-all: $(INSTALLED)  ## run all tests
	$(BIN)/pytest $(IN_LANES)
	$(BIN)/pytest -m alone

fuzz: $(INSTALLED)  ## run random cases on two cores, for SECONDS=3600
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

lint: $(INSTALLED)  ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
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
