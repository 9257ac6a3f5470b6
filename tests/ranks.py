"""Processes that run as the ranks of one job.

They come from a forkserver that has torch and transformers loaded already: four ranks start in
under a second, where torchrun takes the better part of a minute on two cores.
"""

import multiprocessing
import os
import socket
import time
import traceback

import pytest

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch.utils.tensorboard",
        "transformers.models.qwen3.modeling_qwen3",
        "dflashdist.train.run",
        "dflashdist.train.drafter_rank",
        "dflashdist.train.target_rank",
    ]
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(rank, world, port, attempt, queue, function, arguments):
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }  # fmt: skip
    try:
        import torch

        torch.set_num_threads(1)
        queue.put((rank, "ok", function(*arguments)))
    except BaseException:
        queue.put((rank, "error", traceback.format_exc()))
        raise SystemExit(1) from None


class Ranks:
    """Processes that run `function(*arguments)` as the ranks of one job."""

    def __init__(self, world: int, function, *arguments) -> None:
        self.port, self.queue = free_port(), CONTEXT.Queue()
        self.processes = [
            CONTEXT.Process(
                target=_rank_main,
                args=(rank, world, self.port, 0, self.queue, function, arguments),
                daemon=True,
            )
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def results(self, timeout: float = 120) -> list:
        """What each rank returned, in rank order; a rank's error fails the test."""
        answers = {}
        for _ in self.processes:
            rank, kind, value = self.queue.get(timeout=timeout)
            if kind == "error":
                self.kill()
                pytest.fail(f"rank {rank}:\n{value}")
            answers[rank] = value
        for process in self.processes:
            process.join(30)
        return [answers[rank] for rank in range(len(self.processes))]

    def exit_codes(self, timeout: float) -> list[int]:
        """Exit codes once all processes have ended; fails the test if one has not."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        assert None not in codes, (
            f"ranks {[r for r, c in enumerate(codes) if c is None]} did not end"
        )
        return codes

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()


def train_overrides(overrides: list[str], **changes: object) -> None:
    """One rank of a training job, in a process of its own."""
    from dflashdist.config import load_config
    from dflashdist.train.run import train_rank

    changed = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
    train_rank(load_config(None, overrides + changed))
