"""How long planning takes and how much memory: constructor, first epoch, every seq, report.

    python tests/bench/plan_speed.py [--rows 10000 100000 1000000] [--max-length 8192] [--json]

Row lengths are log-normal (median 700, sigma 1), clipped to [32, max length]; each size runs in a
process of its own, so that its peak resident memory is its own. Seconds are of CPU time on one
core, which other load on the machine disturbs least. `epoch` is also what a later epoch
costs; `seqs` iterates over the first epoch's micro-batches one by one, as a rank does over days.
"""

import argparse
import json
import multiprocessing
import resource
import time

import numpy as np

from dflashdist.config import ScheduleConfig
from dflashdist.schedule.plan import Plan
from dflashdist.schedule.report import plan_report
from dflashdist.schedule.stream import Steps, Stream


def measure(num_rows: int, max_length: int, num_buckets: int) -> dict[str, float]:
    """CPU seconds of each part, and the peak memory in MB beside what imports and data took."""
    draw = np.random.default_rng(0).normal(np.log(700), 1.0, num_rows)
    lengths = np.clip(np.exp(draw), 32, max_length).astype(np.int32)
    before = _peak_mb()
    marks = [time.process_time()]
    schedule = ScheduleConfig(num_buckets=num_buckets, max_tokens=max(16384, max_length))
    plan = Plan(lengths, lengths, schedule, num_anchors=512, block_size=16, seed=0)
    marks.append(time.process_time())
    plan.epoch(0)
    marks.append(time.process_time())
    for seq in range(plan.micro_batches_per_epoch):
        plan.micro_batch(seq)
    marks.append(time.process_time())
    steps = Steps(plan, num_drafters=8, accumulation=4, epochs=1)
    memory = {"queue_depth": 64, "num_states": 5, "hidden_size": 4096, "dtype": "bfloat16"}
    plan_report(Stream(steps), **memory)
    marks.append(time.process_time())
    parts = dict(zip(("constructor", "epoch", "seqs", "report"), np.diff(marks), strict=True))
    return {
        "rows": num_rows,
        "micro_batches": plan.micro_batches_per_epoch,
        **{name: round(float(seconds), 3) for name, seconds in parts.items()},
        "total": round(marks[-1] - marks[0], 3),
        "mb_before": round(before),
        "peak_mb": round(_peak_mb()),
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--num-buckets", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    for num_rows in options.rows:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            job = (num_rows, options.max_length, options.num_buckets)
            results.append(pool.apply(measure, job))
    if options.json:
        print(json.dumps(results))
        return
    print("".join(f"{name:>14}" for name in results[0]))
    for result in results:
        print("".join(f"{value:>14}" for value in result.values()))


if __name__ == "__main__":
    main()
