# `make` alone explains the targets. Everything is installed into .venv and native/build of this checkout.
# Another Python than python3 gets an environment of its own: `make test PYTHON=python3.12` uses .venv-3.12.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
# Tests run in so many processes: half of their time they wait.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? 2 * n : 16)))
SCHEDULING = tests/scenarios tests/chaos tests/integration/test_interleavings.py $(wildcard tests/integration/test_extender_*.py)
VERSION_OF := -c 'import sys; print("%d.%d" % sys.version_info[:2])'
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(shell $(PYTHON) $(VERSION_OF)))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := .tools/.fetched
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Of what pip prints, how many packages it has got to: one line that counts up, or one for each ten where nobody watches.
SAY_HOW_FAR := awk -v all=$$(grep -c '^[^ ]*==' requirements.lock) -v watched=$$(test -t 1 && echo 1 || echo 0) ' \
  function say(text, ends) { if (watched) printf "\r\033[K  %s%s", text, ends; else if (ends || found % 10 == 1) print "  " text; fflush() } \
  /^Collecting/ { found++; say(found " of at most " all ": " $$2, "") } \
  /^Installing/ { say("unpacking " found " packages", "\n") } \
  /^Successfully/ { say("done", "\n") }'
# Hundreds of tests start a process of ours: none of them is to compile every module again.
unexport PYTHONDONTWRITEBYTECODE

help: ## this text
	@echo "gpuslice: fractions of a GPU for containers on any Kubernetes cluster"
	@echo
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14 | sed 's/^/  make /'

setup: $(STAMP) native $(TOOLS) ## make .venv and the native library; the other targets do it themselves

$(STAMP): requirements.lock pyproject.toml simulator/pyproject.toml demo/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "gpuslice needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian and Ubuntu install the package python3-venv"; exit 1; }
	@echo "installing the locked dependencies into $(VENV): one to six minutes, by the network"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-warn-script-location --progress-bar off --require-hashes -r requirements.lock | $(SAY_HOW_FAR)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . --editable simulator --editable demo
	@touch $@

$(TOOLS): tests/tools.py | $(STAMP)
	@echo "fetching helm, Prometheus and etcd into .tools, for the tests"
	@$(BIN)/python -m tests.tools && touch $@

native: ## build libgpuslice.so and the simulated driver into native/build
	@$(MAKE) -C native

demo: setup ## play the whole story on simulated hardware; ARGS="--keep" leaves it running
	@$(BIN)/gpuslice demo $(ARGS)

test: setup ## all tests that need neither a card nor a cluster
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)
	@$(if $(ARGS),:,$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -p no:cacheprovider --without-speedups $(SCHEDULING))

test-changed: setup ## the tests that your change touches, against the branch main; BASE=COMMIT names another
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $$($(BIN)/python -m tests.changed) $(ARGS)

sequences: setup ## a long run of random sequences against the simulated driver; ARGS="--steps 1000000 --seed 1"
	@$(BIN)/python -m tests.integration.sequences_run $(ARGS)

chaos: setup ## faults without end, in virtual time; ARGS="--faults 1000000 --seed 1 --json"
	@PYTHONHASHSEED=0 $(BIN)/python -m tests.chaos $(ARGS)

check: $(STAMP) ## format, lint, types, layers, house rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(MAKE) -C native lint
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest tests/test_tidy.py tests/test_glossary.py

fix: $(STAMP) ## repair what ruff and clang-format can repair
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format . ; $(MAKE) -C native format

docs: .venv-docs/.installed ## the documentation as a site with search, in build/site; broken links fail
	@rm -rf build/site-source && mkdir -p build/site-source
	@git ls-files -z --cached --others --exclude-standard -- '*.md' 'docs/*' 'examples/*' 'monitoring/adapter/*' 'charts/gpuslice/ci/*' \
	  ':!simulator' ':!demo' ':!native' ':!bench' ':!tests' ':!release' | sort -zu | xargs -0 cp --parents -t build/site-source
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@echo "build/site/index.html"

.venv-docs/.installed: requirements-docs.lock
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-docs.lock
	@touch $@

pictures: setup ## the documentation's pictures: of the terminal, from the demo, and of the console, where there is a browser
	@$(BIN)/python docs/pictures/take.py
	@$(BIN)/python -m tests.integration.console_pictures

bench: setup ## every benchmark, as tables
	@$(BIN)/python -m bench $(ARGS)

results: setup ## the tables of docs/results from what benchmarks printed; ARGS="--measure interposer" runs one again
	@$(BIN)/python -m bench.pages $(ARGS)

e2e: setup ## the story on a real control plane; KUBEBUILDER_ASSETS names the folder with its binaries
	@test -n "$(KUBEBUILDER_ASSETS)" || echo "skipped: KUBEBUILDER_ASSETS is not set; it names a folder with kube-apiserver, etcd, kube-scheduler"
	@$(BIN)/python -m pytest tests/e2e -m e2e $(if $(KUBEBUILDER_ASSETS),-rs,) $(ARGS)

test-gpu: ## what only a real NVIDIA card can show; wants a C compiler, uses PyTorch and nvcc; ARGS="WORD ..."
	@$(PYTHON) tests/gpu/run.py $(ARGS)

release: setup ## say what a release would consist of; ARGS="--build --base ROOTFS" makes it in dist/
	@$(BIN)/python -m release.build $(ARGS)

tools: $(STAMP) ## fetch again what some tests need into .tools, as make setup does; ARGS=browser: a browser, installed as root
	@$(BIN)/python -m tests.tools $(ARGS)

proto: $(STAMP) ## generate the protobuf messages again
	@$(BIN)/python -m gpuslice.adapters.kubelet.proto.generate

lock: ## resolve the dependencies again into requirements.lock
	@$(PYTHON) -m venv .tools && .tools/bin/pip install --quiet uv
	@.tools/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-emit-index-url --no-emit-find-links --group dev --extra daemons --extra fast \
	  --no-emit-package gpuslice --no-emit-package simcluster pyproject.toml simulator/pyproject.toml demo/pyproject.toml -o requirements.lock
	@.tools/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-emit-index-url --no-emit-find-links --group docs -o requirements-docs.lock

clean: ## remove what was built; the virtual environment stays
	@rm -rf native/build build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo

.PHONY: help setup native demo test test-changed sequences chaos check fix docs pictures bench results e2e test-gpu release tools proto lock clean
