"""What all tests share: a tiny random target, a token store with skewed lengths, and processes.

Processes come from a forkserver that has torch and transformers loaded already: four ranks start in
under a second, where torchrun takes the better part of a minute on two cores.
"""

import json
import multiprocessing
import os
import socket
import time
import traceback
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it; bit-equality needs it alike
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import numpy as np
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
VOCABULARY, SPARE = 200, 8


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> str:
    """A random Qwen3 of 6 layers in a folder, with config.json and safetensors."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY + SPARE, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def write_tokenizer(folder: Path) -> None:
    """A word-level tokenizer with VOCABULARY entries and a ChatML template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [
        f"w{i}" for i in range(VOCABULARY - 3)
    ]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory, tiny_target) -> str:
    """120 rows of random tokens, 8 to 200 long with a tail, the later part supervised."""
    from dflashdist.data.chat import ChatTokenizer
    from dflashdist.data.shards import TokenStoreWriter

    folder = tmp_path_factory.mktemp("data") / "store"
    random = np.random.default_rng(0)
    chat = ChatTokenizer.load(tiny_target)
    settings = {
        "target": tiny_target, "tokenizer_fingerprint": chat.fingerprint, 
        "tokenizer_length": VOCABULARY, "vocab_size": VOCABULARY + SPARE,
        "pad_id": 0, "max_length": 200, "min_supervised": 2,
    }  # fmt: skip
    with TokenStoreWriter(folder, settings) as writer:
        for _ in range(120):
            length = int(np.clip(random.lognormal(3.3, 0.8), 8, 200))
            ids = random.integers(3, VOCABULARY, length)
            mask = np.arange(length) >= max(1, length // 3)
            writer.add(ids.astype(np.int32), mask.astype(np.uint8))
        writer.audit = {
            "rows": 120,
            "kept": 120,
            "rejected": {},
            "examples": {},
            "cut_rows": 0,
            "cut_tokens": 0,
        }
    return str(folder)


@pytest.fixture
def tiny_overrides(tiny_target, tiny_store, tmp_path) -> list[str]:
    """Overrides for a run of a few seconds."""
    return [
        f"data.store={tiny_store}", f"target.path={tiny_target}", f"run.dir={tmp_path / 'run'}",
        "data.max_length=200", "schedule.max_tokens=400", "schedule.max_anchors=32",
        "schedule.num_buckets=4", "schedule.grid=8", "schedule.sort_block=2",
        "drafter.num_layers=2", "drafter.block_size=4", "drafter.num_anchors=8",
        "drafter.target_layer_ids=[1,3]",
        "optim.lr=3e-3", "train.device=cpu", "checkpoint.every=4", "pipeline.trace=true",
        "train.accumulation_steps=4", "train.max_steps=6",
    ]  # fmt: skip


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


@pytest.fixture
def run_ranks():
    """Run a function as the ranks of one job and return what each returned."""
    started: list[Ranks] = []

    def run(world: int, function, *arguments):
        started.append(Ranks(world, function, *arguments))
        return started[-1].results()

    yield run
    for ranks in started:
        ranks.kill()


def train_overrides(overrides: list[str], **changes: object) -> None:
    """One rank of a training job, in a process of its own."""
    from dflashdist.config import load_config
    from dflashdist.train.run import train_rank

    changed = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
    train_rank(load_config(None, overrides + changed))
