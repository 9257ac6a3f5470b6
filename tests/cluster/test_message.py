"""A message is what was put in, to the bit, and what is not the plan's is refused."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashdist.cluster.transport import (
    DTYPES,
    HEADER,
    TRAILER,
    MessageSpec,
    TransportError,
    decode,
    empty_message,
    encode,
)

specs = st.builds(
    MessageSpec,
    seq=st.integers(0, 2**62),
    tokens=st.integers(0, 9),
    features=st.integers(1, 5),
    hidden_size=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
)


def random_states(spec: MessageSpec, seed: int) -> torch.Tensor:
    """Any bits that fit, NaNs among them: transport must not look at numbers."""
    draw = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (spec.payload_bytes,), dtype=torch.uint8, generator=draw)
    return data.view(spec.dtype).view(spec.tokens, spec.features * spec.hidden_size)


@settings(deadline=None)
@given(specs, st.booleans(), st.integers(0, 99))
def test_round_trip(spec, checksum, seed):
    states = random_states(spec, seed)
    message = encode(spec, states, checksum)
    assert message.numel() == spec.num_bytes == empty_message(spec, torch.device("cpu")).numel()
    decoded = decode(spec, message, 3, 0)
    assert decoded.shape == states.shape and decoded.dtype == spec.dtype
    assert torch.equal(decoded.contiguous().view(torch.uint8), states.view(torch.uint8))


OTHER = {
    "seq": lambda spec: spec.seq + 1,
    "tokens": lambda spec: spec.tokens + 1,
    "features": lambda spec: spec.features + 1,
    "hidden_size": lambda spec: spec.hidden_size + 1,
    "dtype": lambda spec: DTYPES[(DTYPES.index(spec.dtype) + 1) % 3],
}


@settings(deadline=None)
@given(specs, st.sampled_from(sorted(OTHER)), st.integers(0, 99))
def test_another_message_is_named(spec, name, seed):
    """Whatever the plan says else than the header, and also where the sizes happen to agree."""
    planned = dataclasses.replace(spec, **{name: OTHER[name](spec)})
    message = torch.zeros(max(planned.num_bytes, spec.num_bytes), dtype=torch.uint8)
    message[: spec.num_bytes] = encode(spec, random_states(spec, seed))
    with pytest.raises(TransportError) as error:
        decode(planned, message[: planned.num_bytes], 3, 0)
    assert str(error.value).startswith("message from rank 3 to rank 0: ")
    assert f"{name.replace('_', ' ')} is {getattr(spec, name)}, " in str(error.value)
    assert f"the plan says {getattr(planned, name)}" in str(error.value)
    assert error.value.seq == planned.seq


SPEC = MessageSpec(seq=12, tokens=5, features=2, hidden_size=3, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_bytes", [0, 1, HEADER.size, HEADER.size + 7, SPEC.num_bytes - 1])
def test_cut_short(num_bytes):
    """The rest of the buffer is what `empty_message` made of it, or old bytes in between."""
    whole = encode(SPEC, random_states(SPEC, 0))
    message = empty_message(SPEC, torch.device("cpu"))
    message[:num_bytes] = whole[:num_bytes]
    with pytest.raises(TransportError, match=r"cut short|not a message of this version"):
        decode(SPEC, message, 3, 0)


def test_an_empty_message_has_neither_header_nor_trailer():
    """In memory that held a whole message before, else a short one would look whole."""
    for _ in range(20):
        encode(SPEC, random_states(SPEC, 0))  # freed at once: the next one gets its memory
        message = empty_message(SPEC, torch.device("cpu"))
        assert not message[: HEADER.size].any() and not message[-TRAILER.size :].any()


@pytest.mark.parametrize("place", range(HEADER.size, SPEC.num_bytes - TRAILER.size))
def test_every_payload_byte_is_under_the_checksum(place):
    message = encode(SPEC, random_states(SPEC, 0), checksum=True)
    message[place] ^= 1
    with pytest.raises(TransportError, match="checksum of its 60 bytes is wrong"):
        decode(SPEC, message, 3, 0)


def test_another_version_is_named():
    message = encode(SPEC, random_states(SPEC, 0))
    message[0] += 1
    with pytest.raises(TransportError, match="rank 3 to rank 0: not a message of this version"):
        decode(SPEC, message, 3, 0)


def test_a_sender_that_breaks_its_own_spec_is_a_programmers_error():
    with pytest.raises(AssertionError):
        encode(SPEC, torch.zeros(4, 6, dtype=torch.bfloat16))
    with pytest.raises(AssertionError):
        encode(SPEC, torch.zeros(5, 6))
