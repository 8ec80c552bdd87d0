# Every target sets up .venv by itself; nothing is done when nothing changed.
#
#   VARIANT=cpu|cuda     which lock to install (requirements/$(VARIANT).txt)
#   TORCHREC=1.8|1.9     which TorchRec to run with; 1.9 has .venv-1.9 and locks of its own
#   PYTHON=python3.11    the interpreter .venv is made from
#   SECONDS=3600         how long `make fuzz` draws cases; SEED=... draws those of another run again
#   LANES=3              how many tests run side by side; each lane has its own ranks
#   SLICES=205           `make test` runs one of so many slices of the long tests
#   GPUS=90              the generations of GPUs that `make gpu-bundle` packs code for, as 80,90
#   MINUTES=12           how long `make gpu-queue` runs jobs
#   TORCH_PIP_ARGS=...   more pip arguments for torch alone, such as an index that has its CPU
#                        build. The default build works with VARIANT=cpu too; it is only larger.

PYTHON ?= python3
VARIANT ?= cpu
TORCHREC ?= 1.8
SECONDS ?= 3600
LANES ?= 3
SLICES ?= 205
GPUS ?= 90
MINUTES ?= 12
TORCH_PIP_ARGS ?=
TORCH_VERSION_1.8 := 2.13.0
TORCH_VERSION_1.9 := 2.14.1
TORCH_VERSION := $(TORCH_VERSION_$(TORCHREC))

VENV_1.8 := .venv
VENV_1.9 := .venv-1.9
VENV := $(VENV_$(TORCHREC))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCKED := $(VENV)/.locked-$(VARIANT)-torch-$(TORCH_VERSION)
INSTALLED := $(VENV)/.installed-$(VARIANT)
RECIPES := $(VENV)/.recipes-$(VARIANT)
DOCS_VENV := .venv-docs
DOCS_LOCKED := $(DOCS_VENV)/.locked
LOCKS_FOLDER_1.8 := requirements
LOCKS_FOLDER_1.9 := requirements/torchrec-1.9
LOCKS := $(LOCKS_FOLDER_$(TORCHREC))/$(VARIANT).txt requirements/dev.txt

# One thread per process: several ranks share the cores in the demo and in the tests.
export OMP_NUM_THREADS := 1
# Files are compiled when they are first imported: most files of torch never are. What has been
# compiled is kept, whatever the caller's environment says.
export PIP_COMPILE := 0
export PYTHONDONTWRITEBYTECODE :=
# No look-up of newer versions while linting.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

ifeq ($(filter $(VARIANT),cpu cuda),)
$(error VARIANT=$(VARIANT) is unknown; use VARIANT=cpu or VARIANT=cuda)
endif
ifeq ($(filter $(TORCHREC),1.8 1.9),)
$(error TORCHREC=$(TORCHREC) is unknown; use TORCHREC=1.8 or TORCHREC=1.9)
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo bench test test-all smoke smoke-newer fuzz gpu-bundle gpu-queue lint package docs clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(INSTALLED)  ## train a small model on 4 local ranks; see what is gained on a slow network
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp train --config demo --set output.folder=runs/demo
	$(BIN)/torchrec-2dsp cluster --if-permitted --hosts 2 --ranks-per-host 2 --link 200mbit -- \
	  -m torchrec_2dsp bench --config bench_criteo --set network.interface=eth0 \
	  --only planner --only table_wise_int8 --only parallelized --only parallelized_any \
	  --set schedule.rounds=5 --set schedule.block_s=0.5 --set schedule.traced_steps=1 \
	  --output runs/demo/gain.md
	$(BIN)/torchrec-2dsp report runs/demo

bench: $(INSTALLED)  ## compare ways to train on 4 local ranks, in under 3 minutes
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp bench --config bench

# Tests with several ranks wait more than they compute, so there are more lanes than cores.
IN_LANES := -m "not alone" --numprocesses $(LANES) --dist loadfile --no-loadscope-reorder --timeout 900
# Nothing may run beside some tests. Only their files are collected.
ALONE = -m alone $(shell grep -rl --include='test_*.py' mark.alone tests)

test: $(RECIPES)  ## run the tests, and a slice of the long ones
	$(BIN)/pytest $(IN_LANES) --slow-slice commit/$(SLICES)
	$(BIN)/pytest $(ALONE) --slow-slice commit/$(SLICES)

test-all: $(RECIPES)  ## run all tests
	$(BIN)/pytest $(IN_LANES)
	$(BIN)/pytest $(ALONE)

# One test of each kind of what depends on TorchRec the most, for a version that isn't the default.
SMOKE := tests/unit/test_versions.py \
  tests/unit/test_upstream_names.py tests/unit/test_proposers.py \
  "tests/dist/test_parity.py::test_bags_equal_the_unsharded_model[table_wise]" \
  "tests/dist/test_parity.py::test_sequences_equal_the_unsharded_model[row_wise]" \
  tests/dist/test_planner.py::test_every_rank_gets_the_plan_of_a_search_by_cost \
  tests/dist/test_row_prefetch.py::test_bags_train_as_without \
  tests/dist/test_checkpoint.py::test_a_model_travels_to_stock_torchrec_and_back \
  tests/dist/test_weight_sync.py::test_a_report_counts_what_was_written_and_sent

smoke: $(INSTALLED)  ## run one test of each kind, in about a minute
	$(BIN)/pytest $(SMOKE)

smoke-newer:  ## the same with TorchRec 1.9, in an environment of its own
	$(MAKE) smoke TORCHREC=1.9

fuzz: $(INSTALLED)  ## run random cases on two cores, for SECONDS=3600
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

gpu-bundle: $(INSTALLED)  ## pack an environment for a machine with a GPU and no network, into build/gpu
	$(BIN)/python -m tests.gpu.bundle --gpus $(GPUS)

gpu-queue: $(INSTALLED)  ## run jobs on a GPU for MINUTES=12, from where the last run ended
	$(BIN)/python -m tests.gpu.queue --minutes $(MINUTES)

lint: $(RECIPES)  ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

package: $(INSTALLED)  ## build sdist and wheel into dist, and use the wheel in a new environment
	.ci/package $(BIN)/python

docs: $(DOCS_LOCKED)  ## build the documentation into build/docs; a broken link or reference fails
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV_1.8) $(VENV_1.9) $(DOCS_VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --clear follows a link, and would empty an environment that belongs to another folder.
refuse_link = @test ! -L $(1) || { \
  echo "error: $(1) is a link to another folder's environment, which would be emptied; remove the link first" >&2; exit 1; }

# A changed lock starts from an empty environment: pip would leave behind what a lock dropped,
# and the two fbgemm packages own the same files, so one can't be installed over the other.
$(LOCKED): $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | tail -n 1); Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(call refuse_link,$(VENV))
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet $(TORCH_PIP_ARGS) torch==$(TORCH_VERSION)
	$(PIP) install --quiet --no-deps $(addprefix -r ,$(LOCKS))
	touch $@

$(INSTALLED): $(LOCKED) pyproject.toml
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	# By one process, because ranks that start together would all compile the same files.
	$(BIN)/python -c 'import tests.support.preloaded' || true  # What is wrong, doctor says.
	touch $@

# What only recipes use comes last, so that training and the demo don't wait for it.
$(RECIPES): $(INSTALLED) requirements/recipes.txt
	$(PIP) install --quiet --no-deps -r requirements/recipes.txt
	touch $@

# The documentation has an environment of its own: nothing of it is needed to train, test or lint.
$(DOCS_LOCKED): requirements/docs.txt
	$(call refuse_link,$(DOCS_VENV))
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	touch $@
