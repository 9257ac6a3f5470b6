"""Messages between processes: good ones arrive to the bit, each bad one ends the job at once with
both ranks named, and nobody waits for ever."""

import dataclasses
import time

import pytest
import torch

from dflashdist.cluster.health import Halted
from dflashdist.cluster.roles import DRAFTER, SPLIT, Roles
from dflashdist.cluster.transport import MessageSpec, PointToPoint, Receiver, Sender, encode
from dflashdist.cluster.workqueue import Trace
from dflashdist.cluster.world import Place, World
from dflashdist.config import PipelineConfig

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
SECONDS = 10.0  # a bad message is noticed at once; what takes time here is a busy machine


def join(roles: Roles) -> tuple[World, PointToPoint]:
    world = World(Place.from_environment(), roles, CPU, PipelineConfig(silence_seconds=60))
    assert world.data is not None
    return world, PointToPoint(world.data, CPU, Trace(None))


def leave(world: World) -> None:
    """Rank 0 holds the store, so it leaves when all have read there why the job ended."""
    world.store.add("read", 1)
    while world.rank == 0 and world.store.add("read", 0) < world.place.world_size:
        time.sleep(0.02)


def states(spec: MessageSpec) -> torch.Tensor:
    """Random bits that both sides can make."""
    draw = torch.Generator().manual_seed(spec.seq)
    data = torch.randint(0, 256, (spec.payload_bytes,), dtype=torch.uint8, generator=draw)
    return data.view(spec.dtype).view(spec.tokens, spec.features * spec.hidden_size)


# ---- good messages: three dtypes, sizes from nothing to a megabyte, two targets, two drafters

NUM_GOOD = 24


def good_spec(seq: int) -> MessageSpec:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seq % 3]
    return MessageSpec(
        seq, tokens=(0, 1, 37, 4099)[seq % 4], features=2, hidden_size=32, dtype=dtype
    )


def send_and_receive() -> list[int]:
    """Drafter seq % 2 wants its seqs in falling order, so arrival and use differ all the time.
    Returns the seqs whose bits were right."""
    roles = Roles(SPLIT, num_targets=2, num_drafters=2)
    world, link = join(roles)
    arrived = []
    with world.health.guard():
        if world.role == DRAFTER:
            mine = range(world.rank, NUM_GOOD, 2)
            receiver = Receiver(
                link, world.clone_store(), world.health, roles, rank=world.rank,
                spec_of=good_spec, num_messages=len(mine), device=CPU,
            )  # fmt: skip
            for seq in reversed(mine):
                got, wanted = receiver.get(seq), states(good_spec(seq))
                assert got.dtype == wanted.dtype and got.shape == wanted.shape
                if torch.equal(got.contiguous().view(torch.uint8), wanted.view(torch.uint8)):
                    arrived.append(seq)
        else:
            sender = Sender(
                link, world.clone_store(), world.health, roles, rank=world.rank,
                drafter_of=lambda seq: seq % 2, max_unsent=2, checksum=True,
            )  # fmt: skip
            for seq in range(world.rank - 2, NUM_GOOD, 3):  # seqs 0 3 6.. and 1 4 7..
                sender.wait_for_room()
                sender.put(good_spec(seq), states(good_spec(seq)))
            for seq in range(2, NUM_GOOD, 3) if world.rank == 2 else ():
                sender.wait_for_room()
                sender.put(good_spec(seq), states(good_spec(seq)))
            sender.close()
    world.barrier("finished")
    world.close()
    return arrived


def test_good_messages(run_ranks):
    arrived = run_ranks(4, send_and_receive)
    assert sorted(seq for mine in arrived for seq in mine) == list(range(NUM_GOOD))


# ---- bad messages: rank 1 sends, rank 0 expects seq 5 as `PLANNED`

PLANNED = MessageSpec(seq=5, tokens=300, features=4, hidden_size=16, dtype=torch.bfloat16)
WHOLE = encode(PLANNED, states(PLANNED), checksum=True)


def with_byte(place: int) -> torch.Tensor:
    message = WHOLE.clone()
    message[place] ^= 1
    return message


def planned_but(**changes) -> MessageSpec:
    return dataclasses.replace(PLANNED, **changes)


def encoded(spec: MessageSpec) -> torch.Tensor:
    return encode(spec, states(spec))


BAD = {
    # a target that reads the plan otherwise: the real sender, with these
    "more tokens": (planned_but(tokens=301), "tokens is 301, the plan says 300"),
    "other shape": (planned_but(features=8, hidden_size=8), "features is 8, the plan says 4"),
    "larger dtype": (
        planned_but(dtype=torch.float32),
        "dtype is torch.float32, the plan says torch.bfloat16",
    ),
    # a target that announces the right message and sends these bytes
    "another seq": (encoded(planned_but(seq=6)), "seq is 6, the plan says 5"),
    "fewer tokens": (encoded(planned_but(tokens=299)), "tokens is 299, the plan says 300"),
    "cut short": (WHOLE[:-1], f"cut short, fewer than its {PLANNED.num_bytes} bytes came"),
    "nearly nothing": (WHOLE[:3], "not a message of this version"),
    "checksum": (with_byte(200), f"checksum of its {PLANNED.payload_bytes} bytes is wrong"),
    "version": (with_byte(0), "not a message of this version"),
}


def send_bad(case: str) -> tuple[str, float]:
    """Returns why the job ended, and after how many seconds."""
    roles = Roles(SPLIT, num_targets=1, num_drafters=1)
    world, link = join(roles)
    store, health, sent = world.clone_store(), world.health, BAD[case][0]
    began = time.monotonic()
    try:
        with health.guard():
            if world.role == DRAFTER:
                receiver = Receiver(
                    link, store, health, roles, rank=0,
                    spec_of=lambda seq: PLANNED, num_messages=1, device=CPU,
                )  # fmt: skip
                health.phase("wait for hidden states", 5)
                receiver.get(5)
            elif isinstance(sent, MessageSpec):
                sender = Sender(
                    link, store, health, roles, rank=1, drafter_of=lambda seq: 0, max_unsent=1
                )
                sender.wait_for_room()
                sender.put(sent, states(sent))
                sender.close()
            else:
                link.warm_up(roles, 1)
                store.set("inbox/0/0", " ".join(map(str, (1, *PLANNED.facts))))
                health.wait_key(store, "go/5")
                link.send(sent, 0, 5)
                health.wait_key(store, "never")  # a target that has other work
    except Halted:
        leave(world)
    assert health.halt is not None
    return health.halt.text, time.monotonic() - began


@pytest.mark.parametrize("case", BAD)
def test_bad_message(run_ranks, case):
    answers = run_ranks(2, send_bad, case)
    text = answers[0][0]
    assert {answer[0] for answer in answers} == {text}
    assert text.startswith("rank 0 (drafter) on ")
    assert "seq 5: TransportError: message from rank 1 to rank 0: " in text
    assert BAD[case][1] in text
    assert max(seconds for _, seconds in answers) < SECONDS
