#!/usr/bin/env bash
# Trains a small drafter on this machine's CPUs with 4 ranks and measures it; about four minutes.
#   bash launch/demo.sh                  answers of the target as shipped
#   bash launch/demo.sh --regenerate     questions from this Python's own library, answered anew
#   bash launch/demo.sh train.max_steps=200 run.dir=runs/short
set -euo pipefail
regenerate=
for item in "$@"; do # in any order; overrides stay
    shift
    case "$item" in
        --help | -h)
            sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --regenerate) regenerate=1 ;;
        data.store=*)
            echo "demo: $item: the demo makes its own store; for yours: launch/local.sh" >&2
            exit 2
            ;;
        *) set -- "$@" "$item" ;;
    esac
done
# shellcheck source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" base
cd "$ROOT"
export OMP_NUM_THREADS=1 # 4 ranks share the cores
target=launch/demo/target
conversations=launch/demo
began=$SECONDS
run="$(python launch/demo/demo_folder.py claim "$@")"
store="$run/store"

prepare() {
    dflashdist prepare "$conversations/train.jsonl.gz" --target "$target" --out "$store" \
        --overwrite data.max_length=512 data.validation=0.03
}
plan() { dflashdist plan conf/demo.yaml "$@" "data.store=$store"; }

if [ -n "$regenerate" ]; then
    echo "==> checking the arguments with the answers as shipped"
    prepare >/dev/null
    plan "$@" >/dev/null
    conversations="$run/regenerated"
    store="$conversations/store"
    echo "==> asking the target about this Python's own library (some minutes)"
    python launch/demo/answers.py "$conversations" --target "$target"
fi
echo "==> preparing the token store $store"
prepare
echo "==> the plan"
plan "$@"
python launch/demo/demo_folder.py clear "$run" # all is accepted: a demo starts anew
echo "==> training: 2 target ranks and 2 drafter ranks"
python -m dflashdist.launch --standalone --nproc-per-node=4 --log-dir="$run/logs/torchrun" \
    -m dflashdist train conf/demo.yaml "$@" "data.store=$store"
first="$run/checkpoints/step_00000000"
last="$(find "$run/checkpoints" -maxdepth 1 -name 'step_*' | sort | tail -n 1)"
echo "==> speculative decoding of held-out prompts with the untrained and the trained drafter"
mkdir -p "$run/eval"
measured=("$first" "$last" conf/demo.yaml "evaluate.prompts=$conversations/heldout.jsonl.gz" "$@")
OMP_NUM_THREADS="$(nproc)" dflashdist evaluate "${measured[@]}" --json >"$run/eval/report.json"
python - "$run" "$store" "$((SECONDS - began))" "$(printf '%q ' "${measured[@]}")" "$@" <<'PY'
import json, os, shlex, sys
run, store, seconds, measured, *overrides = sys.argv[1:]
before, after = json.load(open(f"{run}/eval/report.json"))
steps = json.load(open(f"{run}/plan.json"))["num_steps"]
kept = [item for item in overrides if not item.startswith(("train.max_steps=", "train.epochs="))]
more = shlex.join([*kept, f"data.store={store}", f"train.max_steps={2 * steps}"])
print(f"""
run folder    {run}   (whole demo: {seconds} s)
measured      {run}/eval/report.json: {after['tokens_compared_equal']:,} tokens, equal to plain decoding;
              {after['speedup']:.2f}x its speed ({before['speedup']:.2f}x untrained)
first         cd {os.getcwd()} && source {os.environ['VIRTUAL_ENV']}/bin/activate
watch         tensorboard --logdir {run}/tb
resume        NPROC=4 bash launch/local.sh conf/demo.yaml {more}
evaluate      dflashdist evaluate {measured}
""")
if after["clean"]["acceptance_length"] is None:
    print("acceptance length: none, as every answer loops or was cut; raise evaluate.max_new_tokens")
else:
    print(
        f"acceptance length: {before['clean']['acceptance_length']:.2f} before, "
        f"{after['clean']['acceptance_length']:.2f} after ({after['clean']['num_answers']} prompts)"
    )
PY
