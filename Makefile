# One word per wish. On a fresh machine with Python 3.11+, a C++ compiler and make, each target
# sets up what it needs in .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIVE_STAMP := $(VENV)/.installed-live
NATIVE_STAMP := $(VENV)/.installed-native
WHEEL_STAMP := $(VENV)/.installed-wheel
NATIVE := $(shell find kernels -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt)
# pip installs uv, which installs the rest in a third of the time, and torch, of which pip may know
# a build for CPUs in a folder, as uv does not.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt
# What builds the package is in .venv itself: the next build finds it at the same place, and compiles
# what changed.
BUILD = $(UV) cmake nanobind ninja scikit-build-core && \
  $(UV) --no-build-isolation --reinstall-package warmroute
DEMO_FLAGS ?=
ENGINE ?= timed
# Real engines that `make test-engines` installs; `make test-all` adds older releases.
ENGINES ?= vllm==0.32.0 sglang==0.5.23 triton==2.51
CLIENTS := clients==1 perf_analyzer==2.50 envoy==1.40.0 torchvision==0.28.0 bfcl==2026.3.23
SIM_FLAGS ?=
STUDY_FLAGS ?=
FIGURES_FLAGS ?=
PICTURES_FLAGS ?=
BENCH_FLAGS ?=
WHEEL_FLAGS ?=
# Tests start hundreds of Pythons: where the environment lets none keep what it compiled, each would
# compile all of this anew, and pytest all tests.
export PYTHONDONTWRITEBYTECODE :=
# Side by side: one more than there are cores, for many tests wait. `make test JOBS=0`: one by one.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# Real engines side by side: each process of tests starts two servers of a gigabyte or more.
ENGINE_JOBS ?= 2
PYTEST := $(BIN)/python -m pytest
# What fails is tried once more, alone: FLAKY, or broken.
TIER := $(BIN)/python -m tests.run_tier
BY_GROUP := --dist loadgroup --no-loadscope-reorder
PARALLEL = --numprocesses $(JOBS) $(BY_GROUP)
BENCHES := decision on_top sessions mirror owners tokens scheduler engine virtual traces request_log reading request_path tracing relay migration dataplane feeds replay ui scrape replicas sharing
TRACE ?= simulator/data/conversation_sample.jsonl.gz

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-vllm run test test-live test-native environments test-engines test-all \
  check check-lint check-types check-arrows check-tidy bench sim study figures pictures wheel image chart clean

help: ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install there

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@echo "$@: what all tests need, torch (CUDA's libraries with it) among it: some 2 GB; once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) uv torch
	$(BUILD) --editable '.[dev]'
	@touch $@

# What only some targets need: clients and schemas, CUDA's disassemblers, zig. Nothing of ours is built again.
$(LIVE_STAMP) $(NATIVE_STAMP) $(WHEEL_STAMP): $(VENV)/.installed-%: $(STAMP)
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['dev-$*'], sep='\n')" \
	  | $(UV) -r -
	@touch $@

# What the demo needs, where nothing is installed yet; `make test` adds its own to it.
$(VENV)/.installed-demo: pyproject.toml constraints.txt $(NATIVE)
	@echo "$@: the router, the timed worker and the simulator, built here; no torch; once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) uv
	$(BUILD) --editable '.[demo]'
	@touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.installed-demo) ## a hot spot and its cure in two minutes; report in build/demo
	$(BIN)/warmroute-sim demo --out build/demo $(DEMO_FLAGS)

demo-vllm: $(STAMP) ## two real vLLM servers on the CPU: round robin beside ours, in five minutes
	$(BIN)/python -m tests.engines.environment $(filter vllm==%,$(ENGINES))
	$(BIN)/python -m tests.engines.prefix_workload $(DEMO_FLAGS)

run: $(if $(wildcard $(STAMP))$(filter tiny,$(ENGINE)),$(STAMP),$(VENV)/.installed-demo) ## a router and four timed workers, until Ctrl-C; ENGINE=tiny: two that compute
ifeq ($(ENGINE),tiny)
	@test -f build/tiny/config.json || $(BIN)/warmroute-engine make-tiny build/tiny
	$(BIN)/warmroute-sim stack --model build/tiny --workers 2
else
	$(BIN)/warmroute-sim stack
endif

# tests/tidy is a part of `make check`, and of nothing else.
test: $(STAMP) ## the quick tests, in 5 to 12 minutes on two cores
	$(TIER) quick --ignore tests/tidy --durations 20 $(PARALLEL)

test-live: $(LIVE_STAMP) ## programs with faults, replicas, clients, Prometheus, a browser
	$(TIER) live --durations 20 $(PARALLEL)

test-native: $(NATIVE_STAMP) ## sanitizers, fuzzers, the CUDA emulator, nvcc; builds stay in build/
	$(TIER) native --durations 20 $(PARALLEL)

environments: $(STAMP) ## real vLLM, SGLang, Triton, Envoy and clients, below build/engines (4 GB)
	$(BIN)/python -m tests.engines.environment $(ENGINES) $(CLIENTS)

test-engines: $(LIVE_STAMP) environments ## before real engines, which are installed the first time
	ENGINES='$(ENGINES)' $(TIER) engines --durations 20 --numprocesses $(ENGINE_JOBS) $(BY_GROUP)

test-all: $(LIVE_STAMP) $(NATIVE_STAMP) $(WHEEL_STAMP) ## all of these and soaks, chaos, planted slips, at full length
	$(BIN)/python -m tests.engines.environment $(ENGINES) $(CLIENTS) vllm==0.31.0 vllm==0.30.0 llamacpp==0.3.36
	TEST_EFFORT=20 $(TIER) all --timeout 1800 $(PARALLEL)

check: check-lint check-types check-arrows check-tidy ## format, lint, types, arrows, tidy; -j2: side by side

check-lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

check-types: $(STAMP)
	$(BIN)/mypy

check-arrows: $(STAMP)
	$(BIN)/lint-imports

check-tidy: $(STAMP)
	$(PYTEST) -q tests/tidy

# Flags of those that print ratios of the index and the decision: BENCH_FLAGS='--json --dynamo PYTHON'
bench: $(STAMP) ## benchmarks, as ratios within one run
	@for bench in index events route; do echo "== $$bench"; \
	  $(BIN)/python -m tests.bench.$$bench $(BENCH_FLAGS) || exit 1; done
	@for bench in $(BENCHES); do echo "== $$bench"; \
	  $(BIN)/python -m tests.bench.$$bench || exit 1; done

sim: $(STAMP) ## which policy? a trace on virtual time: make sim TRACE=FILE SIM_FLAGS='--workers 4'
	$(BIN)/warmroute-sim replay '$(TRACE)' $(SIM_FLAGS)

study: $(STAMP) ## the sweeps behind docs/notes/policy-study.md, resumed: make study STUDY_FLAGS='--full --traces DIR'
	$(BIN)/warmroute-sim study --out build/study $(STUDY_FLAGS)

figures: $(STAMP) ## what commands print in README and docs, and figures of the demo, made anew
	$(BIN)/python -m tests.simulator.figures_in_docs $(FIGURES_FLAGS)

# Flags: PICTURES_FLAGS='ui --record'
pictures: $(STAMP) ## the pictures of README and docs, made anew by a headless chromium
	$(BIN)/python -m tests.live.pictures $(PICTURES_FLAGS)

# Flags: WHEEL_FLAGS='--arch x86_64 --python python3.13 --no-sdist'
wheel: $(WHEEL_STAMP) ## wheels for x86_64 and aarch64, and an sdist, in dist/
	$(BIN)/python -m release.wheels $(WHEEL_FLAGS)

image: $(WHEEL_STAMP) ## an OCI image of this machine's wheel and Debian's Python, in build/
	$(BIN)/python -m release.wheels --no-sdist --arch $$(uname -m)
	$(BIN)/python -m release.image

chart: $(LIVE_STAMP) ## the Helm chart, checked and packaged, in dist/
	$(BIN)/python -m release.chart

clean: ## remove .venv, build and dist
	rm -rf $(VENV) build dist
