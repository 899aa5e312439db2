#!/usr/bin/env bash
# Build, test and measure on a machine with a CUDA device, in one go; the summary comes last. Needs vLLM there.
#   ci/gpu.sh [FOLDER]    FOLDER: where the logs go (default: gpu-results)
#   STAGES="..."          only these, of: build kernels sanitize oracle perf bench demo
#   SITE=FOLDER           install Nitro there instead of into the environment
#   MODEL=FOLDER          what the demo serves, and the oracle runs on, too; without it, no demo
#   JOBS=N                tests at once (needs pytest-xdist); default: one after the other
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu-results}
mkdir -p "$out"
export NITRO_REQUIRE_GPU=1 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING} HF_HUB_OFFLINE=1
# -P: the checkout must not shadow what was installed.
python=("${PYTHON:-python3}" -P)
pytest=("${python[@]}" -m pytest -q -p no:cacheprovider)
at_once=(${JOBS:+-n "$JOBS"})
[[ -z ${JOBS:-} ]] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
target=(${SITE:+--target "$SITE" --upgrade})
stages=" ${STAGES:-build kernels sanitize oracle perf bench demo} "

summary=()
report() { # NAME STATUS SECONDS
  summary+=("$(printf '%-18s %-4s %5d s  %s' "$1" "$( (($2)) && echo FAIL || echo ok)" "$3" \
    "$(grep -aE '^(=+ .*(passed|failed|error)|[0-9]+ (passed|failed))|Nitro held|ERROR SUMMARY' "$out/$1.log" | tail -1)")")
}

stage() { # NAME COMMAND...
  local name=$1 started=$SECONDS
  shift
  "$@" >"$out/$name.log" 2>&1
  report "$name" $? $((SECONDS - started))
}

# Several commands at once: NAME and the command in one string each.
together() {
  local started=$SECONDS names=() jobs=() index
  for line in "$@"; do
    names+=("${line%% *}")
    (eval "${line#* }") >"$out/${line%% *}.log" 2>&1 &
    jobs+=($!)
  done
  for index in "${!names[@]}"; do
    wait "${jobs[$index]}"
    report "${names[$index]}" $? $((SECONDS - started))
  done
}

wanted() { [[ $stages == *" $1 "* ]]; }

wanted build && stage build "${PYTHON:-python3}" -m pip install -q --no-build-isolation --no-deps "${target[@]}" .
# Tests of wide memory take a third of a large card each: one at a time.
wanted kernels && together \
  "kernels ${pytest[*]} -m gpu --durations=5 -k 'not wide' ${at_once[*]} tests/gpu/kernels tests/gpu/test_kernel_compactor.py tests/gpu/test_work_clock.py" \
  "wide ${pytest[*]} -m gpu -k wide tests/gpu/kernels"
if wanted sanitize; then
  # The allocator of torch would hide where a tensor ends.
  small="${pytest[*]} -m gpu tests/gpu/kernels/test_sanitize.py"
  together "memcheck PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 $small" \
    "racecheck compute-sanitizer --tool racecheck --error-exitcode 9 $small"
fi
wanted oracle && NITRO_TEST_MODEL=${MODEL:-} stage oracle "${pytest[@]}" -m gpu -rA "${at_once[@]}" tests/gpu/test_oracle.py
wanted perf && stage perf bash ci/perf.sh
if wanted bench; then
  for name in kernels naive write; do
    stage "bench_$name" "${python[@]}" "ci/bench_$name.py" --json "$out/bench_$name.json"
  done
fi
if wanted demo && [[ -n ${MODEL:-} ]]; then
  stage demo "${python[@]}" -c 'from nitro.cli import main; main()' demo --model "$MODEL" --out "$out/demo"
fi

"${python[@]}" -c 'import torch, triton, vllm; p = torch.cuda.get_device_properties(0)
print(f"{p.name}, {p.total_memory / 2**30:.0f} GiB; torch {torch.__version__}, Triton {triton.__version__}, vLLM {vllm.__version__}")' \
  2>/dev/null | tail -1
printf '%s\n' "${summary[@]}"
! printf '%s\n' "${summary[@]}" | grep -q ' FAIL '
