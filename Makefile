# Everything a fresh machine needs: `make quickstart`, `make test`, `make check`.
# Set PYTHON to choose an interpreter, VENV to choose (or reuse) an environment.

VENV ?= .venv
PYTHON ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SCRIPTS := $(shell git ls-files '*.sh' '*.sbatch' .ci/run 2>/dev/null)
DOCKERFILES := $(wildcard Dockerfile)
export OMP_NUM_THREADS ?= 1

.PHONY: help install quickstart test test-slow install-slurm test-slurm test-image test-gpu test-te check format bench-attention docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(STAMP)  ## virtual environment with pinned dependencies

$(STAMP): pyproject.toml constraints.txt scripts/make_venv.sh
	@bash scripts/make_venv.sh "$(VENV)" "$(PYTHON)"
	@touch $@

quickstart: $(STAMP)  ## train a small GPT on text this machine has: loss, checkpoint, resume, plot
	@bash scripts/quickstart.sh "$(BIN)"

test: $(STAMP)  ## every test that needs no GPU (GPU tests too where there is one)
	$(BIN)/python -m pytest -m "not slow and not slurm" -n 2 --dist loadfile --no-loadscope-reorder -q

test-slow: $(STAMP)  ## the long versions
	$(BIN)/python -m pytest -m "slow and not slurm" -q

install-slurm:  ## Slurm and munge for test-slurm, with apt-get (root or sudo); starts no service
	@bash scripts/install_slurm.sh

test-slurm: $(STAMP)  ## the launcher on a real Slurm on this machine (root; after install-slurm)
	REQUIRE_SLURM=1 $(BIN)/python -m pytest -m slurm tests/slurm -q

test-image:  ## the Dockerfile on a substitute base (root, buildah, debootstrap, 25 GB; 31 minutes on two cores)
	bash scripts/test_image.sh tests/launch/image.json

test-gpu: $(STAMP)  ## GPU tests only
	$(BIN)/python -m pytest -m gpu -q

test-te: $(STAMP)  ## GPU tests with Transformer Engine, which must be there, and Apex where it is
	REQUIRE_TE=1 $(BIN)/python -m pytest -m "gpu and te" -q tests/model

check: $(STAMP)  ## formatter, linters, types, order of the rooms
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(if $(SCRIPTS),$(BIN)/shellcheck -S style $(SCRIPTS))
	$(if $(SCRIPTS),$(BIN)/shfmt -d -i 2 -ci $(SCRIPTS))
	$(if $(DOCKERFILES),$(BIN)/hadolint $(DOCKERFILES))

format: $(STAMP)  ## rewrite in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(if $(SCRIPTS),$(BIN)/shfmt -w -i 2 -ci $(SCRIPTS))

bench-attention: $(STAMP)  ## attention beside its peers (needs a GPU; resumes)
	PYTHONPATH=kernels $(BIN)/python benchmarks/attention.py --minutes $(or $(MINUTES),10)
	PYTHONPATH=kernels $(BIN)/python benchmarks/attention.py --plot
	$(BIN)/python benchmarks/tables.py

bench-kernels: bench-attention  ## and accuracy, host time, memory errors (MINUTES=10 each; resumes)
	PYTHONPATH=kernels $(BIN)/python benchmarks/accuracy.py --minutes $(or $(MINUTES),10)
	PYTHONPATH=kernels $(BIN)/python benchmarks/accuracy.py --context-parallel
	PYTHONPATH=kernels $(BIN)/python benchmarks/attention.py --host
	PYTHONPATH=kernels $(BIN)/python benchmarks/sanitizer.py --minutes $(or $(MINUTES),10)
	$(BIN)/python benchmarks/tables.py

docs: $(STAMP)  ## regenerate the generated pages
	$(BIN)/megatron-patch config docs --write docs/configuration.md
	$(BIN)/python benchmarks/tables.py

clean:  ## remove the environment and caches, never runs or data
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
