# make demo: an RL run on the CPU. make test: the tests. Both first install what is missing into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS ?= dev
# tests of make test-slow; continuous integration runs a subset
SLOW ?= tests
# pytest workers; a distributed test starts 2 to 4 more processes
TEST_WORKERS ?= 3
# torch threads per worker
TEST_THREADS ?= 1
TESTS ?= tests
PYTEST := OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile

# Write bytecode even if the image disables it: hundreds of test processes import our modules.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo test test-extended test-slow test-processors test-pretend-gpu te-python fuzz search-layouts search-configurations test-learning test-slurm sglang-env test-sglang vllm-env test-vllm cookbook-env test-cookbook environments-env test-environments newest-env test-newest see-env test-see pictures test-skypilot trl-env bench-trl gpu-check docs-env docs lint format typecheck flags proto parity parity-full clean

install: $(STAMP)

# constraints.txt pins torch. Installing it first lets pip take a CPU build if the index offers one.
$(STAMP): pyproject.toml constraints.txt setup.py
	@echo "install 1/4: a virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "install 2/4: pip"
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "install 3/4: torch, which is large: minutes on a slow connection"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	@echo "install 4/4: slime_like and the extra $(EXTRAS), 1 to 3 minutes; pip reports only problems"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $(STAMP)
	@echo "install: done"

demo: install
	bash scripts/demo.sh

# about 5 minutes on 2 idle cores
test: install
	$(PYTEST) -m "not slow and not extended and not gpu and not pretend_gpu and not slurm and not sglang and not vllm and not cookbook and not environments and not see and not learning and not search" $(TESTS)

# more layouts, kills and servers than make test
test-extended: install
	$(PYTEST) -m "extended and not slow and not see" $(TESTS)

test-slow: install
	$(PYTEST) -m "slow and not sglang and not vllm and not cookbook and not environments and not see" $(SLOW)

# make test with smaller CPU instruction sets and other numbers of threads
test-processors:
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(MAKE) test TEST_THREADS=2
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(MAKE) test TEST_THREADS=4
	ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512 $(MAKE) test

# Transformer Engine's Python alone, 1 MB, for tests of where it is installed; without it they are skipped
TE_PYTHON := .te-python

te-python:
	test -d $(TE_PYTHON) || $(BIN)/python -m pip install --quiet --no-deps --target $(TE_PYTHON) transformer-engine==2.20.2 \
	  || echo "no transformer-engine: its tests are skipped"

# The CUDA paths, on a CPU build of torch that believes in two GPUs (tests/pretend_gpu/environment.py); -rs prints why
# tests are skipped: it needs the pinned torch and g++. 5 minutes on 2 idle cores.
test-pretend-gpu: install te-python
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -n 0 tests/pretend_gpu

# seed of make fuzz, and examples of a test
FUZZ_SEED ?= 0
FUZZ_EXAMPLES ?= 20000

# Hypothesis-generated engine answers, checkpoints, rows and API bodies; about an hour
fuzz: install
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --timeout 7200 --hypothesis-profile long --hypothesis-seed $(FUZZ_SEED) tests/fuzz

# Random families, features, layouts and releases against one process in float64, about 15 s an example;
# OTHER_PYTHON: an environment with another megatron-core
SEED ?= 0
EXAMPLES ?= 200
OTHER_PYTHON ?= $(wildcard $(CURDIR)/.venv-newest/bin/python)

search-layouts: install
	SEARCH_EXAMPLES=$(EXAMPLES) OTHER_PYTHON=$(OTHER_PYTHON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -n 0 -m search --hypothesis-seed $(SEED) tests/search/test_layouts.py

# random configurations of a family in make search-configurations
CONFIGURATIONS ?= 7

# Random configurations of every family against transformers in float64; a quarter of an hour
search-configurations: install
	SEARCH_SEED=$(SEED) SEARCH_CONFIGURATIONS=$(CONFIGURATIONS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m search tests/search/test_configurations.py

# seeds of make test-learning, for example LEARNING_SEEDS="1 2 3"
LEARNING_SEEDS ?= 1

# runs from random weights that must reach a reward; minutes each
test-learning: install
	LEARNING_SEEDS="$(LEARNING_SEEDS)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m learning tests/learning

# -rs prints why tests are skipped if SLURM is not installed
test-slurm: install
	SGLANG_ENV=$(SGLANG_ENV) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m "slurm" tests/slurm

# SGLang on the CPU, in a separate environment (2.5 GB); may point to an existing one
SGLANG_ENV ?= $(CURDIR)/.venv-sglang

sglang-env:
	PYTHON=$(PYTHON) bash scripts/make_server_env.sh scripts/sglang_cpu $(SGLANG_ENV)

# real servers, a router, and end-to-end runs; minutes
test-sglang: install sglang-env
	SGLANG_ENV=$(SGLANG_ENV) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m sglang tests/sglang

# vLLM on the CPU, in a separate environment (2 GB); may point to an existing one
VLLM_ENV ?= $(CURDIR)/.venv-vllm

vllm-env:
	PYTHON=$(PYTHON) bash scripts/make_server_env.sh scripts/vllm_cpu $(VLLM_ENV)

# real servers and end-to-end runs; minutes
test-vllm: install vllm-env
	VLLM_ENV=$(VLLM_ENV) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m vllm tests/vllm

# tinker-cookbook pins another transformers, so it has a separate environment (2 GB)
COOKBOOK_ENV ?= $(CURDIR)/.venv-cookbook

cookbook-env:
	PYTHON=$(PYTHON) bash scripts/make_cookbook_env.sh $(COOKBOOK_ENV)

# tinker-cookbook's loops against a server; minutes
test-cookbook: install cookbook-env
	COOKBOOK_ENV=$(COOKBOOK_ENV) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m cookbook tests/cookbook

# OpenEnv, NeMo Gym and Harbor, each in an environment of its own (2 GB together); Python 3.12 or newer
ENVIRONMENTS_ENV ?= $(CURDIR)/.venv-environments

environments-env:
	PYTHON=$(NEWEST_PYTHON) bash scripts/make_environments_env.sh $(ENVIRONMENTS_ENV)

# environments that these packages ship, played by a policy; minutes. -rs prints which are skipped
test-environments: install environments-env
	ENVIRONMENTS_ENV=$(ENVIRONMENTS_ENV) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m environments tests/environments

# An environment with the newest installed Python (pyenv's included) and the newest megatron-core for it;
# 0.17 and later need Python 3.12.
PYENV_PYTHONS := $(foreach version,3.13 3.12,$(lastword $(sort $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/$(version).*/bin/python))))
NEWEST_PYTHON ?= $(shell for python in python3.13 python3.12 $(PYENV_PYTHONS); do if $$python -c "" 2>/dev/null; then echo $$python; break; fi; done)
NEWEST_ENV := .venv-newest
# tests of make test-newest; continuous integration runs a subset
NEWEST_TESTS ?= tests

newest-env:
	@test -n "$(NEWEST_PYTHON)" || { echo "no newer megatron-core is tested: neither Python 3.13 nor 3.12 is here; NEWEST_PYTHON=... names one"; exit 1; }
	$(MAKE) install VENV=$(NEWEST_ENV) PYTHON=$(NEWEST_PYTHON)

# Also resumes checkpoints of .venv's megatron-core under .venv-newest's, and back.
test-newest: install newest-env
	$(MAKE) test VENV=$(NEWEST_ENV) PYTHON=$(NEWEST_PYTHON) TESTS="$(NEWEST_TESTS)"
	OTHER_PYTHON=$(CURDIR)/$(NEWEST_ENV)/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/dist/test_releases.py

# Packages of the trackers, the site and browser automation: 1 GB on top of .venv, which it imports from.
SEE_ENV ?= .venv-see

see-env: $(SEE_ENV)/.installed

$(SEE_ENV)/.installed: pyproject.toml constraints.txt $(STAMP)
	test -x $(SEE_ENV)/bin/python || $(BIN)/python -m venv $(SEE_ENV)
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
	  > $$($(SEE_ENV)/bin/python -c "import site; print(site.getsitepackages()[0])")/packages_of_dev.pth
	PYTHONWARNINGS=ignore $(SEE_ENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[see]"
	@touch $@

# The report and the site in headless Chromium (apt-get install chromium), also with axe-core, and the trackers' files.
# -rs prints why tests are skipped if there is no browser.
test-see: see-env
	OMP_NUM_THREADS=1 $(SEE_ENV)/bin/python -m pytest -q -rs -m see tests/see

# The pictures of README.md and the documents, again; the runs that they show are made where they are missing, in about
# 10 minutes of 2 idle cores.
pictures: see-env
	test -f outputs/demo-sapo-tp2/rl/report.png || $(MAKE) demo
	test -f outputs/images-one/rl/report.png || bash scripts/demo_images.sh
	$(BIN)/python benchmarks/starter_table.py --output-dir outputs/starters --only grpo tool --seeds 1
	$(SEE_ENV)/bin/python scripts/docs_pictures.py
	PICTURES=docs/images OMP_NUM_THREADS=1 $(SEE_ENV)/bin/python -m pytest -q -rs -m see tests/see/test_faulty_runs.py

# The task of scripts/skypilot as SkyPilot's package reads it, in a separate environment of 0.5 GB
SKY_ENV ?= .venv-sky

test-skypilot: install
	test -x $(SKY_ENV)/bin/python || $(PYTHON) -m venv $(SKY_ENV)
	$(SKY_ENV)/bin/python -m pip install --quiet "skypilot>=0.10,<1"
	SKYPILOT_PYTHON=$(CURDIR)/$(SKY_ENV)/bin/python $(BIN)/python -m pytest -q -rs -n 0 tests/unit/scripts/test_cluster_manifests.py

# TRL in a separate environment, to compare the time of a step
TRL_ENV ?= .venv-trl

trl-env:
	test -x $(TRL_ENV)/bin/python || $(PYTHON) -m venv $(TRL_ENV)
	$(TRL_ENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(TRL_ENV)/bin/python -m pip install --quiet --constraint constraints.txt "trl>=1.16,<2" datasets accelerate

bench-trl: install trl-env
	$(BIN)/python benchmarks/bench_against_trl.py --trl-python $(TRL_ENV)/bin/python

# The documentation site in outputs/site, built in a separate environment; warnings are errors.
DOCS_ENV ?= .venv-docs

docs-env: $(DOCS_ENV)/.installed

$(DOCS_ENV)/.installed: pyproject.toml
	test -x $(DOCS_ENV)/bin/python || $(PYTHON) -m venv $(DOCS_ENV)
	$(DOCS_ENV)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" \
	  | $(DOCS_ENV)/bin/python -m pip install --quiet --requirement /dev/stdin
	@touch $@

docs: docs-env
	NO_MKDOCS_2_WARNING=1 $(DOCS_ENV)/bin/python -m mkdocs build --strict --quiet

# Checks function and speed on one GPU in at most ten minutes; CHECKS="--rehearse" runs without one.
CHECKS ?=

gpu-check: install
	$(BIN)/python benchmarks/gpu_check/run.py $(CHECKS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/generate_flags_doc.py --check
	$(BIN)/python scripts/generate_models_doc.py --check

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

flags: install
	$(BIN)/python scripts/generate_flags_doc.py

proto: install
	$(BIN)/python -m grpc_tools.protoc -Islime_like/tinker --descriptor_set_out=slime_like/tinker/tinker_public.binpb tinker_public.proto

parity: install
	$(BIN)/python benchmarks/parity_table.py

parity-full: install
	$(BIN)/python benchmarks/parity/matrix.py

clean:
	rm -rf $(VENV) $(TE_PYTHON) outputs build *.egg-info
