"""Signals that ask a run to stop, as the process finds them at its start."""

import os
import subprocess
import sys

import pytest

CHILD = """
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell's &
signal.signal(signal.SIGTERM, signal.SIG_DFL)
from dflashdist.cluster.processes import STOPS, StopSignals
signals = StopSignals()
for number in STOPS:
    os.kill(os.getpid(), number)
print([signal.Signals(number).name for number in signals.received()])
"""


@pytest.mark.parametrize(
    ("torchrun", "heard"), [(False, ["SIGTERM"]), (True, ["SIGTERM", "SIGINT", "SIGHUP"])]
)
def test_what_was_ignored_stays_ignored_but_under_torchrun(torchrun, heard):
    environment = {key: value for key, value in os.environ.items() if "TORCHELASTIC" not in key}
    environment |= {"TORCHELASTIC_RUN_ID": "x"} if torchrun else {}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment, check=True
    )
    assert child.stdout == f"{heard}\n"
