#!/usr/bin/env bash
# One node: one rank a GPU (or NPROC ranks), the configuration says who is target and who drafter.
#   bash launch/local.sh conf/qwen3-8b.yaml run.dir=runs/first
#   NPROC=4 bash launch/local.sh conf/demo.yaml train.device=cpu
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 2
fi
# shellcheck source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" found
python -m dflashdist plan "$@" >/dev/null # refuses at once what no rank would accept
if [ -z "${NPROC:-}" ]; then
    NPROC="$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')"
fi
exec python -m dflashdist.launch --standalone --nproc-per-node="$NPROC" \
    --max-restarts="${MAX_RESTARTS:-0}" -m dflashdist train "$@"
