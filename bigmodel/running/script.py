"""How a training script ends: one clear message and an exit code, or a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from bigmodel.errors import BigModelError, WorldError
from bigmodel.running.environment import read_process
from bigmodel.running.failure_report import record_failure

_LEAVE_SECONDS = 10
"""How long a failed rank may take to leave. It may wait for ranks that wait for it."""


def run_main(main: Callable[[], None]) -> None:
    """Run the script's main function, and exit with the code of its error if any.

    Errors of this library are printed in one message; others keep their traceback. Both
    are written to the rank's failure report, where the launcher asks for one. A failed
    rank of several that cannot leave is killed after 10 seconds, so that its launcher
    notices.
    """
    try:
        main()
    except BigModelError as error:
        reported = _fail(error)
        process = read_process()
        rank = process.rank
        # Every rank has the same error about the world: once is enough. What rank 0 of
        # `bigmodel run` reports, the launcher says, if no other rank is to blame.
        said = reported and process.launcher == "bigmodel run"
        if not (rank == 0 and said) and not (rank and isinstance(error, WorldError)):
            where = f"rank {rank}: " if rank else ""
            print(f"{where}error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except Exception as error:
        _fail(error)
        raise


def _fail(error: Exception) -> bool:
    reported = record_failure(error)
    if read_process().world_size > 1:
        # The system's own timer: Python's may no longer run while a process ends.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_LEAVE_SECONDS)
    return reported
