"""The report of a failed rank, written before anything is torn down.

Leaving a process group can block for as long as another rank is stuck, so what happened
is written to a file at the moment it happens. The file is that of torch's elastic
agent, `TORCHELASTIC_ERROR_FILE`, in its format
(torch/distributed/elastic/multiprocessing/errors/error_handler.py), so that torchrun
shows it too. Under launchers without one, the folder BIGMODEL_REPORTS gets a file per
rank.
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigmodel.errors import BigModelError, WorkerError
from bigmodel.running.environment import error_file


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """What a failed rank said about itself."""

    message: str
    """Type and text of the error: `ValueError: boom`."""
    where: str
    """What it was doing: `backward of step 2`; empty when it did not say."""
    exit_code: int
    """What the process means to end with."""
    traceback: str
    time_ns: int
    """When the file was written, nanoseconds since the epoch."""

    @property
    def is_consequence(self) -> bool:
        """Whether the error only says that another rank is silent."""
        return self.message.startswith(f"{WorkerError.__name__}:")


def record_failure(error: BaseException, where: str = "") -> bool:
    """Write the report of this rank; the first error counts, later ones follow from it.

    Args:
        error: What was raised.
        where: What was being done: `backward of step 2`.

    Returns:
        Whether there is a report now, for the launcher to show.
    """
    path = error_file()
    if path is None or path.exists():
        return path is not None
    code = error.exit_code if isinstance(error, BigModelError) else 1
    document = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "errorCode": code,
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
                "where": where,
            },
        }
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Never half a file: who watches the folder may read it at any moment.
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(document), encoding="utf-8")
        draft.rename(path)
    except OSError:
        return False  # a full disk must not hide the error itself
    return True


def forget_failure() -> None:
    """Remove the report of a failure that the script has survived."""
    if (path := error_file()) is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read_report(path: Path) -> FailureReport | None:
    """Return a rank's report, also one that torch wrote; None when there is none."""
    try:
        written = path.stat().st_mtime_ns
        told: Any = json.loads(path.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError):
        return None
    message: dict[str, Any] = {"message": told} if isinstance(told, str) else told
    extra: dict[str, Any] = message.get("extraInfo", {})
    return FailureReport(
        message=message["message"],
        where=extra.get("where", ""),
        exit_code=message.get("errorCode", 1),
        traceback=extra.get("py_callstack", ""),
        time_ns=written,
    )


def phase_of(error: BaseException) -> str:
    """Return which part of a step an error comes from; empty where it is none.

    It is read from the functions on the way: recomputation, which calls the model, is
    part of backward.
    """
    trace, phase = error.__traceback__, ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_name
        module = trace.tb_frame.f_globals.get("__name__", "")
        if name == "backward" and module in ("torch._tensor", "torch.autograd"):
            return "backward"
        if name == "update" and module.startswith("bigmodel.backends."):
            return "optimizer step"
        if name == "_call_impl" and module == "torch.nn.modules.module":
            phase = "forward"
        trace = trace.tb_next
    return phase
