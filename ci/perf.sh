#!/usr/bin/env bash
# Gates on speed, alone on a quiet machine; most of them need a CUDA device and vLLM.
#   ci/perf.sh                      the gates: pytest -m perf; PYTEST_ARGS="-k essay" chooses some
#   ci/perf.sh BASE HEAD [FOLDER]   base and head in turn on this machine, and the table last; logs go to FOLDER (default:
#                                   perf-results). Each is a revision, or a folder with a checkout. Fails if a figure of
#                                   head is worse than base's by more than its noise (tests/lib/gates.py), or is missing.
#   ROUNDS=N                        of each (default: 3)
#   WHAT="..."                      only these, of: host kernels essay ample (default: host kernels essay)
set -uo pipefail
cd "$(dirname "$0")/.."
here=$PWD
# -P: the checkout must not shadow what was installed.
python=("${PYTHON:-python3}" -P)

if (($# == 0)); then
  # Unquoted on purpose: PYTEST_ARGS holds several arguments.
  # shellcheck disable=SC2086
  exec "${python[@]}" -m pytest -p no:cacheprovider -m "perf and not slow" tests/perf ${PYTEST_ARGS:-}
fi
(($# == 2 || $# == 3)) || { sed -n '2,9s/^# *//p' "$0" >&2; exit 2; }

out=${3:-perf-results}
rm -rf "$out" && mkdir -p "$out" && out=$(cd "$out" && pwd)
trees=()
clean() {
  for tree in "${trees[@]}"; do git worktree remove --force "$tree"; done
}
trap clean EXIT

# Check out and install one side into a folder of its own.
prepare() { # SIDE REVISION-OR-FOLDER
  local tree=$out/$1-tree
  if [[ -d $2 ]]; then
    tree=$(cd "$2" && pwd)
  else
    git worktree add --quiet --detach "$tree" "$2" && trees+=("$tree") || return 1
  fi
  "${PYTHON:-python3}" -m pip install -q --no-build-isolation --no-deps --target "$out/$1-site" "$tree" \
    >"$out/$1-install.log" 2>&1 || { tail -20 "$out/$1-install.log" >&2; return 1; }
  printf -v "$1_tree" %s "$tree"
}

for side in base head; do
  prepare "$side" "$1" || { echo "ci/perf.sh: cannot prepare $side ($1)" >&2; exit 2; }
  shift
done

for ((round = 0; round < ${ROUNDS:-3}; round++)); do
  # In turn, and the other way round each time: what the machine does meanwhile hits both.
  sides=(base head)
  ((round % 2 == 0)) || sides=(head base)
  for group in ${WHAT:-host kernels essay}; do
    for side in "${sides[@]}"; do
      tree=${side}_tree
      # What fails is not measured, and the comparison says so.
      "${python[@]}" "$here/ci/measure_perf.py" "$group" --root "${!tree}" --site "$out/$side-site" \
        --json "$out/$side.json" 2>&1 | tee -a "$out/$side.log"
    done
  done
done
"${python[@]}" "$here/ci/compare_perf.py" "$out/base.json" "$out/head.json"
