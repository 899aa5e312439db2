#!/usr/bin/env bash
# Build, test and demonstrate on a machine with a CUDA device, in one go; the summary comes last. Needs vLLM there.
#   ci/gpu.sh [FOLDER]    FOLDER: where the logs go (default: gpu-results)
#   MODEL=FOLDER          also run the demo on this model
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu-results}
mkdir -p "$out"
export NITRO_REQUIRE_GPU=1 VLLM_USE_V2_MODEL_RUNNER=0 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING} HF_HUB_OFFLINE=1
python=${PYTHON:-python3}
target=(${SITE:+--target "$SITE" --upgrade})

summary=()
stage() {
  local name=$1 started=$SECONDS
  shift
  "$@" >"$out/$name.log" 2>&1
  local status=$?
  summary+=("$(printf '%-8s %-4s %5d s  %s' "$name" "$( ((status)) && echo FAIL || echo ok)" $((SECONDS - started)) \
    "$(grep -aE '^(=+ .*(passed|failed|error)|[0-9]+ (passed|failed))|Nitro held' "$out/$name.log" | tail -1)")")
}

stage build "$python" -m pip install -q --no-build-isolation --no-deps "${target[@]}" .
# -P: the checkout must not shadow what was installed.
stage tests "$python" -P -m pytest -q -p no:cacheprovider -m gpu -s tests/gpu
[[ -z ${MODEL:-} ]] || stage demo "$python" -P -c 'from nitro.cli import main; main()' demo --model "$MODEL" --out "$out/demo"

"$python" -P -c 'import torch, vllm; p = torch.cuda.get_device_properties(0)
print(f"{p.name}, {p.total_memory / 2**30:.0f} GiB; torch {torch.__version__}, vLLM {vllm.__version__}")' 2>/dev/null | tail -1
printf '%s\n' "${summary[@]}"
! printf '%s\n' "${summary[@]}" | grep -q FAIL
