"""How fast `prepare` is, beside the tokenizer alone, and how much memory it takes.

    python tests/bench/prepare_speed.py [--rows 100000] [--workers N] [--target FOLDER] [--json]

The conversations are synthetic: one to three turns of words whose lengths are log-normal, about 500
tokens each with the demo's tokenizer. `ratio` is the tokens a second of the whole command, start of
the workers and reading included, to those of `tokenizers.encode_batch` alone on the same rendered
texts with the same number of processes, each encoding its share from memory. Memory is the peak
resident set: of the parent above what its imports took, and of each worker in all.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflashdist.config import DataConfig
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import Conversation, parse_row
from dflashdist.data.prepare import num_cores, prepare
from dflashdist.data.sources import Sources

TARGET = Path(__file__).parents[2] / "launch/demo/target"
BATCH = 1024


def conversations(rows: int) -> Iterator[str]:
    """Lines of JSON, from a vocabulary of real words."""
    draw = random.Random(0)
    with open(Path(__file__).with_name("dispatch.py"), encoding="utf-8") as file:
        words = file.read().split(" ")
    for i in range(rows):
        messages = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            question = [draw.choice(words) for _ in range(int(draw.lognormvariate(2.7, 0.7)) + 1)]
            answer = [draw.choice(words) for _ in range(int(draw.lognormvariate(4.2, 0.7)) + 1)]
            messages.append({"role": "user", "content": f"{i}: {' '.join(question)}"})
            messages.append({"role": "assistant", "content": " ".join(answer) + "."})
        yield json.dumps({"messages": messages})


def encode_share(file: str, target: str, share: int, shares: int) -> tuple[int, float]:
    """Tokens and seconds of encode_batch alone on every `shares`-th batch of rendered texts."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    chat = ChatTokenizer.load(target)
    tokens, seconds = 0, 0.0
    for unit in Sources([file]).units():
        if unit.index % shares != share:
            continue
        texts = []
        for origin, payload in unit.rows():
            row = parse_row(origin, payload)
            assert isinstance(row, Conversation)
            texts.append(chat.render(row.messages))
        begin = time.perf_counter()
        tokens += sum(len(encoding.ids) for encoding in chat.encode(texts))
        seconds += time.perf_counter() - begin
    return tokens, seconds


class Memory(threading.Thread):
    """Peak resident MB of every child process, looked up five times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, float] = {}
        self._done = threading.Event()

    def run(self) -> None:
        own = Path("/proc/self/task") / str(os.getpid()) / "children"
        while not self._done.wait(0.2):
            for pid in own.read_text().split():
                try:
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                except OSError:  # it has just ended
                    continue
                peak = [line for line in lines if line.startswith("VmHWM")]
                if peak:
                    self.peaks[pid] = int(peak[0].split()[1]) / 1024

    def stop(self) -> list[int]:
        """The peaks of the workers, without the small process that cleans up after them."""
        self._done.set()
        self.join()
        return sorted(round(peak) for peak in self.peaks.values() if peak > 20)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(rows: int, workers: int, target: str) -> dict[str, Any]:
    """Both speeds and the memory."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        with open(file, "w", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in conversations(rows))
        before, memory = _peak_mb(), Memory()
        memory.start()
        begin = time.perf_counter()
        summary = prepare([file], target, Path(folder) / "store", DataConfig(workers=workers))
        seconds = time.perf_counter() - begin
        peaks, parent = memory.stop(), _peak_mb()
        begin = time.perf_counter()
        prepare([file], target, Path(folder) / "store", DataConfig(workers=workers))
        again = time.perf_counter() - begin
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            shares = [(str(file), target, share, workers) for share in range(workers)]
            alone = pool.starmap(encode_share, shares)
    rate = summary["tokens"] / seconds
    rate_alone = sum(tokens for tokens, _ in alone) / max(spent for _, spent in alone)
    return {
        "rows": rows,
        "workers": workers,
        "tokens": summary["tokens"],
        "seconds": round(seconds, 1),
        "seconds_when_reused": round(again, 2),
        "tokens_per_s": round(rate),
        "encode_batch_tokens_per_s": round(rate_alone),
        "ratio": round(rate / rate_alone, 2),
        "parent_mb_before": round(before),
        "parent_peak_mb": round(parent),
        "worker_peak_mb": peaks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=num_cores())
    parser.add_argument("--target", default=str(TARGET))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.rows, options.workers, options.target)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<26} {value}")


if __name__ == "__main__":
    main()
