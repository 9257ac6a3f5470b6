"""The demo's target: the script that makes one, and the answers that it gives."""

import gzip
import json

import make_target as module
import numpy as np
import pytest
import torch
from answers import MAX_NEW_TOKENS, TARGET, Answerer, answered, write_gzip

from dflashdist.data.chat import ChatTokenizer
from dflashdist.eval.decode import CachedTarget, Rule, decode_plain
from dflashdist.eval.generate import is_looping


def talk(i: int) -> list[dict[str, str]]:
    question, answer = f"What does f{i} do?", f"It returns {i}.\n\n```python\nreturn {i}\n```"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def answerer():
    return Answerer(TARGET)


def test_newton_schulz_brings_singular_values_near_one():
    generator = torch.Generator().manual_seed(0)
    for shape in ((16, 48), (48, 16)):
        matrix = torch.randn(shape, generator=generator)
        values = torch.linalg.svdvals(module.orthogonalised(matrix))
        # The iteration's own range: it trades exactness for speed.
        assert values.min() > 0.6 and values.max() < 1.3


def test_rate_warms_up_stays_and_falls():
    assert module.rate_factor(0, 0.0) == pytest.approx(1 / 15)
    assert module.rate_factor(99, 0.2) == 1
    assert module.rate_factor(99, 1.0) == pytest.approx(0.02)
    assert module.rate_factor(99, 0.65) == pytest.approx(0.51)


def test_rows_hold_every_token_of_an_epoch_in_the_length_asked_for():
    documents = [np.arange(i * 100, i * 100 + 64) for i in range(20)]
    rows = module.endless_rows(documents, seed=0)
    first = next(rows)
    rest = [rows.send(64) for _ in range(16)]
    seen = np.concatenate([first, *rest])
    assert len(first) == module.SHORT_ROW and all(len(row) == 64 for row in rest)
    assert sorted(seen) == sorted(np.concatenate(documents))


def test_a_target_from_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STEP_TOKENS", 256)  # more steps in the same time
    monkeypatch.setattr(module, "LONG_ROW", 256)
    talks = [talk(i) for i in range(300)]
    result = module.make_target(tmp_path, talks, [talk(500)], minutes=0.04)
    made = ChatTokenizer.load(tmp_path)
    torch.manual_seed(0)
    untrained = module.answer_loss(module.build_model().eval(), made, [talk(500)])
    # From 7.66 nats; a few warm-up steps, all that a busy machine may get done, gain 0.03.
    assert result["steps"] > 1 and result["heldout_answer_loss"] < untrained - 0.01
    shipped = ChatTokenizer.load(TARGET)
    assert made.render(talk(1)) == shipped.render(talk(1))
    assert (made.end_ids, made.pad_id, made.vocab_size) == ((2,), 0, 2112)
    assert made.decode(made.encode_prompt(talk(7))) == made.render(
        talk(7), add_generation_prompt=True
    )
    answer = Answerer(tmp_path).batch.answers([made.encode_prompt(talk(1)[:1])], MAX_NEW_TOKENS)
    assert len(answer) == 1  # loads and runs


def test_batched_answers_are_the_ones_of_a_single_prompt(answerer):
    names = ["json.dumps", "socket.socket.accept", "shutil.copy", "http.client"]
    prompts = [
        answerer.chat.encode_prompt([{"role": "user", "content": f"What does {name} do?"}])
        for name in names
    ]
    assert len(set(map(len, prompts))) > 1  # padding has something to do
    target = CachedTarget(answerer.batch.model)
    kept, rule = 0, Rule(MAX_NEW_TOKENS, answerer.chat.end_ids)
    answers = answerer.batch.answers(prompts, MAX_NEW_TOKENS, give_up=is_looping)
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = decode_plain(target, [prompt], rule)[0][0].tokens
        if answer is None:
            assert is_looping(alone) or alone[-1] not in answerer.chat.end_ids
        else:
            kept += 1
            assert answer == alone
    assert kept


def test_known_answers_are_left_out(answerer):
    prompts = [talk(1)[:1], [{"role": "user", "content": "What does shutil.copy do?"}]]
    taken: set[str] = set()
    first = answered(answerer, prompts, 5, 60.0, taken)
    assert first and {m[-1]["content"] for m in first} <= taken
    assert answered(answerer, prompts, 5, 60.0, taken) == []


def test_the_same_rows_give_the_same_archive(tmp_path):
    for name in ("a", "b"):
        write_gzip(tmp_path / name, [{"messages": talk(1)}])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert json.loads(gzip.decompress((tmp_path / "a").read_bytes())) == {"messages": talk(1)}
