# `make serve` and `make test` set up everything they need; `make help` lists the rest.

# By default the newest that we support and that is found here: what most who install jaxllm have.
PYTHON ?=
MODEL  ?= smollm2-135m
ARGS   ?=

VENV := .venv
BIN  := $(VENV)/bin
GPU  := $(abspath .venv-gpu)
TPU  := $(abspath .venv-tpu)
# Modules are compiled when they are first imported, which most of a large package's never are.
PIP  := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
UV   := $(shell command -v uv 2>/dev/null)
# Many packages, which take a while: uv, where it is, is the quickest; both say how far they are.
INSTALL := $(if $(UV),$(UV) pip install --python $(BIN)/python,$(filter-out --quiet,$(PIP)))
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve test test-all test-hardware test-versions test-web test-ray test-agents web check check-web check-deploy check-gpu check-tpu docs dist format bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10
	@echo
	@echo "MODEL=Qwen/Qwen3-0.6B picks another model; ARGS='--port 9000' is passed on to the command."

# With this environment first in PATH, which tool servers look for their programs in.
serve: $(VENV)/.installed ## Serve SmolLM2-135M-Instruct on http://127.0.0.1:8000
	PATH="$(abspath $(BIN)):$$PATH" exec jaxllm serve $(MODEL) $(ARGS)

test: $(VENV)/.installed-dev ## Run the tests
	$(BIN)/jaxllm pull smollm2-135m
	$(BIN)/jaxllm pull gemma3-270m
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

test-all: $(VENV)/.installed-dev ## Run these tests with all of their cases, and those of whole programs, three quarters of an hour
	$(BIN)/jaxllm pull smollm2-135m
	$(BIN)/jaxllm pull gemma3-270m
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'not slow and not hardware' $(ARGS)

test-hardware: check-gpu check-tpu test-web ## Run the tests for GPUs, TPUs and browsers, none of which but the browser need be there

test-versions: $(VENV)/.installed-dev ## Run a tenth of the tests on each Python found here, with the newest and the oldest versions
	$(BIN)/jaxllm pull smollm2-135m
	$(BIN)/jaxllm pull gemma3-270m
	$(BIN)/python tests/support/versions.py $(ARGS)

test-web: $(VENV)/.installed-dev ## Drive the page in Chromium; PICTURES=1 makes the pictures of docs/serving.md
	$(BIN)/python -c 'import playwright' 2>/dev/null || $(PIP) --editable '.[web-test]'
	cd web && npm ci --silent
	$(BIN)/jaxllm pull smollm2-135m
	$(BIN)/python -m pytest -m hardware tests/web $(ARGS)

test-ray: $(VENV)/.installed-dev ## Run the tests of replicas on Ray Serve, and of routers in front of servers; installs them: 600 MB
	$(BIN)/python -c 'import ray.serve, sglang_router, vllm_router' 2>/dev/null || $(PIP) --editable '.[ray]' sglang-router vllm-router
	$(BIN)/python -m pytest tests/test_ray.py tests/serving/test_routers.py $(ARGS)

test-agents: $(VENV)/.installed-dev ## Run coding agents and clients from npm (Claude Code, Codex, opencode, ollama) before our servers; installs them: 1.2 GB
	cd tests/agents && npm ci --silent
	$(BIN)/jaxllm pull smollm2-135m
	$(BIN)/python -m pytest -m programs tests/agents tests/serving/ollama $(ARGS)

web: ## Build the page from web/ into jaxllm/serving/web/static; needs Node 20.19 or newer
	cd web && npm ci --silent && npm run build

check-web: web ## Build the page, compare with what is committed, check its types and run its unit tests
	@test -z "$$(git status --porcelain jaxllm/serving/web/static)" \
		|| { echo "jaxllm/serving/web/static is not what web/ builds; commit it:" >&2; git status --short jaxllm/serving/web/static >&2; exit 1; }
	cd web && npm test

check-deploy: $(VENV)/.installed-dev ## Check the files of deploy/ with the programs that read them
	$(BIN)/python -c 'import check_jsonschema' 2>/dev/null || $(PIP) --editable '.[deploy-test]'
	$(BIN)/python -m pytest tests/test_deploy.py $(ARGS)

check: $(VENV)/.installed-dev ## Lint, check formatting, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

check-gpu: $(GPU)/.installed ## Run a GPU's kernels, interpreted, compile for an H100, neither of which need be there, and look at the programs; ARGS='-m hardware' takes all
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'hardware and not thorough and not slow' tests/pallas_kernels tests/models
	PYTHONPATH=$(GPU) $(BIN)/python -m pytest -n 2 --dist worksteal -m 'hardware and not slow' tests/gpu $(ARGS)

check-tpu: $(TPU)/.installed ## Compile for a TPU v5e, which need not be there, and look for copies of pages
	JAX_PLATFORMS=cpu JAX_ENABLE_COMPILATION_CACHE=false PYTHONPATH=$(TPU) $(BIN)/python -m pytest -m hardware tests/tpu $(ARGS)

docs: $(VENV)/.installed-docs ## Build the documentation's site into build/docs and check its links
	$(BIN)/python -m tests.support.build_docs

dist: $(VENV)/.installed-dev ## Build what a release has into dist/, install each file into an empty environment and ask it
	$(BIN)/python -c 'import twine' 2>/dev/null || $(PIP) --editable '.[dist]'
	$(BIN)/jaxllm pull smollm2-135m
	$(BIN)/python -m tests.support.build_dist

format: $(VENV)/.installed-dev ## Format the code and fix what the linter can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.installed ## Measure prefill and decode at 1, 4, 16 and 32 streams
	$(BIN)/jaxllm bench throughput $(MODEL) --num-streams 1 4 16 32 $(ARGS)

clean: ## Remove the virtual environment and caches; downloaded models stay in ~/.cache/jaxllm
	rm -rf $(VENV) $(GPU) $(TPU) .venv-versions web/node_modules tests/agents/node_modules build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find jaxllm tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "Setting up $(VENV), once: about 100 packages, 250 MB to download, a minute or so"
	@python="$(PYTHON)"; python="$${python:-$$(python3 tests/support/versions.py --newest-python)}"; \
	test -n "$$python" && $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "jaxllm needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }; \
	echo "$$python -m venv $(VENV)"; $$python -m venv $(VENV)
	$(if $(UV),,$(PIP) --upgrade pip)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

# Beside the environment and not in it: JAX takes up every plugin that it finds there.
$(GPU)/.installed: $(VENV)/.installed-dev
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); \
	$(PIP) --no-deps --upgrade --target $(GPU) \
		jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version nvidia-cuda-nvcc nvidia-nvvm
	@touch $@

$(TPU)/.installed: $(VENV)/.installed-dev
	needed=$$($(BIN)/python -c 'from importlib.metadata import requires; \
		print(*(r.split(";")[0] for r in requires("jax") if r.startswith("libtpu")))'); \
	$(PIP) --no-deps --upgrade --target $(TPU) "$$needed"
	@touch $@

# The packages of the extra alone: the site is made from the sources, without running them.
$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(PIP) $$($(BIN)/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed
