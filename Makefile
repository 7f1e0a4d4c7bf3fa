# `make quickstart` runs the main job, `make test` the tests; either works first, from a clean clone.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
CORE := 0.16.1
CORE_NEXT := 0.19.2
TORCH := torch==2.13.0
TORCH_NEXT := torch==2.14.1
# In CI: all but the long tests and those for a GPU.
CI_TESTS := -m "not full and not gpu"

.PHONY: help env env-next env-017 env-018 quickstart test test-fast test-full check bench gpu clean

help: ## show the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | column -t -s $$'\t'

env: .venv/.ready-$(CORE) ## .venv: python3, megatron-core 0.16.1
env-next: .venv-next/.ready-$(CORE_NEXT) ## .venv-next: Python 3.12, megatron-core 0.19.2 (about 6 GB)
env-017: .venv-017/.ready-0.17.1 ## .venv-017: megatron-core 0.17.1 on the packages of .venv-next
env-018: .venv-018/.ready-0.18.1 ## .venv-018: megatron-core 0.18.1 on the packages of .venv-next

env env-next env-017 env-018:
	@:

.venv/.ready-$(CORE): setup.py .ci/install
	@.ci/install .venv $(PYTHON) $(CORE) $(TORCH)
	@touch $@

.venv-next/.ready-$(CORE_NEXT): setup.py .ci/install
	@python=$$(.ci/python312) || { echo "no Python 3.12 found; set PYTHON312=/path/to/python3.12" >&2; exit 1; }; \
	  .ci/install .venv-next "$$python" $(CORE_NEXT) $(TORCH_NEXT)
	@touch $@

.venv-017/.ready-%: .ci/layer | env-next
	@.ci/layer .venv-017 .venv-next $*
	@touch $@

.venv-018/.ready-%: .ci/layer | env-next
	@.ci/layer .venv-018 .venv-next $*
	@touch $@

quickstart: env ## a real checkpoint: load, verify, train, kill, resume, export, generate
	@.venv/bin/python -m examples.quickstart $(ARGS)

test: ## what CI runs: both environments side by side, then the two middle releases
	@.ci/test $(CI_TESTS)

test-full: ## everything that needs no GPU, on every release
	@.ci/test -m "not gpu"

test-fast: env ## under 4 minutes, on megatron-core 0.16.1
	@.ci/suites .venv '-m "not full and not gpu and not slow"'

check: env ## ruff and the style tests
	@.venv/bin/python -m ruff check .
	@.venv/bin/python -m pytest -q tests/style -m "not slow and not full"

bench: env ## training speed against Hugging Face Transformers
	@.venv/bin/python benchmarks/train_vs_hf.py $(ARGS)

gpu: env ## on a machine with one GPU: tests marked gpu, parity in fp32 and bf16, tokens/s and MFU
	@status=0; .venv/bin/python -m pytest -q -m gpu tests/gpu || status=1; \
	  .venv/bin/python -m benchmarks.gpu $(ARGS) || status=1; exit $$status

clean: ## remove the environments and what runs left
	rm -rf .venv .venv-next .venv-017 .venv-018 runs build *.egg-info
