# Owns: set-up from a clean clone, and the two commands a person needs: `make demo` and `make test`.
# Promises: idempotent; no network once set up; without an NVIDIA GPU a CPU build of torch.
# Never: touches anything outside .venv and the user's cache directory.
#
# Variables: PYTHON=python3.12   TORCH=torch==2.12.0   TORCH_INDEX=https://host/simple (where torch comes from)
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test bench-gpu lint setup clean

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3 python; do $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
endif

GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes || echo no)
ifeq ($(GPU),yes)
TORCH ?= torch>=2.11
else
TORCH ?= torch==2.13.0
endif
TORCH_INDEX ?=
# Taken only where there is no GPU, TORCH_INDEX is unset and plain pip would bring gigabytes of CUDA libraries.
CPU_TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
NEEDS_CUDA := import json, sys; \
	items = json.load(sys.stdin)["install"]; \
	needs = [r for i in items for r in i["metadata"].get("requires_dist", [])]; \
	sys.exit(not any(r.startswith(("nvidia", "cuda")) for r in needs))

# A set-up is done once for each of: these files, this directory, this choice of torch.
KEY := $(shell { cat pyproject.toml constraints.txt; echo '$(CURDIR) $(TORCH) $(TORCH_INDEX)'; } | cksum | cut -d' ' -f1)
READY := $(VENV)/.ready-$(KEY)
READY_TEST := $(VENV)/.ready-test-$(KEY)
MODEL := $(VENV)/.model-$(KEY)

# $(call step,what,command): one line that says what is done and how long it took.
step = @printf '%s ... ' '$(1)'; begun=$$SECONDS; { $(2); }; printf '%s s\n' $$((SECONDS - begun))

help:
	@echo 'make demo    set up and watch SmolLM2 answer: plain, draft chain, draft tree'
	@echo 'make test    set up, then ruff, pyright and every test that needs no GPU'
	@echo 'make bench-gpu   measure true shapes on a GPU (benchmarks/README.md; options in BENCH)'
	@echo 'make lint    ruff and pyright only'
	@echo 'make clean   remove $(VENV) and build leftovers (the model cache stays)'

demo: $(MODEL)
	@$(BIN)/ratoon demo

# The interpreter must be chosen before a kernel is defined, so kernels are tested in a process of their own, beside.
# One thread each: on 2 cores a second one spins for the core that the other process has (a 5 s test took 47 s).
test: $(MODEL) $(READY_TEST) lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:cacheprovider tests/interpret > $(VENV)/interpret.log 2>&1 & kernels=$$!; \
	rest=0; OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/null tests/cpu || rest=$$?; \
	wait $$kernels || { cat $(VENV)/interpret.log; exit 1; }; tail -n 1 $(VENV)/interpret.log; exit $$rest

BENCH ?=
bench-gpu: $(READY_TEST)
	@PYTHONUNBUFFERED=1 $(BIN)/python -m benchmarks.gpu $(BENCH)

lint: $(READY_TEST)
	@$(BIN)/ruff check ratoon tests benchmarks
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

setup: $(READY)

$(BIN)/python:
	@if [ -z '$(PYTHON)' ]; then \
		echo 'error: Ratoon needs Python 3.11 or 3.12: install one, or name it: make demo PYTHON=/path/to/python3.12' >&2; exit 1; fi
	@'$(PYTHON)' -c '$(SUPPORTED)' || { echo 'error: $(PYTHON) is not Python 3.11 or 3.12' >&2; exit 1; }
	$(call step,[1/4] virtual environment in $(VENV) from $(PYTHON),'$(PYTHON)' -m venv $(VENV))

$(READY): $(BIN)/python
	$(call step,[2/4] $(TORCH) (NVIDIA GPU: $(GPU)),$(install_torch))
	$(call step,[3/4] ratoon and its libraries,$(PIP) install -c constraints.txt '$(TORCH)' -e .)
	@rm -f $(VENV)/.ready-* && touch $@

# --no-deps: the rest comes from the usual index, under constraints.txt.
define install_torch
	index='$(TORCH_INDEX)'; \
	if [ -z "$$index" ] && [ '$(GPU)' = no ]; then \
		$(PIP) install --dry-run --ignore-installed --no-deps --report - '$(TORCH)' > $(VENV)/torch.json; \
		if $(BIN)/python -c '$(NEEDS_CUDA)' < $(VENV)/torch.json; then \
			index='$(CPU_TORCH_INDEX)'; \
			printf '(plain pip would bring CUDA libraries: CPU build from %s) ' "$$index"; fi; fi; \
	$(PIP) install --no-deps $${index:+--index-url "$$index"} '$(TORCH)'
endef

EXTRAS := dev,bench
$(READY_TEST): $(READY)
	$(call step,[+] test tools,$(PIP) install -c constraints.txt '$(TORCH)' -e '.[$(EXTRAS)]')
	@touch $@

$(MODEL): $(READY)
	$(call step,[4/4] SmolLM2-135M-Instruct (98 MB),$(BIN)/ratoon pull smollm2 >/dev/null)
	@rm -f $(VENV)/.model-* && touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find ratoon tests -name __pycache__ -type d -prune -exec rm -rf {} +
