#!/usr/bin/env bash
# What `make test` and CI run on a machine without a GPU. Arguments: the stages, in order (default: all that check).
# Needs ci/setup_venv.py first.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/${VENV:-.venv}/bin:$PATH"
# The first would shadow the package that was installed; without bytecode, each engine process compiles vLLM anew (set-up
# does not byte-compile, imports do), which takes half a minute.
unset PYTHONPATH PYTHONDONTWRITEBYTECODE
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}  # spinning OpenMP threads starve the other processes of an engine

stage() {
  printf '\n[%s] %s\n' "$1" "$2"
}

cxx_sources() {
  find native -name '*.cpp' -o -name '*.hpp' | sort
}

lint() {
  stage lint "ruff check, ruff format, clang-format"
  ruff check .
  ruff format --check --quiet . || { ruff format --diff --quiet .; echo "run: make format" >&2; return 1; }
  cxx_sources | xargs clang-format --dry-run --Werror
}

format() {
  ruff check --fix --quiet . || true  # what it can't fix, lint will say
  ruff format .
  cxx_sources | xargs clang-format -i
}

# In the checkout kernels/ lies outside nitro/, and mypy would skip `nitro.kernels` without a word. So it reads a tree of
# links that looks like the installed package.
types() {
  stage types "mypy --strict, stubtest"
  local tree=build/types/nitro
  rm -rf "$tree" && mkdir -p "$tree"
  for path in nitro/*; do
    [[ $path == */__pycache__ ]] || ln -s "$PWD/$path" "$tree/"
  done
  ln -s "$PWD/kernels" "$tree/kernels"
  local root=$PWD
  (cd build/types && mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p nitro)
  (cd build/types && python -m mypy.stubtest --mypy-config-file "$root/pyproject.toml" \
    --allowlist "$root/ci/stubtest-allowlist.txt" nitro._native)
}

# The thread sanitizer of some compilers stops where the kernel scatters addresses widely (vm.mmap_rnd_bits=32); setarch
# prevents that, where it may.
native() {
  stage native "C++ tests under the address and undefined-behaviour sanitizers, then under the thread sanitizer"
  mkdir -p build
  local still=()
  ! setarch -R true 2>/dev/null || still=(setarch -R)
  for preset in asan tsan; do
    { cmake --preset "$preset" && cmake --build --preset "$preset"; } >"build/native-$preset.log" 2>&1 ||
      { cat "build/native-$preset.log"; return 1; }
    "${still[@]}" ctest --preset "$preset"
  done
}

# Those that follow the kernels, whose process would end long before that of all others.
after_kernels=(tests/unit/bench tests/unit/eval)

run_pytest() { # NAME ARGUMENTS...: its name keeps pytest's caches apart
  # Unquoted on purpose: PYTEST_ARGS holds several arguments.
  # shellcheck disable=SC2086
  pytest -q --durations=10 -o cache_dir=".pytest_cache/$1" -m "not gpu and not perf and not slow" "${@:2}" ${PYTEST_ARGS:-}
}

python_tests() {
  stage python "pytest, all but kernels, bench and eval"
  run_pytest python --ignore=tests/unit/kernels --ignore=tests/kvpress "${after_kernels[@]/#/--ignore=}"
}

engines() {
  stage engines "pytest, bench and eval"
  run_pytest engines "${after_kernels[@]}"
}

# A process of its own: Triton is interpreted or compiled for as long as a process lives, and engines inherit the choice.
kernels() {
  stage kernels "pytest, kernels in Triton's interpreter"
  TRITON_INTERPRET=1 OMP_NUM_THREADS=1 run_pytest kernels tests/unit/kernels
}

# Two at a time: most of the time, each of them keeps one processor busy.
tests() {
  mkdir -p build
  (
    failed=0
    (kernels) || failed=1
    (engines) || failed=1
    exit "$failed"
  ) >build/beside.log 2>&1 &
  local beside=$! failed=0
  (python_tests) || failed=1
  wait "$beside" || failed=1
  cat build/beside.log
  return "$failed"
}

(($#)) || set -- lint types native tests
for name in "$@"; do
  case $name in
    lint | format | types | native | kernels | engines | tests) "$name" ;;
    python) python_tests ;;
    *) echo "ci/cpu.sh: unknown stage '$name': use lint, format, types, native, kernels, engines, python or tests" >&2; exit 2 ;;
  esac
done
