# Each target does its own set-up (ci/setup_venv.py), which takes minutes the first time and none afterwards.
#
#   PYTHON=...       the Python (>= 3.11) to make the virtual environment with
#   TORCH_INDEX=...  a further package index that holds PyTorch's CPU build
#   VENV=... VLLM=... another virtual environment with another version of vLLM than the one that Nitro is tested with

PYTHON ?=
VENV ?= .venv
VLLM ?=
TORCH_INDEX ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=

export VENV PYTEST_ARGS
unexport PYTHONDONTWRITEBYTECODE  # imports write the bytecode that set-up leaves out

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format types native kernels python clean clean-venv

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1 — /p' $(MAKEFILE_LIST)

setup: ## make the virtual environment ready
	@python="$(PYTHON)"; for p in python3 python3.13 python3.12 python3.11; do \
	  [ -z "$$python" ] || break; \
	  ! $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || python=$$p; \
	done; \
	[ -n "$$python" ] || { echo "[setup] stopped: no Python >= 3.11: install one, or pass PYTHON=..." >&2; exit 1; }; \
	"$$python" ci/setup_venv.py --venv "$(VENV)" --vllm "$(VLLM)" --torch-index "$(TORCH_INDEX)"

demo: setup ## a real model on stock vLLM, without and with Nitro
	@$(VENV)/bin/nitro demo $(DEMO_ARGS)

test: setup ## everything that CI runs: lint, types, C++ tests with sanitizers, Python tests without a GPU
	@bash ci/cpu.sh lint types native tests

lint: setup ## ruff and clang-format, without changing anything
	@bash ci/cpu.sh lint

types: setup ## mypy, strict, and the extension's stubs
	@bash ci/cpu.sh types

native: setup ## the C++ tests under the address, undefined-behaviour and thread sanitizers
	@bash ci/cpu.sh native

kernels: setup ## the kernels' tests, in Triton's interpreter, and that they compile for GPUs; PYTEST_ARGS as below
	@bash ci/cpu.sh kernels

python: setup ## the other Python tests; PYTEST_ARGS="-k collector" chooses some
	@bash ci/cpu.sh python engines

format: setup ## let ruff and clang-format rewrite the sources
	@bash ci/cpu.sh format

clean: ## remove what builds and tests leave behind, but not the virtual environment
	@rm -rf build dist nitro-demo nitro-stress nitro-explain nitro-sweep nitro-eval gpu-results perf-results .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

clean-venv: ## remove the virtual environment
	@rm -rf "$(VENV)"
