"""Makes a small target from nothing: tokenizer, chat template, a trained Qwen3 of 1.85 M weights.

The one that ships beside this file came from the same recipe (target/NOTES.md). The corpus is
corpus.py's; matrices are trained by Muon, the embedding and the norms by AdamW. The learning rate
follows the clock, so that the time given is the time used: 50 minutes on 2 cores reach 2.46 nats a
token on held-out answers, 10 minutes 3.36.

    python launch/demo/make_target.py OUT --minutes 50
"""

import argparse
import json
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import conversations, library_things
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.conversations import Conversation, Message

VOCAB, SPARE = 2048, 64  # tokens, and embedding rows past them: the first is the mask token
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\n+ *|\s+(?!\S)|\s+"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
STEP_TOKENS, SHORT_ROW, LONG_ROW = 2048, 256, 1024
LONG_FROM = 0.85  # of the time: rows of LONG_ROW, so that later positions are learned too
MUON_LR, ADAM_LR, MATRIX_DECAY = 0.02, 5e-3, 0.01
WARMUP_STEPS, FLAT_UNTIL, LAST_FACTOR = 15, 0.3, 0.02


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are orthogonalised by five Newton-Schulz steps.

    torch.optim.Muon runs these in bfloat16, which a CPU multiplies 50 times slower than float32.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update; Nesterov momentum, decoupled weight decay."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                velocity.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalised(parameter.grad.lerp(velocity, group["momentum"]))
                tall = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * tall)


def orthogonalised(matrix: Tensor) -> Tensor:
    """The matrix with its singular values brought to between about 0.7 and 1.2.

    The quintic iteration of the Muon optimizer, whose coefficients were chosen for speed.
    """
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB tokens; ids 0 to 2 are padding, start and end of a turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def rate_factor(step: int, done: float) -> float:
    """Of the learning rate, at 0-based `step` with the share `done` of the time used."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    left = min(1.0, max(0.0, (1 - done) / (1 - FLAT_UNTIL)))
    return warm * (LAST_FACTOR + (1 - LAST_FACTOR) * left)


def endless_rows(documents: Sequence[np.ndarray], seed: int) -> Generator[np.ndarray, int, None]:
    """Rows of the length last sent, cut from the documents in an order new in each epoch."""
    generator = np.random.default_rng(seed)
    left, length = np.empty(0, dtype=np.int64), SHORT_ROW
    while True:
        for i in generator.permutation(len(documents)):
            left = np.concatenate([left, documents[i]])
            while len(left) >= length:
                row, left = left[:length], left[length:]
                length = yield row


def build_model() -> Any:
    """An untrained target in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB + SPARE, hidden_size=128, intermediate_size=384, num_hidden_layers=8,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
            rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
            max_position_embeddings=2048,
            bos_token_id=None, eos_token_id=2, pad_token_id=0,
        )
    ).float()  # fmt: skip


def train(model: Any, documents: Sequence[np.ndarray], minutes: float, seed: int) -> int:
    """Train on all tokens of the documents for so long; returns the number of steps."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = [
        Muon(matrices, MUON_LR, MATRIX_DECAY),
        torch.optim.AdamW(others, ADAM_LR, (0.9, 0.95), weight_decay=0.0),
    ]
    rates = [MUON_LR, ADAM_LR]
    rows = endless_rows(documents, seed)
    next(rows)  # to where it takes a length
    began, step, done = time.monotonic(), 0, 0.0
    with tqdm(desc="target", unit=" steps", disable=None) as progress:
        while done < 1:
            length = LONG_ROW if done >= LONG_FROM else SHORT_ROW
            batch = [rows.send(length) for _ in range(STEP_TOKENS // length)]
            ids = torch.from_numpy(np.stack(batch))
            logits = model(input_ids=ids, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, rate in zip(optimizers, rates, strict=True):
                optimizer.param_groups[0]["lr"] = rate * rate_factor(step, done)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            done = (time.monotonic() - began) / (60 * minutes)
            progress.set_postfix(
                loss=f"{loss.item():.3f}", done=f"{min(done, 1):.0%}", refresh=False
            )
            progress.update()
    return step


@torch.inference_mode()
def answer_loss(model: Any, chat: ChatTokenizer, talks: Sequence[Sequence[Message]]) -> float:
    """Nats a token on the answers of some conversations."""
    total, count = 0.0, 0
    for messages in talks:
        for row in chat.training_rows(Conversation("", list(messages))).rows:
            ids = torch.from_numpy(row.ids).long()
            mask = torch.from_numpy(row.loss_mask).bool()
            losses = F.cross_entropy(
                model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none"
            )
            total += float(losses[mask[1:]].sum())
            count += int(mask.sum())
    return total / count


def make_target(
    out: Path,
    talks: Sequence[Sequence[Message]],
    heldout: Sequence[Sequence[Message]],
    minutes: float,
    seed: int = 0,
) -> dict[str, Any]:
    """Write a target's folder trained on `talks`; returns its steps and held-out answer loss."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    texts = [message["content"] for messages in talks for message in messages]
    train_tokenizer(texts).save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(TEMPLATE)
    settings = {
        "tokenizer_class": "TokenizersBackend",
        "backend": "tokenizers",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "model_max_length": 2048,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    model = build_model()
    model.config.save_pretrained(out)
    chat = ChatTokenizer.load(out)
    encodings = chat.encode([chat.render(messages) for messages in talks])
    documents = [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]
    steps = train(model, documents, minutes, seed)
    loss = answer_loss(model.eval(), chat, heldout)
    model.bfloat16().save_pretrained(out)
    return {"steps": steps, "tokens": steps * STEP_TOKENS, "heldout_answer_loss": loss}


def main() -> None:
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(description="A small target trained on the standard library.")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--minutes", type=float, default=50.0, help="of training")
    options = parser.parse_args()
    talks: list[list[Message]] = []
    heldout: list[list[Message]] = []
    for thing in library_things():
        (heldout if thing.held_out else talks).extend(conversations(thing))
    result = make_target(options.out, talks, heldout[::8], options.minutes)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
