# make demo   run the demo in three minutes; another task: make demo ARGS="--task imdb --limit 2000"
# make test   lint, types and tests
# make lint   lint and types only
# make docs   build the documentation into build/docs, with all links checked
# make kills  kill 1,000 runs at random moments and resume them; fewer: make kills ARGS="--kills 100"
# make bench  the overhead of a step against the hand-written loop
# make packages  compare packages from PyPI that are built on Lightning, under Lightning (.venv-packages) and under hasten
# make deepspeed  run the tests of DeepSpeed, in an environment of its own (.venv-deepspeed); needs g++
# make xla    train on XLA devices (.venv-xla, with PJRT_DEVICE=CPU; on a machine with TPUs: make xla PJRT_DEVICE=TPU)
# make peers  compare larger programs under Lightning (.venv-peers) and under hasten
#
# The environment is created in .venv from constraints.txt, and renewed when that file or pyproject.toml changes. For
# `make demo` it has only what the demo needs.

PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
PACKAGES ?= .venv-packages
XLA ?= .venv-xla
PJRT_DEVICE ?= CPU
DEEPSPEED ?= .venv-deepspeed
ARGS ?=
# Test processes that run side by side, with one thread each.
JOBS ?= 2

# The tests start hundreds of processes. Without bytecode, each would compile all of torch anew: 10 s instead of 3.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo

.DEFAULT_GOAL := help
.PHONY: help env demo test lint docs kills bench deepspeed xla peers packages clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

env: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hasten needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Modules are compiled when they are first imported, which most of these packages' never are.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
		--constraint constraints.txt --editable '.[demo]'
	@touch $@

demo: $(DEMO_STAMP)
	$(BIN)/hasten demo $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
		$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The documentation is in build/docs. To read it: $(BIN)/python -m http.server --directory build/docs"

kills: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kills.py $(ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py $(ARGS)

deepspeed: $(DEEPSPEED)/.installed
	OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(abspath $(DEEPSPEED))/extensions \
		PATH="$(abspath $(DEEPSPEED))/bin:$$PATH" $(DEEPSPEED)/bin/python -m pytest -n 0 tests/strategies/test_deepspeed.py $(ARGS)

# DeepSpeed is built here, with the torch that is installed; its extensions when they are first used.
$(DEEPSPEED)/.installed: pyproject.toml constraints.txt tests/strategies/deepspeed_requirements.txt
	test -x $(DEEPSPEED)/bin/python || $(PYTHON) -m venv $(DEEPSPEED)
	$(DEEPSPEED)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	DS_ACCELERATOR=cpu $(DEEPSPEED)/bin/python -m pip install --quiet --constraint constraints.txt \
		--no-build-isolation --requirement tests/strategies/deepspeed_requirements.txt
	@touch $@

peers: $(STAMP) $(PEERS)/.installed
	OMP_NUM_THREADS=1 HASTEN_PEER_PYTHON=$(abspath $(PEERS))/bin/python \
		$(BIN)/python -m pytest tests/peers $(ARGS)

$(PEERS)/.installed: tests/peers/requirements.txt constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt \
		--requirement tests/peers/requirements.txt
	@touch $@

packages: $(STAMP) $(PACKAGES)/.installed
	OMP_NUM_THREADS=1 HASTEN_PACKAGES_PYTHON=$(abspath $(PACKAGES))/bin/python \
		$(BIN)/python -m pytest tests/packages $(ARGS)

# The packages need their own versions; only torch comes from constraints.txt.
$(PACKAGES)/.installed: tests/packages/requirements.txt constraints.txt
	test -x $(PACKAGES)/bin/python || $(PYTHON) -m venv $(PACKAGES)
	grep '^torch==' constraints.txt > $(PACKAGES)/constraints.txt
	$(PACKAGES)/bin/python -m pip install --quiet --constraint $(PACKAGES)/constraints.txt \
		--requirement tests/packages/requirements.txt
	@touch $@

xla: $(XLA)/.installed
	OMP_NUM_THREADS=1 PJRT_DEVICE=$(PJRT_DEVICE) $(XLA)/bin/python -m pytest tests/xla $(ARGS)

# The build of torch without CUDA is smaller. It is not on PyPI; where its index cannot be reached, that of PyPI is taken.
$(XLA)/.installed: pyproject.toml constraints-xla.txt
	test -x $(XLA)/bin/python || $(PYTHON) -m venv $(XLA)
	-$(XLA)/bin/python -m pip install --quiet --retries 0 --constraint constraints-xla.txt --no-deps \
		--index-url https://download.pytorch.org/whl/cpu torch
	$(XLA)/bin/python -m pip install --quiet --constraint constraints-xla.txt --editable '.[tpu]' pytest
	@touch $@

clean:
	rm -rf $(VENV) $(DEEPSPEED) $(PEERS) $(PACKAGES) $(XLA) .mypy_cache .pytest_cache .ruff_cache hasten-demo
