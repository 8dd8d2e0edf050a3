# make train       a first run: a small Llama learns Python from the standard library's source
# make finetune    a fine-tuning: that model learns to add from chats; its accuracy before and after
# make test        lint, types and all tests but the long ones
# make test-long   the long ones too
# make test-cuda   tests of the CUDA code paths, on devices without a GPU (tests/nullgpu)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# PyTorch's CUDA build, for `make test-cuda`; 2.11.0 is the oldest version that is supported.
# === leaves out a CPU build of the same version (2.13.0+cpu)
CUDA_TORCH ?= 2.13.0
CUDA_VENV ?= .venv-cuda
CUDA_INSTALLED = $(CUDA_VENV)/.installed-$(CUDA_TORCH)
# Two processes, on two GPUs or on the CPU; one where there is one GPU
RANKS ?= $(if $(filter 1,$(shell nvidia-smi --list-gpus 2>/dev/null | wc -l)),1,2)
# torch from PyPI is built for CUDA: where it finds no GPU it refuses to train, unless it is told to use the CPU
DEVICE ?= $(if $(shell nvidia-smi --list-gpus 2>/dev/null || amd-smi list 2>/dev/null),auto,cpu)
# The first folder that no run has used: a run is never written over
unused = $$(dir=runs/$(1); n=2; while [ -s "$$dir/metrics.jsonl" ]; do dir=runs/$(1)-$$n; n=$$((n+1)); done; echo $$dir)
# The newest export of `make train`; tokenizer.json stands in it since it is a model to chat with
pretrained = $$(dirname $$(ls -t runs/quickstart*/hf/tokenizer.json | head -n 1))

.PHONY: install install-cuda train finetune test lint types test-long test-cuda

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is needed, this is " + sys.version.split()[0] + "; name one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

train: install
	$(BIN)/launcher train recipe=quickstart gpus=$(RANKS) run.device=$(DEVICE) run.dir=$(call unused,quickstart)

finetune: install
	ls runs/quickstart*/hf/tokenizer.json >/dev/null 2>&1 || $(MAKE) train
	$(BIN)/python recipes/arithmetic.py generate runs/arithmetic
	model=$(pretrained); dir=$(call unused,finetune); \
	$(BIN)/launcher train recipe=finetune gpus=$(RANKS) run.device=$(DEVICE) model.path=$$model run.dir=$$dir && \
	echo "before:" && $(BIN)/python recipes/arithmetic.py accuracy $$model runs/arithmetic && \
	echo "after:" && $(BIN)/python recipes/arithmetic.py accuracy $$dir/hf runs/arithmetic

test: lint types
	$(BIN)/python -m pytest -m 'not long and not gpu'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

install-cuda: $(CUDA_INSTALLED)

$(CUDA_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CUDA_VENV)
	grep -v '^torch==' constraints.txt >$(CUDA_VENV)/constraints.txt
	$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(CUDA_VENV)/constraints.txt 'torch===$(CUDA_TORCH)' --editable '.[dev]'
	touch $(CUDA_INSTALLED)

test-cuda: install-cuda
	$(CUDA_VENV)/bin/python -m pytest -m 'not long' tests/nullgpu

test-long: lint types
	$(BIN)/python -m pytest -m 'not gpu'
