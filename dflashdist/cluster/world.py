"""The job as one rank sees it: its number, its device, the store, and the process groups.

Store keys live under a prefix of run id and attempt, so a restarted job never reads the keys, or
the dead addresses, of its former life. Groups are made by all ranks in the same order:
`control` (gloo, all ranks), `data` (all ranks; hidden states), `drafters` (DDP and step sums).
"""

import json
import logging
import math
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dflashdist.cluster.health import Halted, Health
from dflashdist.cluster.processes import machine_id
from dflashdist.cluster.roles import COLOCATED, Member, Roles
from dflashdist.config import InputError, PipelineConfig

log = logging.getLogger(__name__)

GROUP_TIMEOUT = timedelta(hours=12)  # waits are bounded by Health, not by the groups
JOIN_SECONDS = 300.0  # for all ranks to appear


@dataclass(frozen=True)
class Place:
    """What the launcher says of this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 0  # how often torchrun has started the job again

    @classmethod
    def from_environment(cls) -> "Place":
        """The place that torchrun put this process in; alone when there was no launcher."""
        if "RANK" not in os.environ:
            return cls()
        names = {
            "RANK": 0,
            "WORLD_SIZE": 1,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        return cls(*(int(os.environ.get(name, fallback)) for name, fallback in names.items()))


def choose_device(wanted: str, place: Place) -> torch.device:
    """The device of this rank. Raises InputError if CUDA is asked for and absent."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device=cuda: torch sees no CUDA device; set it to cpu, or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class World:
    """The store, the groups and the health of this rank."""

    def __init__(
        self,
        place: Place,
        roles: Roles,
        device: torch.device,
        pipeline: PipelineConfig,
        *,
        advice: str = "",
    ) -> None:
        """Join the job: register, wait for all ranks, make the groups."""
        self.place, self.roles, self.device = place, roles, device
        self.rank, self.role = place.rank, roles.role(place.rank)
        self.member = Member(
            self.rank, self.role, socket.gethostname(), str(device), os.getpid(), machine_id()
        )
        self._hosts_store = False
        self._root = self._open_store()
        self.store = self.prefixed(self._root)
        self.health = Health(
            self.clone_store(),
            self.member,
            silence=pipeline.silence_seconds,
            stall=pipeline.stall_seconds,
            advice=advice,
        )
        self.members = self.register()
        self.health.start(self.members)
        try:
            with self.health.guard():
                self._make_groups()
        except Halted:
            self.linger()
            raise

    def _make_groups(self) -> None:
        """The process groups, by all ranks in this order."""
        place, roles = self.place, self.roles
        interfaces = [name for _, name in socket.if_nameindex()]
        if place.local_world_size == place.world_size and "lo" in interfaces:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: listen to nobody else
        self.health.phase("joining the process groups")
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", self.clone_store()),
            rank=place.rank,
            world_size=place.world_size,
            timeout=GROUP_TIMEOUT,
        )
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self.data: dist.ProcessGroup | None = None
        if roles.layout != COLOCATED:
            self.data = new_group(range(place.world_size), backend)
        self.drafters = new_group(roles.drafter_ranks, backend)

    def _open_store(self) -> dist.Store:
        if self.place.world_size == 1:
            return dist.HashStore()  # nobody else: nothing listens
        agent = torchrun_holds_store()
        many_nodes = self.place.local_world_size < self.place.world_size
        if agent and many_nodes and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            raise InputError(
                "a job of several nodes that torchrun restarts would find its old keys: export "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 as launch/slurm.sbatch does, or restart none"
            )
        self._hosts_store = self.rank == 0 and not agent
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=self._hosts_store,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )

    def prefixed(self, store: dist.Store) -> dist.Store:
        """Keys of this run and attempt. torchrun counts attempts node by node, so only where its
        own store outlives them, on one node, is the count alike everywhere and needed."""
        run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        attempt = self.place.attempt if torchrun_holds_store() else 0
        return dist.PrefixStore(f"dflashdist/{run}/attempt_{attempt}", store)

    def clone_store(self) -> dist.Store:
        """A client of its own for a thread: clients are safe to share but wait for each other."""
        if isinstance(self._root, dist.HashStore):
            return self.store  # within one process, without a connection
        assert isinstance(self._root, dist.TCPStore)
        return self.prefixed(self._root.clone())  # pyright: ignore[reportAttributeAccessIssue]

    def barrier(self, name: str, seconds: float = math.inf) -> None:
        """Return when every rank has come to `name`. Raises InputError after `seconds`, naming who
        did not; without a limit the ranks' health bounds the wait."""
        self.health.phase(f"wait for all ranks ({name})")
        self.store.set(f"{name}_at/{self.rank}", "1")
        self.store.add(f"{name}_count", 1)
        if not self.wait_count(f"{name}_count", self.place.world_size, seconds):
            ranks = range(self.place.world_size)
            missing = [r for r in ranks if not self.store.check([f"{name}_at/{r}"])]
            raise InputError(f"ranks {missing} did not come within {seconds:.0f} s ({name})")

    def wait_count(self, key: str, count: int, seconds: float = math.inf) -> bool:
        """Wait until a counter of the store has come to `count`; False after `seconds`."""
        deadline, pause = time.monotonic() + seconds, 0.002
        while self.store.add(key, 0) < count:
            self.health.check()
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return True

    def register(self) -> list[Member]:
        """Introduce this rank and return all members, in rank order."""
        self.store.set(f"member/{self.rank}", json.dumps(asdict(self.member)))
        self.health.register()
        self.barrier("member", JOIN_SECONDS)
        keys = [f"member/{rank}" for rank in range(self.place.world_size)]
        return [Member(**json.loads(value)) for value in self.store.multi_get(keys)]

    def agree(self, facts: dict[str, str]) -> None:
        """Hold that all ranks have the facts of rank 0, which compares them.

        Raises InputError on rank 0, naming what differs and where; the others are then halted.
        """
        self.store.set(f"facts/{self.rank}", json.dumps(facts))
        self.barrier("facts")
        for rank in range(1, self.place.world_size) if self.rank == 0 else ():
            theirs = json.loads(self.store.get(f"facts/{rank}"))
            for name, value in facts.items():
                if theirs[name] != value:
                    raise InputError(
                        f"rank {rank} on {self.members[rank].host} has another {name} than rank 0: "
                        f"{difference(value, theirs[name])}; do all hosts see the same files?"
                    )
        self.barrier("agreed")

    def linger(self) -> None:
        """After a failure: who hosts the store stays until the others have read the cause in it."""
        if self._hosts_store:
            time.sleep(2.0)

    def close(self) -> None:
        """Leave in good order; who hosts the store leaves last."""
        self.health.close()
        if self._hosts_store:
            deadline = time.monotonic() + 30
            while self.store.add("left", 0) < self.place.world_size:
                if time.monotonic() > deadline or self.health.alone():
                    break
                time.sleep(0.05)
        if not self.health.stop_requested.is_set():  # else a receive may still be open, for ever
            dist.destroy_process_group()


def torchrun_holds_store() -> bool:
    """Whether torchrun holds the store, so that it outlives an attempt; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def new_group(ranks: Iterable[int], backend: str) -> dist.ProcessGroup:
    """A group of `ranks`; all ranks call it, members or not (they get a stand-in)."""
    group = dist.new_group(list(ranks), GROUP_TIMEOUT, backend)
    return group  # pyright: ignore[reportReturnType]


def difference(mine: str, theirs: str) -> str:
    """The first line in which two texts differ, both sides."""
    pairs = zip(mine.splitlines(), theirs.splitlines(), strict=False)
    a, b = next((pair for pair in pairs if pair[0] != pair[1]), (mine, theirs))
    return f"{b.strip()!r} against {a.strip()!r}"
