"""Pausing Python's garbage collector for a short, object-heavy computation.

Tracing and searching make millions of small objects and hardly any cycles, in a process
that holds all of torch: full collections took a quarter of the time of both.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage meanwhile; afterwards all is as before."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
