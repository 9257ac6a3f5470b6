"""What all tests share: a tiny random target, a token store with skewed lengths, a job's ranks."""

import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it; bit-equality needs it alike
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import numpy as np
import pytest
from ranks import Ranks

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
        "target": tiny_target, "tokenizer_fingerprint": chat.tokenizer_fingerprint,
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
        "schedule.num_buckets=4", "schedule.min_share=0.1", "schedule.grid=8",
        "drafter.num_layers=2", "drafter.block_size=4", "drafter.num_anchors=8",
        "drafter.target_layer_ids=[1,3]",
        "optim.lr=3e-3", "train.device=cpu", "checkpoint.every=4", "pipeline.trace=true",
        "train.accumulation_steps=4", "train.max_steps=6",
    ]  # fmt: skip


@pytest.fixture
def float64():
    """Modules and random tensors are of float64 where a test names no dtype; see `rounding`."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


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
