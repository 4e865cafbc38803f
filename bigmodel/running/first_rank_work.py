"""Long work that one rank does for all, such as tokenising, before the others go on.

They wait at the key-value store, which has no time-out but this one, and not in a
collective, whose time-out is for ranks that compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from bigmodel.errors import WorkerError
from bigmodel.running.rendezvous import Membership

Result = TypeVar("Result")

_POLL_SECONDS = 0.1


def run_first(
    member: Membership, key: str, work: Callable[[], Result], timeout: float
) -> Result:
    """Run `work` on rank 0, and then, when it has ended there, on the others.

    Args:
        member: This process.
        key: Another one for every call, the same on all ranks.
        work: Leaves its result where the others find it, such as in a cache.
        timeout: Seconds that the others wait.

    Raises:
        WorkerError: Rank 0 failed, or was not done in time.
    """
    if member.rank == 0:
        try:
            result = work()
        except BaseException as error:
            member.store.set(key, f"failed with {type(error).__name__}: {error}")
            raise
        member.store.set(key, "")
        return result
    begin = time.monotonic()
    while not member.store.check([key]):
        if time.monotonic() - begin > timeout:
            raise WorkerError(
                f"rank {member.rank} waited {timeout:g} s for rank 0, whose work "
                "before the others has not ended; raise rank0_first(..., timeout=)"
            )
        time.sleep(_POLL_SECONDS)
    problem = member.store.get(key).decode()
    if problem:
        raise WorkerError(
            f"rank {member.rank} stopped because rank 0, which works before the "
            f"others, {problem}"
        )
    return work()
