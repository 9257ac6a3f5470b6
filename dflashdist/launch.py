"""torchrun, whose console ends with the job's own line instead of the launcher's traceback.

    python -m dflashdist.launch --standalone --nproc-per-node=8 -m dflashdist train CONF

takes torchrun's arguments. The exit code is that of the rank that failed first (2 refused, 1
failed), 1 where a signal killed it, 130 and 143 after Ctrl-C and SIGTERM. Those two and SIGHUP are
passed on to the ranks, which save and leave in their own time; torchrun itself would kill them
after 30 s, in the middle of a large checkpoint. A second Ctrl-C ends them at once.
"""

import logging
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from dflashdist.cluster.processes import STOPS, children


def main(arguments: list[str]) -> int:
    """Run the job to its end; returns the exit code."""
    if "LOGLEVEL" not in os.environ:  # torch's switch for what the launcher says
        logging.disable()
    asked: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        ranks = children()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        if not ranks:
            raise SystemExit(128 + number)

    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, pass_on)
    code = 0
    try:
        run(parse_args(["--signals-to-handle=SIGQUIT", *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 1
        if failure.exitcode < 0 and not asked:
            name = signal.Signals(-failure.exitcode).name
            print(f"dflashdist: rank {rank} (process {failure.pid}) was ended by {name}",
                  file=sys.stderr)  # fmt: skip
    return 128 + asked[0] if asked else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
