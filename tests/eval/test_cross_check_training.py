"""Training's count of a decoded text uses training's own parts, and its rounds are found again."""

import json

import pytest
import torch
from rounding import in_float64
from variants import WORDS, target_of_few_words, variant_drafter

from dflashdist.config import DrafterConfig, InputError
from dflashdist.eval.cross_check import TrainingsCount, last_round
from dflashdist.eval.decode import CachedTarget, Rule, decode_speculative
from dflashdist.model.shape import DrafterShape
from dflashdist.model.target import Target
from dflashdist.model.target_files import TargetTensors, read_target_config
from dflashdist.model.teacher_forced import AcceptanceSums
from dflashdist.train.evaluation import RoundLog
from dflashdist.train.gates import AVERAGED, RAW

PROMPTS = [[first % 7, 3, 5, first % 3, 2, 6, 1][: 3 + first % 5] for first in range(24)]
RULE = Rule(24, end_ids=(0,))
LAYERS = [0, 2]


def test_it_counts_what_is_decoded_by_the_parts_it_is_given(tmp_path):
    target_of_few_words().save_pretrained(tmp_path)
    model, folder = in_float64(target_of_few_words()), str(tmp_path)
    settings = DrafterConfig(
        num_layers=2, block_size=4, target_layer_ids=LAYERS, mask_token_id=WORDS - 1
    )
    shape = DrafterShape.from_target(read_target_config(folder), None, settings)
    drafter = variant_drafter(shape, "dflash", seed=3).double().eval()
    answers, _ = decode_speculative(CachedTarget(model, LAYERS), drafter, PROMPTS, RULE)
    served = [AcceptanceSums.of_answer(a.emitted, a.offered, a.accepted, 3) for a in answers]
    assert AcceptanceSums.total(served, 3).part("accepted").min() > 0

    own = TargetTensors.load(folder, dtype=torch.float64)

    def counted(layers=LAYERS, frozen=None):
        tapped = Target(folder, layers, loaded=model)
        count = TrainingsCount(tapped, frozen or own, drafter)
        return torch.stack([one.vector for one in count(PROMPTS, answers, RULE)])

    # Side by side, with padding: in float64, so no count hangs on how a processor rounds.
    assert torch.equal(counted(), torch.stack([one.vector for one in served]))
    assert not torch.equal(counted(LAYERS[::-1]), counted())
    for wrong in (
        TargetTensors(own.embedding, own.head.roll(1, 0), own.final_norm),
        TargetTensors(own.embedding.roll(1, 0), own.head, own.final_norm),
    ):
        assert not torch.equal(counted(frozen=wrong), counted())


@pytest.fixture
def checkpoint(tmp_path):
    """Of step 1000; rounds after 500, 750 and 1250, and one that a kill has cut short."""
    log = RoundLog(tmp_path / "eval/rounds.jsonl", 0)
    for step, length in ((500, 1.72), (750, 1.87), (1250, 1.92)):
        values = {f"{RAW}/acceptance_length": length, f"{AVERAGED}/acceptance_length": length + 1}
        log.add(step, values, {"best": True})
    with open(tmp_path / "eval/rounds.jsonl", "a") as file:
        file.write('{"step": 90')
    folder = tmp_path / "checkpoints/step_00001000"
    (folder / "trainer").mkdir(parents=True)
    (folder / "ema").mkdir()
    best = {"step": 500, "acceptance_length": 1.72}
    (folder / "trainer/state.json").write_text(json.dumps({"step": 1000, "best": best}))
    (folder.parent / "best").symlink_to(folder.name)
    return folder


def test_the_last_round_before_a_checkpoint(checkpoint):
    assert last_round(checkpoint) == {"step": 750, "acceptance_length": 1.87}
    assert last_round(checkpoint.parent / "best") == last_round(checkpoint)
    assert last_round(checkpoint / "ema") == {"step": 750, "acceptance_length": 2.87}
    (checkpoint.parent.parent / "eval/rounds.jsonl").unlink()
    assert last_round(checkpoint) == {"step": 500, "acceptance_length": 1.72}  # the state's own
    assert last_round(checkpoint / "ema") is None


def test_the_round_of_an_export_and_of_a_folder_from_elsewhere(tmp_path):
    training = {"step": 750, "best": {"step": 750, "acceptance_length": 1.87}}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"dflashdist": {"training": training}}))
    assert last_round(tmp_path) == {"step": 750, "acceptance_length": 1.87}
    config.write_text(json.dumps({"dflashdist": {"training": training, "averaged": True}}))
    assert last_round(tmp_path) is None  # the best round was the raw weights'
    config.write_text("{}")
    assert last_round(tmp_path) is None


@pytest.mark.parametrize("text", ["[", "[]", '"a"'])
def test_a_corrupt_state_is_one_line(checkpoint, text):
    (checkpoint / "trainer/state.json").write_text(text)
    with pytest.raises(InputError, match=r"state\.json"):
        last_round(checkpoint)


@pytest.mark.parametrize("with_last", [False, True])
def test_a_target_shares_a_loaded_models_weights(tmp_path, with_last):
    """Cut, tapped and padded as one of its own, and the model stays whole."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=20, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.2,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=4,
        use_sliding_window=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    model = Qwen3ForCausalLM.from_pretrained(tmp_path).eval()
    own = Target(str(tmp_path), [2, 0], with_last=with_last)
    shared = Target(str(tmp_path), [2, 0], with_last=with_last, loaded=model)
    ids, lengths = torch.arange(40).view(2, 20) % 20, torch.tensor([20, 7])
    # The same modules on the same shapes.
    assert torch.equal(shared.hidden_states(ids, lengths), own.hidden_states(ids, lengths))
    assert len(shared.model.layers) == (4 if with_last else 3) and len(model.model.layers) == 4
    mine = {tensor.data_ptr() for tensor in model.parameters()}
    assert {tensor.data_ptr() for tensor in shared.model.parameters()} <= mine
    assert not any(tensor.is_meta for tensor in shared.model.buffers())
