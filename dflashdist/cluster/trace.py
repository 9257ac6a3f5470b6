"""The trace of a rank: one JSON line an event, for tests of order and for finding faults."""

import json
import threading
import time
from pathlib import Path
from typing import Any


class Trace:
    """Appends events with the machine's monotonic clock; safe to call from several threads.

    Times of ranks on one machine compare. Without a path it does nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = open(path, "a", buffering=1) if path else None  # noqa: SIM115, open for life
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        """Whether events go anywhere: facts that cost something need not be gathered otherwise."""
        return self._file is not None

    def __call__(self, event: str, **facts: Any) -> None:
        if self._file is None:
            return
        with self._lock:
            self._file.write(json.dumps({"event": event, "ns": time.monotonic_ns()} | facts) + "\n")
