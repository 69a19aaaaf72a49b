# The developer's interface: `make help` lists it. Every target can be repeated and leaves nothing running.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

# The first interpreter that really runs, is new enough and can make environments; `make PYTHON=... venv` overrides it.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	"$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { command -v "$$python"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHECKPOINT := .medha/tiny

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

.PHONY: venv
venv: $(STAMP) ## create .venv with every pinned package

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer with venv was found: install one (Debian: python3-venv), or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Creating $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv $(VENV)

.PHONY: wheels
wheels: | $(BIN)/python # download torch's wheels to WHEELS=folder; with PIP_FIND_LINKS=folder, environment and images take them from there
	$(BIN)/python -m pip download --disable-pip-version-check --progress-bar off --only-binary :all: \
		--constraint constraints.txt --dest $(WHEELS) torch

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@if ! $(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit(not m.version("torch").startswith("2."))' 2>/dev/null; then \
		echo "Installing torch: where only its GPU build is at hand this downloads about 3 GB and takes minutes."; \
		echo "A CPU build (2.13.0+cpu, 200 MB) is preferred by itself where pip is offered one, e.g. by PIP_FIND_LINKS=folder."; \
	fi
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt hatchling editables
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --no-build-isolation \
		--editable '.[operator,router,worker,traces,sim,dev,docs,release]'
	@touch $@

.PHONY: run
run: $(STAMP) $(CHECKPOINT)/config.json ## serve a small random model on http://127.0.0.1:8000
	@exec $(BIN)/medha up examples/tiny.yaml

$(CHECKPOINT)/config.json: | $(STAMP)
	$(BIN)/medha model init $(CHECKPOINT) --preset tiny --seed 0

.PHONY: test
test: lint types imports tests ## every check that CI makes

.PHONY: check
check: lint types imports words ## the checks that take seconds: style, types, layers, words

.PHONY: lint types imports words tests
lint: $(STAMP)
	@.ci/row lint bash -c '$(BIN)/ruff check . && $(BIN)/ruff format --check .'
types: $(STAMP)
	@.ci/row types $(BIN)/mypy
imports: $(STAMP)
	@.ci/row imports $(BIN)/lint-imports
words: $(STAMP)
	@.ci/row words $(BIN)/python -m pytest -q tests/contracts/test_words.py tests/contracts/test_docstrings.py
tests: $(STAMP)
	@$(BIN)/python .ci/tests.py

.PHONY: test-long
test-long: $(STAMP) ## what does not fit CI: long tests and seeded campaigns; resumes where it was stopped
	@# Within the time limit of a test, Kubernetes cannot be compiled. If this fails, the tests that need it say why.
	-@$(MAKE) --no-print-directory binaries-early images-early
	@$(BIN)/python benchmarks/long.py --jobs 2

# A machine with a GPU needs no environment of ours, only torch and `transformers`: FlashInfer travels as wheels.
GPU_KIT := .gpu
GPU_PYTHON ?= $(if $(wildcard $(STAMP)),$(BIN)/python,python3)
GPU_PYTHON_VERSION ?= 3.12
GPU_RESULTS := benchmarks/results/gpu.json
.PHONY: gpu-kit
gpu-kit: $(STAMP) ## download to .gpu what `make gpu-check` needs on a machine without a package index
	$(BIN)/python -m pip download --disable-pip-version-check --progress-bar off --no-deps --only-binary :all: \
		--python-version $(GPU_PYTHON_VERSION) --implementation cp --platform manylinux_2_28_x86_64 \
		--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest $(GPU_KIT) \
		flashinfer-python==0.6.13 apache-tvm-ffi

.PHONY: gpu-check
gpu-check: ## prove and measure the engine on this machine's GPU; goes on where it was stopped
	@site=$$(mktemp -d); trap 'rm -rf "$$site"' EXIT; \
	if ls $(GPU_KIT)/*.whl >/dev/null 2>&1; then \
		$(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-compile --target "$$site" $(GPU_KIT)/*.whl; \
		[ ! -d $(GPU_KIT)/aot ] || ln -s "$(CURDIR)/$(GPU_KIT)/aot" "$$site/flashinfer/data/aot"; \
	fi; \
	FLASHINFER_USE_CUDA_NORM=1 PYTHONPATH="$(CURDIR)/core:$(CURDIR)/worker:$$site:$${PYTHONPATH:-}" PYTHONUNBUFFERED=1 \
		$(GPU_PYTHON) benchmarks/gpu.py --json $(GPU_RESULTS) $(if $(GPU_VLLM_PYTHON),--vllm-python "$(GPU_VLLM_PYTHON)")

.PHONY: binaries-early
binaries-early: # build the programs that cluster tests need, before there is an environment
	@nice -n 4 "$(PYTHON)" tests/cluster/binaries.py

# Images and clusters need no torch here: without .venv they get an environment of a few megabytes.
SMALL := .medha/python
CLUSTER_PYTHON = $(if $(wildcard $(STAMP)),$(BIN),$(SMALL)/bin)/python
.PHONY: cluster-python
cluster-python:
	@test -e $(STAMP) || test -e $(SMALL)/.installed || { \
		"$(PYTHON)" -m venv $(SMALL); \
		$(SMALL)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt trustme; \
		touch $(SMALL)/.installed; }

TORCH ?= cpu
.PHONY: images images-early
images: cluster-python ## build the container images without a registry (Debian's buildah); prints the archives; TORCH=cpu|pypi|none
	@.ci/row images $(CLUSTER_PYTHON) tests/cluster/images.py --torch $(TORCH)
images-early: # build the images that tests need, before they need them
	@nice -n 10 $(BIN)/python tests/cluster/images.py --for-tests >/dev/null

SHAPE ?= one-node
.PHONY: cluster demo
cluster: cluster-python ## a Kubernetes of your own until Ctrl-C; SHAPE=control-plane|one-node|two-nodes KWOK=nodes IMAGES="medha|ARCHIVE ..." MODELS=folder
	@PYTHONPATH=tests exec $(CLUSTER_PYTHON) -m cluster --shape $(SHAPE) --settings .medha/cluster.env \
		$(if $(KWOK),--kwok $(KWOK)) $(IMAGES:%=--image %) $(if $(MODELS),--models $(MODELS))
demo: cluster-python ## from nothing to a chat answer of a replica in a cluster of your own, by the README's commands; until Ctrl-C
	@PYTHONPATH=tests exec $(CLUSTER_PYTHON) -m cluster.demo

.PHONY: campaign
campaign: simulations faults ## both campaigns: the papers' claims simulated, and the operator under faults; each resumes where it was

MODE ?= full
.PHONY: simulations
simulations: $(STAMP) ## simulate the papers' claims and write docs/reproduction.md, 90 minutes on two cores; MODE=quick takes two
	@$(BIN)/python benchmarks/campaign.py --mode $(MODE)

.PHONY: faults
faults: $(STAMP) ## kill the operator at every write, show it the past, change every field, on a real API server; an hour
	@PYTHONPATH=tests $(BIN)/python -m campaign --json benchmarks/results/faults.json $(ARGS)
	@PYTHONPATH=tests $(BIN)/python -m campaign.fields --json benchmarks/results/fault-fields.json

.PHONY: clients
clients: $(STAMP) ## run clients of other projects against `medha up`, and write docs/clients.md; installs 5 GB once, and vLLM
	@$(BIN)/python benchmarks/clients.py --json benchmarks/results/clients.json
	@$(BIN)/python benchmarks/clients.py --page docs/clients.md

.PHONY: format
format: $(STAMP) ## let ruff write the code's form
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

.PHONY: site
site: $(STAMP) ## build docs/ into a site in dist/site, which needs no other host
	@$(BIN)/python docs/site/build.py dist/site

RELEASE = PYTHONPATH=release $(BIN)/python -m medha_release
.PHONY: version release release-check
version: $(STAMP) ## begin a version: VERSION=0.2.0 writes it where it stands, and moves what CHANGELOG.md has as unreleased to it
	@PYTHONPATH=release $(BIN)/python -m medha_release.versions $(VERSION)
	@$(MAKE) gen
release: $(STAMP) ## make the release of this commit in dist/, and go on where a run was stopped; VERSION=0.2.0 IMAGES="router ..."|none TORCH=cpu|pypi|none
	@$(RELEASE) make --torch $(TORCH) $(if $(VERSION),--version $(VERSION)) $(if $(IMAGES),--images "$(IMAGES)")
release-check: $(STAMP) ## compare a release's files with its manifest; FOLDER=dist/medha-0.2.0
	@$(RELEASE) check $(FOLDER)

.PHONY: gen
gen: $(STAMP) ## write the generated files: the version where it stands, crds/, charts/, dashboards/, docs/cli.md, docs/http-fields.md, docs/metrics.md, docs/modules.md, tables of docs/gpu.md, docs/models.md and the pages of docs/performance*.md
	PYTHONPATH=release $(BIN)/python -m medha_release.versions
	$(BIN)/python -m medha_cli.reference docs
	$(BIN)/python -m medha_operator.crds crds
	$(BIN)/python dashboards/generate.py dashboards charts/medha/files/dashboards
	$(BIN)/python charts/generate.py
	$(BIN)/python -m tests.worker.kernels.flashinfer_defects
	$(BIN)/python benchmarks/gpu_page.py
	$(BIN)/python benchmarks/models_page.py
	$(BIN)/python benchmarks/convoy_page.py
	$(BIN)/python benchmarks/clients.py --page docs/clients.md

.PHONY: clean
clean: ## remove .venv, caches, and .medha with all that was made in it (checkpoints, cluster.env)
	rm -rf $(VENV) .medha .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
