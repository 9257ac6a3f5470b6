#!/usr/bin/env bash
# Trains a small drafter on this machine's CPUs with 4 ranks and measures it; about four minutes.
#   bash launch/demo.sh                  answers of the target as shipped
#   bash launch/demo.sh --regenerate     questions from this Python's own library, answered anew
#   bash launch/demo.sh train.max_steps=200 run.dir=runs/short
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi
# shellcheck source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" base
cd "$ROOT"
export OMP_NUM_THREADS=1 # 4 ranks share the cores
regenerate=
if [ "${1:-}" = --regenerate ]; then
    regenerate=1
    shift
fi
run=runs/demo
for item in "$@"; do case "$item" in run.dir=*) run="${item#run.dir=}" ;; esac; done
target=launch/demo/target
conversations=launch/demo
began=$SECONDS

if [ -n "$regenerate" ]; then
    conversations="$run/conversations"
    echo "==> asking the target about this Python's own library (some minutes)"
    python launch/demo/answers.py "$conversations" --target "$target"
fi
echo "==> preparing the token store $run/store"
rm -rf "$run/checkpoints" "$run/tb" "$run/logs" # a demo starts anew
dflashdist prepare "$conversations/train.jsonl.gz" --target "$target" --out "$run/store" \
    --overwrite data.max_length=512 data.validation=0.03
echo "==> the plan"
dflashdist plan conf/demo.yaml "data.store=$run/store" "$@"
echo "==> training: 2 target ranks and 2 drafter ranks"
python -m torch.distributed.run --standalone --nproc-per-node=4 --log-dir="$run/logs/torchrun" \
    -m dflashdist train conf/demo.yaml \
    "data.store=$run/store" "$@"
first="$run/checkpoints/step_00000000"
last="$(find "$run/checkpoints" -maxdepth 1 -name 'step_*' | sort | tail -n 1)"
echo "==> speculative decoding of held-out prompts with the untrained and the trained drafter"
mkdir -p "$run/eval"
OMP_NUM_THREADS="$(nproc)" dflashdist evaluate "$first" "$last" conf/demo.yaml \
    "evaluate.prompts=$conversations/heldout.jsonl.gz" "$@" --json >"$run/eval/report.json"
python - "$run" "$last" $((SECONDS - began)) "$VIRTUAL_ENV" "$@" <<'PY'
import json, shlex, sys
run, last, seconds, environment, *overrides = sys.argv[1:]
before, after = json.load(open(f"{run}/eval/report.json"))
store = [] if any(item.startswith("data.store=") for item in overrides) else [f"data.store={run}/store"]
kept = [item for item in overrides if not item.startswith("train.max_steps=")] + store
more = f"train.max_steps={2 * int(last.rpartition('_')[2])}"
torchrun = "python -m torch.distributed.run --standalone --nproc-per-node=4 -m dflashdist train"
print(f"""
run folder    {run}   (whole demo: {seconds} s)
measured      {run}/eval/report.json: {after['tokens_compared_equal']:,} tokens, equal to plain decoding;
              {after['speedup']:.2f}x its speed ({before['speedup']:.2f}x untrained)
first         source {environment}/bin/activate
watch         tensorboard --logdir {run}/tb
resume        {torchrun} conf/demo.yaml {shlex.join([*kept, more])}
evaluate      dflashdist evaluate {last} conf/demo.yaml
""")
print(
    f"acceptance length: {before['clean']['acceptance_length']:.2f} before, "
    f"{after['clean']['acceptance_length']:.2f} after ({after['clean']['num_answers']} prompts)"
)
PY
