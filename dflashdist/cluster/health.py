"""Signs of life, and the end of the job: every rank learns within a second that another has failed.

Invariants
- One key, `halt`, ends the job. It is set once, by compare-and-set; who sets it prints the cause,
  so the first message on the console is the first cause, and everybody else only logs it.
- Every blocking wait of this package is a loop of waits of at most a second that looks at `halted`.
- A thread that is inside C++ when the job is halted (a collective, a receive) is ended with its
  process after a grace of `GRACE` seconds; nothing half-written remains, as files are renamed.
- Ranks of a host watch each other's processes, so a killed rank is named in about a second;
  rank 0 watches everybody's signs of life, and everybody watches rank 0's, so a frozen rank is
  named after `silence` seconds; a rank whose main thread does not move is named after `stall`.
- The store itself may freeze with its host; a second thread notices that the first one hangs.
- An error that is only the echo of another (a connection that a dying peer closed) waits `ECHO`
  seconds for the cause to be named before it names itself.
"""

import faulthandler
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dflashdist.cluster.processes import StopSignals, end_process, is_alive
from dflashdist.cluster.roles import Member
from dflashdist.config import InputError

log = logging.getLogger(__name__)

TICK = 0.25  # seconds between two looks at the halt key
BEAT = 1.0  # seconds between two signs of life
GRACE = 4.0  # seconds that a halted rank has to leave by itself
ECHO = 4.0  # seconds that an echo waits for its cause
END = "wait for the end"  # the phase of a rank whose own work is done
FIRST_TIME = 24.0  # a first phase of its kind (loading, compiling) may take this many stalls


class Halted(Exception):
    """The job has ended: another rank failed, or all were asked to stop."""


@dataclass(frozen=True)
class Halt:
    """Why the job ended."""

    kind: str  # "abort", or "done": everything was consumed or the run was asked to stop
    rank: int
    text: str
    frozen: bool = False


class Health:
    """The signs of life of one rank, and its ear for the end of the job."""

    def __init__(
        self,
        store: dist.Store,
        member: Member,
        *,
        silence: float,
        stall: float,
        advice: str = "",
    ) -> None:
        """`store` is this object's own client; no other thread may use it."""
        self.member = member
        self.members: list[Member] = [member]
        self.halted = threading.Event()
        self.halt: Halt | None = None
        self.stop_requested = threading.Event()
        self.stats: Callable[[], dict[str, Any]] = dict
        self.beats: dict[int, dict[str, Any]] = {}
        self._store, self._lock = store, threading.Lock()
        self._silence, self._stall, self._advice = silence, stall, advice
        self._phase, self._seq, self._since, self._first = "start", None, time.monotonic(), True
        self._seen_phases: set[tuple[str, Any]] = set()
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._closing = threading.Event()
        self._ticked = time.monotonic()
        self._signals: StopSignals | None = None
        self._interrupts = 0
        self._thread = threading.Thread(target=self._watch, name="health", daemon=True)

    def register(self) -> None:
        """Give the first sign of life."""
        self._beat()

    def start(self, members: list[Member]) -> None:
        """Begin to watch; all members must have registered, each with a first sign of life."""
        self.members = members
        self._signals = StopSignals()  # until here SIGTERM ends the process: nobody would read it
        self._thread.start()
        threading.Thread(target=self._watch_the_watch, name="watchdog", daemon=True).start()

    # ---- what the main thread says of itself

    def phase(self, name: str, seq: int | None = None, kind: Any = None) -> None:
        """Note what the main thread does now. The first phase of a (name, kind) may be slow."""
        self._first = (name, kind) not in self._seen_phases
        self._seen_phases.add((name, kind))
        self._phase, self._seq, self._since = name, seq, time.monotonic()

    def check(self) -> None:
        """Raise Halted if the job has ended."""
        if self.halted.is_set():
            raise Halted(self.halt.text if self.halt else "the job has ended")

    def wait_key(self, store: dist.Store, key: str) -> bytes:
        """The value of `key`, once it is set. Raises Halted when the job ends first."""
        while True:
            self.check()
            try:
                store.wait([key], timedelta(seconds=1))
                return store.get(key)
            except dist.DistStoreError as error:
                if "timeout" not in str(error).lower():
                    raise

    def take(self, items: "queue.Queue[Any]") -> Any:
        """The next item of a local queue. Raises Halted when the job ends first."""
        while True:
            self.check()
            try:
                return items.get(timeout=0.5)
            except queue.Empty:
                continue

    def acquire(self, semaphore: threading.Semaphore) -> None:
        """Acquire, or raise Halted when the job ends first."""
        while not semaphore.acquire(timeout=0.5):
            self.check()
        self.check()

    # ---- threads and failures

    def thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Start a daemon thread whose failure is the job's failure."""

        def run() -> None:
            try:
                work()
            except Halted:
                pass
            except Exception as error:
                self.fail(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    @contextmanager
    def guard(self):
        """Around a rank's main work: any failure inside is named and ends the job."""
        try:
            yield
        except Halted:
            raise
        except Exception as error:
            self.fail(error)
            raise Halted(self.halt.text if self.halt else str(error)) from error

    def fail(self, error: BaseException) -> None:
        """End the job because of `error`, which arose on this rank."""
        log.info("%s", "".join(traceback.format_exception(error)))  # not on the console
        if is_echo(error) and self.halted.wait(ECHO):
            return
        if isinstance(error, InputError):  # says itself what to do, and resuming is not it
            self._set_halt(Halt("abort", self.member.rank, f"{self.member}: {error}"))
            return
        seq = getattr(error, "seq", self._seq)
        where = f", seq {seq}" if seq is not None else ""
        self.abort(self.member, f"{self._phase}{where}: {type(error).__name__}: {error}")

    def abort(self, culprit: Member, what: str, frozen: bool = False) -> None:
        """End the job with a cause; the first cause wins and is printed by the rank that set it.
        A frozen culprit is ended by the ranks of its machine: it cannot leave by itself."""
        text = f"{culprit}: {' '.join(what.split())}{self._advice}"
        self._set_halt(Halt("abort", culprit.rank, text, frozen))

    def finish(self, text: str) -> None:
        """End the job in good order: nothing more will be consumed."""
        self._set_halt(Halt("done", self.member.rank, text))

    def wait_end(self) -> None:
        """Return when the job has ended in good order. Raises Halted when it was aborted, so that
        a rank whose own work was long done does not leave as if all were well."""
        self.phase(END)
        while not self.halted.wait(1.0):
            pass
        if self.halt and self.halt.kind == "abort":
            raise Halted(self.halt.text)

    def close(self) -> None:
        """Stop watching; this rank leaves in good order."""
        self._closing.set()
        self._thread.join(timeout=5)
        self._beat(left=True)
        with self._lock:
            self._store.add("left", 1)

    def _set_halt(self, halt: Halt) -> None:
        mine = json.dumps(asdict(halt))
        with self._lock:
            try:
                winner = self._store.compare_set("halt", "", mine).decode()
            except Exception:  # the store is gone, so nobody else can be told or has told us
                winner = mine
        if winner == mine and halt.kind == "abort" and not self.halted.is_set():
            say(halt.text)  # before anybody leaves
        self._hear_halt(Halt(**json.loads(winner)))

    def _hear_halt(self, halt: Halt) -> None:
        if self.halted.is_set():
            return
        self.halt = halt
        log.info("the job ends: %s", halt.text)
        if halt.frozen:
            for member in self.members:
                if member.rank == halt.rank and member.machine == self.member.machine:
                    end_process(member.pid)
        self.halted.set()
        if halt.kind == "abort":
            threading.Thread(target=self._leave, name="leave", daemon=True).start()

    def _leave(self) -> None:
        """End the process if its main thread does not, and say in its log where that was."""
        time.sleep(GRACE)
        for handler in logging.getLogger().handlers:
            handler.flush()
            if isinstance(handler, logging.FileHandler) and handler.stream:
                faulthandler.dump_traceback(handler.stream)
        os._exit(1)

    # ---- the watching thread

    def _watch(self) -> None:
        next_beat = 0.0
        scale = max(1.0, len(self.members) / 512)  # one store answers all ranks
        while not self._closing.wait(TICK * scale):
            self._ticked = time.monotonic()
            try:
                self._read_signals()
                with self._lock:
                    halted = self._store.check(["halt"])
                    value = self._store.get("halt").decode() if halted else ""
                if value:
                    self._hear_halt(Halt(**json.loads(value)))
                if time.monotonic() >= next_beat and not self.halted.is_set():
                    next_beat = time.monotonic() + BEAT * scale
                    self._beat()
                    self._look_at_processes()
                    self._look_at_beats()
            except Exception as error:
                if self._closing.is_set() or self.halted.is_set():
                    return
                if isinstance(error, dist.DistError):
                    self._lose_store(error)
                else:
                    self.fail(error)
                return

    def _beat(self, left: bool = False) -> None:
        now = time.monotonic()
        beat = {
            "phase": self._phase,
            "seq": self._seq,
            "age": round(now - self._since, 3),
            "first": self._first,
            "stats": self.stats(),
            "left": left,
            "time": now,  # so that no two beats are alike
        }
        with self._lock:
            self._store.set(f"beat/{self.member.rank}", json.dumps(beat))
            if self.member.rank == 0 and self._store.check(["stop_request"]):
                self.stop_requested.set()

    def _watch_the_watch(self) -> None:
        """A frozen host of the store keeps its clients inside C++ for ever, timeouts or not; then
        nobody can be told, and each rank ends by itself."""
        late = 0.0
        while not self._closing.wait(1.0) and not self.halted.is_set():
            late = late + 1.0 if time.monotonic() - self._ticked > 4.0 else 0.0
            if late > self._silence:  # counted here, so a pause of this process does not count
                host = self.members[0]
                text = f"{host}: no sign of life for {late:.0f} s (frozen?), and with it the store"
                text += self._advice
                say(text)
                self._hear_halt(Halt("abort", host.rank, text, frozen=True))

    def _lose_store(self, error: Exception) -> None:
        """The store died with its host: rank 0, or torchrun where that holds it."""
        log.error("the store does not answer: %s", error)
        lost = (self._ended() or self.members)[0]
        self.abort(lost, f"{gone(lost)}; the job's store does not answer any more")

    def alone(self) -> bool:
        """Whether all other ranks were on this machine and have ended."""
        others = len(self.members) - 1
        return others > 0 and len(self._ended()) == others

    def _ended(self) -> list[Member]:
        """Members of this machine whose processes are no more."""
        here = [m for m in self.members if m.machine == self.member.machine]
        return [m for m in here if m.rank != self.member.rank and not is_alive(m.pid)]

    def _look_at_processes(self) -> None:
        for member in self._ended():
            with self._lock:
                beat = json.loads(self._store.get(f"beat/{member.rank}"))
            if not beat["left"] and not self.halted.is_set():
                self.abort(member, f"{gone(member)}, last seen in {where(beat)}")

    def _look_at_beats(self) -> None:
        """Rank 0 looks at everybody, the others at rank 0 alone; one request either way."""
        now = time.monotonic()
        watched = self.members if self.member.rank == 0 else self.members[:1]
        with self._lock:
            values = self._store.multi_get([f"beat/{member.rank}" for member in watched])
        for member, value in zip(watched, values, strict=True):
            previous, since = self._heard.get(member.rank, (b"", now))
            if value != previous:
                self._heard[member.rank] = (value, now)
                since = now
            beat = self.beats[member.rank] = json.loads(value)
            if not beat["left"]:
                self._judge(member, beat, now - since)

    def _judge(self, member: Member, beat: dict[str, Any], silent: float) -> None:
        """A silent rank is lost. One in the same phase for too long is stuck, unless it waits:
        those who wait for it are in their phase as long, and are not to blame."""
        if silent > self._silence:
            what = f"no sign of life for {silent:.0f} s (frozen?); last in {where(beat)}"
            self.abort(member, what, frozen=True)
        if beat["phase"] == END:  # those it waits for are judged themselves
            return
        waits = beat["phase"].startswith("wait")
        limit = self._stall * (FIRST_TIME if beat["first"] or waits else 1.0)
        if beat["age"] + silent > limit:
            what = f"stuck for {beat['age'] + silent:.0f} s in {where(beat)}"
            self.abort(member, f"{what} (pipeline.stall_seconds, if such a wait is expected)")

    def _read_signals(self) -> None:
        asked = self._signals.received() if self._signals else []
        if not asked:
            return
        self._interrupts += asked.count(signal.SIGINT)
        if self._interrupts > 1:  # whoever insists need not wait for the step
            os._exit(130)
        self._look_at_processes()  # torchrun asks as well when a rank has died, which is a loss
        if self.halted.is_set():
            return
        log.info("asked to stop by signal %s", asked)
        self.stop_requested.set()
        with self._lock:
            self._store.set("stop_request", "1")


def say(text: str) -> None:
    """Tell the console why the job ends, on a line of its own where a progress bar is drawn."""
    bar = "\n" if sys.stderr.isatty() else ""
    print(f"{bar}dflashdist: {text}", file=sys.stderr, flush=True)


def is_echo(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError)):
        return True
    text = str(error)
    signs = (
        "Connection closed", "Connection reset", "Connection refused", "Broken pipe",
        "Socket closed", "pair closure", "unhandled system error", "remote process",
    )  # fmt: skip
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def where(beat: dict[str, Any]) -> str:
    """What a rank was doing when it gave this sign of life."""
    return beat["phase"] + ("" if beat["seq"] is None else f", seq {beat['seq']}")


def gone(member: Member) -> str:
    return f"process {member.pid} ended without a word (killed? out of memory?)"
