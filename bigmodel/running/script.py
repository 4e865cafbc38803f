"""How a training script ends: one clear message and an exit code, or a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from bigmodel.errors import BigModelError, WorldError
from bigmodel.running.environment import read_process


def run_main(main: Callable[[], None]) -> None:
    """Run the script's main function, and exit with the code of its error if any.

    Errors of this library are printed in one message; others keep their traceback.
    """
    try:
        main()
    except BigModelError as error:
        rank = read_process().rank
        # Every rank has the same error about the world: once is enough.
        if rank == 0 or not isinstance(error, WorldError):
            where = f"rank {rank}: " if rank else ""
            print(f"{where}error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
