"""What the operating system says: which processes live, on which machine, and who asked to stop."""

import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """SIGTERM, SIGHUP and SIGINT as a list to read, instead of the end of the process.

    A Python handler cannot run while the main thread is inside C++ (a collective, a receive), so
    the signals are read from the wake-up descriptor, by any thread.

    One that was ignored at the start (of nohup, or SIGINT of a shell's `&`) stays so. Not under
    torchrun, which hears all of them whatever it inherits, passes them on, and kills ranks that do
    not end by them.
    """

    def __init__(self) -> None:
        """Takes the signals over if made in the main thread; elsewhere there is none to read."""
        self._descriptor: int | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        self._descriptor, write = os.pipe()
        os.set_blocking(self._descriptor, False)
        os.set_blocking(write, False)
        for number in STOPS:
            if (
                signal.getsignal(number) is not signal.SIG_IGN
                or "TORCHELASTIC_RUN_ID" in os.environ
            ):
                signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def received(self) -> list[int]:
        """The stop signals that came since the last call."""
        if self._descriptor is None:
            return []
        try:
            numbers = os.read(self._descriptor, 64)
        except BlockingIOError:
            return []
        return [number for number in numbers if number in STOPS]


def machine_id() -> str:
    """What tells machines and containers apart: where a process id means something."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that ended and was not yet reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc/self"):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def children() -> list[int]:
    """The processes that this one has started and that still run, where there is a /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state not in ("Z", "X"):
                found.append(int(file.parent.name))
    return found


def end_process(pid: int) -> None:
    """Kill a process of this job that does not answer any more, if it still runs."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
