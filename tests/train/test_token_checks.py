"""A run holds its store to the target's tokenizer, and to its template where the store says so."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from dflashdist.config import InputError, load_config
from dflashdist.data.chat import ChatTokenizer
from dflashdist.data.shards import TokenStoreWriter
from dflashdist.train.job import TrainingJob, check_tokens


@pytest.fixture
def target(tiny_target, tmp_path) -> Path:
    """A copy of the tiny target that a test may change."""
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


@pytest.fixture
def job(target, tiny_overrides, tmp_path):
    """Builds what a rank knows of a store that was made with a template's file, or the own one."""

    def build(template: str | None) -> TrainingJob:
        chat = ChatTokenizer.load(target, template=template)
        settings = {
            "tokenizer_fingerprint": chat.tokenizer_fingerprint,
            "tokenizer_length": chat.length, "vocab_size": chat.vocab_size, "pad_id": chat.pad_id,
            "max_length": 200, "min_supervised": 2, "rendering": chat.rendering,
        }  # fmt: skip
        with TokenStoreWriter(tmp_path / "own", settings, overwrite=True) as writer:
            for _ in range(40):
                writer.add(np.arange(3, 23, dtype=np.int32), np.ones(20, dtype=np.uint8))
            writer.notes = {"target": str(target), "template": chat.rendering["template"]}
        chosen = [f"data.store={tmp_path / 'own'}", f"target.path={target}"]
        return TrainingJob(load_config(None, [*tiny_overrides, *chosen]), 1)

    return build


def test_another_template_of_the_target_is_refused_where_the_store_has_its_own(job, target):
    made = job(None)
    check_tokens(made)
    (target / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(InputError, match=r"made with another chat template \(of .*target\)"):
        check_tokens(made)
    (target / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="made with another chat template"):
        check_tokens(made)


def test_a_store_made_with_a_given_template_is_held_to_the_tokenizer_alone(job, target, tmp_path):
    shutil.copy(target / "chat_template.jinja", tmp_path / "given.jinja")
    made = job(str(tmp_path / "given.jinja"))
    (target / "chat_template.jinja").unlink()
    check_tokens(made)
    text = (target / "tokenizer.json").read_text()
    changed = text.replace('"normalizer":null', '"normalizer":{"type":"NFC"}').replace(
        '"normalizer": null', '"normalizer": {"type": "NFC"}'
    )
    assert changed != text
    (target / "tokenizer.json").write_text(changed)
    with pytest.raises(InputError, match=r"made with another tokenizer .* prepare anew with"):
        check_tokens(made)
