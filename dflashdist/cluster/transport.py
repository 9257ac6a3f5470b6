"""Hidden states from target ranks to drafter ranks: one point-to-point message per micro-batch.

Invariants
- A message is one contiguous buffer: header, the tapped hidden states of the real tokens, trailer.
  The receiver computes its size from the plan and checks header and trailer, so a wrong seq, shape
  or dtype, and a message cut short, are errors that name both ranks.
- One thread per rank issues all point-to-point operations of the data group. No tags, no receive
  from any source: NCCL has neither. All target-drafter pairs are warmed up in one fixed order.
- Nothing is sent before its receive is about to be posted: the target announces a seq in its
  drafter's inbox, the drafter answers `go/{seq}`, and both start together. An unmatched NCCL
  operation would be a kernel that spins on the GPU.
- A target announces one message at a time, in the order of the work queue; a drafter serves its
  inbox in order. So each pair of ranks sends and receives in the same order.
- A drafter takes messages by arrival into memory that holds all it may be sent: no more than
  `credit` micro-batches are outstanding in the job. So no target waits for a drafter's turn, and
  nothing can be stuck behind a message that comes too early. Consumption is by seq.
"""

import logging
import queue
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dflashdist.cluster.health import Halted, Health
from dflashdist.cluster.roles import Roles

log = logging.getLogger(__name__)

MAGIC = 0x64666C617368_0001  # "dflash", layout 1
HEADER = struct.Struct("<QqqqqqQq")  # magic, seq, tokens, features, hidden size, dtype, checksum, 0
TRAILER = struct.Struct("<qQ")  # seq, magic (its last byte is not 0): missing if cut short
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TransportError(RuntimeError):
    """A message that is not what the plan says; names both ranks."""

    def __init__(self, seq: int, text: str) -> None:
        super().__init__(text)
        self.seq = seq


@dataclass(frozen=True)
class MessageSpec:
    """A micro-batch's message by the plan: states [tokens, features x hidden_size]."""

    seq: int
    tokens: int
    features: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def payload_bytes(self) -> int:
        return self.tokens * self.features * self.hidden_size * self.dtype.itemsize

    @property
    def facts(self) -> tuple[int, int, int, int, int]:
        """Seq, tokens, features, hidden size and dtype as numbers."""
        return self.seq, self.tokens, self.features, self.hidden_size, DTYPES.index(self.dtype)

    @property
    def num_bytes(self) -> int:
        return HEADER.size + self.payload_bytes + TRAILER.size


def encode(spec: MessageSpec, packed: torch.Tensor, checksum: bool = False) -> torch.Tensor:
    """The message, uint8 [num_bytes] on the device of `packed` [tokens, features x hidden_size]."""
    assert packed.shape == (spec.tokens, spec.features * spec.hidden_size), (packed.shape, spec)
    assert packed.dtype == spec.dtype, (packed.dtype, spec.dtype)
    payload = packed.contiguous().view(torch.uint8).flatten()
    crc = checksum_of(payload) if checksum else 0
    header = HEADER.pack(MAGIC, *spec.facts, crc, 0)
    message = torch.empty(spec.num_bytes, dtype=torch.uint8, device=packed.device)
    message[: HEADER.size] = as_tensor(header, packed.device)
    message[HEADER.size : HEADER.size + spec.payload_bytes] = payload
    message[HEADER.size + spec.payload_bytes :] = as_tensor(
        TRAILER.pack(spec.seq, MAGIC), packed.device
    )
    return message


def empty_message(spec: MessageSpec, device: torch.device) -> torch.Tensor:
    """A buffer to receive into; its trailer is zero until a whole message has come."""
    message = torch.empty(spec.num_bytes, dtype=torch.uint8, device=device)
    message[: HEADER.size] = 0
    message[-TRAILER.size :] = 0
    return message


def decode(spec: MessageSpec, message: torch.Tensor, sender: int, receiver: int) -> torch.Tensor:
    """The hidden states [tokens, features x hidden_size] of a received message, as a view.

    Raises TransportError naming both ranks when the message is not the one the plan calls for.
    """
    between = f"message from rank {sender} to rank {receiver}"
    magic, seq, tokens, features, hidden_size, dtype, crc, _ = HEADER.unpack(
        message[: HEADER.size].cpu().numpy().tobytes()
    )
    if magic != MAGIC:
        raise TransportError(
            spec.seq, f"{between}: not a message of this version (header {magic:#x})"
        )
    check_claims(spec, (seq, tokens, features, hidden_size, dtype), sender, receiver)
    payload = message[HEADER.size : HEADER.size + spec.payload_bytes]
    trailer = TRAILER.unpack(message[-TRAILER.size :].cpu().numpy().tobytes())
    if trailer != (spec.seq, MAGIC):
        raise TransportError(
            spec.seq, f"{between}: cut short, fewer than its {spec.num_bytes} bytes came"
        )
    if crc and crc != checksum_of(payload):
        raise TransportError(
            spec.seq, f"{between}: the checksum of its {spec.payload_bytes} bytes is wrong"
        )
    return payload.view(spec.dtype).view(spec.tokens, spec.features * spec.hidden_size)


def check_claims(spec: MessageSpec, got: Sequence[int], sender: int, receiver: int) -> None:
    """Hold what a message says of itself to the plan. Raises TransportError naming both ranks."""
    for name, mine, theirs in zip(
        ("seq", "tokens", "features", "hidden size", "dtype"), spec.facts, got, strict=True
    ):
        if mine != theirs:
            if name == "dtype":
                theirs = DTYPES[theirs] if 0 <= theirs < len(DTYPES) else f"code {theirs}"
                mine = spec.dtype
            raise TransportError(
                spec.seq,
                f"message from rank {sender} to rank {receiver}: {name} is {theirs}, "
                f"the plan says {mine}",
            )


def as_tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def checksum_of(payload: torch.Tensor) -> int:
    """CRC32 of the payload, never 0 (0 says that there is none)."""
    return zlib.crc32(payload.cpu().numpy().data) or 1


class PointToPoint:
    """The only place that issues point-to-point operations on the data group; one thread a rank."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, trace: Callable[..., None]
    ) -> None:
        self._group, self._device, self._trace = group, device, trace
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, message: torch.Tensor, to: int, seq: int, ready: Any = None) -> None:
        """Send and wait until the buffer may be reused. `ready` is a CUDA event of its maker."""
        self._issue("send", dist.isend, message, to, seq, ready)

    def receive(self, message: torch.Tensor, source: int, seq: int) -> None:
        """Receive and wait until the bytes are there."""
        self._issue("receive", dist.irecv, message, source, seq, None)

    def _issue(
        self,
        kind: str,
        operation: Callable[..., Any],
        message: torch.Tensor,
        peer: int,
        seq: int,
        ready: Any,
    ) -> None:
        self._trace(
            kind, peer=peer, seq=seq, bytes=message.numel(), thread=threading.current_thread().name
        )
        with self.stream():
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            work = operation(message, peer, group=self._group)
            assert work is not None
            work.wait()
        if self._stream is not None:  # there `wait` only ordered the stream
            self._stream.synchronize()

    def stream(self) -> AbstractContextManager[Any]:
        """Messages are made, moved and looked at on a CUDA stream of their own: the default one
        holds the model's kernels, which a transfer should run beside and not wait for."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def warm_up(self, roles: Roles, rank: int) -> None:
        """Connect every target-drafter pair, in one order for all ranks (NCCL connects lazily)."""
        with self.stream():
            token = torch.zeros(8, dtype=torch.uint8, device=self._device)
        for target in roles.target_ranks:
            for drafter in roles.drafter_ranks:
                if rank == target:
                    self.send(token, drafter, -1)
                elif rank == drafter:
                    self.receive(token, target, -1)


class Sender:
    """The target's side. `put` hands over a micro-batch; a thread announces and sends it."""

    def __init__(
        self,
        link: PointToPoint,
        store: dist.Store,
        health: Health,
        roles: Roles,
        *,
        rank: int,
        drafter_of: Callable[[int], int],
        max_unsent: int,
        checksum: bool = False,
        delay: float = 0.0,
    ) -> None:
        self._link, self._store, self._health, self._roles, self._rank = (
            link,
            store,
            health,
            roles,
            rank,
        )
        self._drafter_of, self._checksum, self._delay = drafter_of, checksum, delay
        self._room = threading.Semaphore(max_unsent)
        self._items: queue.Queue[Any] = queue.Queue()
        self._done = threading.Event()
        health.thread("transport", self._run)

    def wait_for_room(self) -> None:
        """Block while `max_unsent` messages are held. Before each `put`, once."""
        self._health.acquire(self._room)

    def put(self, spec: MessageSpec, packed: torch.Tensor) -> None:
        """Copy [tokens, features x hidden_size] into a message and hand it to the thread."""
        message = encode(spec, packed, self._checksum)
        ready = None
        if message.is_cuda:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(message.device))
        self._items.put((spec, message, ready))

    def close(self) -> None:
        """Return when everything is sent."""
        self._items.put(None)
        while not self._done.wait(0.5):
            self._health.check()

    def _run(self) -> None:
        self._link.warm_up(self._roles, self._rank)
        while (item := self._health.take(self._items)) is not None:
            spec, message, ready = item
            seq = spec.seq
            drafter = self._drafter_of(seq)
            pause(self._delay)
            place = self._store.add(f"inbox_size/{drafter}", 1) - 1
            self._store.set(
                f"inbox/{drafter}/{place}", " ".join(map(str, (self._rank, *spec.facts)))
            )
            self._health.wait_key(self._store, f"go/{seq}")
            self._store.delete_key(f"go/{seq}")
            with naming(seq, f"send of seq {seq} from rank {self._rank} to rank {drafter}"):
                self._link.send(message, drafter, seq, ready)
            del item, message
            self._room.release()
        self._done.set()


class Receiver:
    """The drafter's side. A thread takes messages by arrival; `get` hands them out by seq."""

    def __init__(
        self,
        link: PointToPoint,
        store: dist.Store,
        health: Health,
        roles: Roles,
        *,
        rank: int,
        spec_of: Callable[[int], MessageSpec],
        num_messages: int,
        device: torch.device,
    ) -> None:
        """`num_messages`: how many will come in all, known from the plan."""
        self._link, self._store, self._health, self._roles, self._rank = (
            link,
            store,
            health,
            roles,
            rank,
        )
        self._spec_of, self._num_messages, self._device = spec_of, num_messages, device
        self._arrived: dict[int, torch.Tensor] = {}
        self._news = threading.Condition()
        health.thread("transport", self._run)

    def get(self, seq: int) -> torch.Tensor:
        """The states [tokens, features x hidden_size] of `seq`; blocks until they are here."""
        with self._news:
            while seq not in self._arrived:
                self._news.wait(0.5)
                self._health.check()
            packed = self._arrived.pop(seq)
        if packed.is_cuda:  # made on the transport's stream: no reuse before the model has read it
            packed.record_stream(torch.cuda.current_stream(packed.device))
        return packed

    def _run(self) -> None:
        self._link.warm_up(self._roles, self._rank)
        for place in range(self._num_messages):
            key = f"inbox/{self._rank}/{place}"
            sender, *facts = map(int, self._health.wait_key(self._store, key).split())
            self._store.delete_key(key)
            seq = facts[0]
            spec = self._spec_of(seq)
            # Before the receive is posted: a longer message ends a gloo process, and hangs NCCL.
            check_claims(spec, facts, sender, self._rank)
            with self._link.stream():
                message = empty_message(spec, self._device)
            self._store.set(f"go/{seq}", "1")
            with naming(seq, f"receive of seq {seq} from rank {sender} by rank {self._rank}"):
                self._link.receive(message, sender, seq)
            with self._link.stream():
                packed = decode(spec, message, sender, self._rank)
            with self._news:
                self._arrived[seq] = packed
                self._news.notify_all()


def pause(delay: float) -> None:
    """A random pause of up to `delay` seconds, to shake the order of arrival in tests."""
    if delay:
        time.sleep(random.uniform(0, delay))


class naming:
    """Adds to a failed operation which message it was, and between whom."""

    def __init__(self, seq: int, what: str) -> None:
        self._seq, self._what = seq, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, (Halted, TransportError)):
            raise TransportError(self._seq, f"{self._what} failed: {error}") from error
