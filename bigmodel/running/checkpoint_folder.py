"""A checkpoint's folder: what is in it beside the tensors that a backend writes.

state/           weights and optimizer states, by the backend
ranks/0.pt ...   what every rank has for itself: scheduler, random numbers, and the
                 place in a stream of its own
progress.json    steps, and the place in the data, for all ranks and every plan
plan.json        written last: a folder without it is no checkpoint
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, final

import torch

from bigmodel.errors import UsageError
from bigmodel.plans import Plan, document

_PLAN_FILE = "plan.json"
_PROGRESS_FILE = "progress.json"
_STATE_FOLDER = "state"
_RANKS_FOLDER = "ranks"


@final
class CheckpointFolder:
    """One checkpoint.

    Args:
        path: Of the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    @property
    def state(self) -> str:
        """Folder of the backend's files."""
        return str(self._path / _STATE_FOLDER)

    def begin(self) -> None:
        """Make the folder, no complete checkpoint yet; rank 0 does."""
        (self._path / _STATE_FOLDER).mkdir(parents=True, exist_ok=True)
        (self._path / _RANKS_FOLDER).mkdir(exist_ok=True)
        (self._path / _PLAN_FILE).unlink(missing_ok=True)

    def write_rank(self, rank: int, own: dict[str, Any]) -> None:
        """Write what a rank has for itself: tensors and plain values."""
        torch.save(own, self._path / _RANKS_FOLDER / f"{rank}.pt")

    def finish(self, plan: Plan, progress: dict[str, Any]) -> None:
        """Write what all ranks share, and make the checkpoint complete."""
        text = json.dumps(progress, indent=1)
        (self._path / _PROGRESS_FILE).write_text(text + "\n")
        document.save(plan, self._path / _PLAN_FILE)

    def plan(self) -> Plan:
        """Return the plan under which it was written.

        Raises:
            UsageError: The checkpoint is not complete.
        """
        return document.load(self._complete())

    def progress(self) -> dict[str, Any]:
        """Return what `finish` was given.

        Raises:
            UsageError: The checkpoint is not complete.
        """
        self._complete()
        return json.loads((self._path / _PROGRESS_FILE).read_text())

    def rank(self, rank: int) -> dict[str, Any]:
        """Return what `write_rank` was given; nothing where there is no such file."""
        file = self._path / _RANKS_FOLDER / f"{rank}.pt"
        if not file.is_file():
            return {}
        return torch.load(file, weights_only=True)

    def _complete(self) -> Path:
        file = self._path / _PLAN_FILE
        if not file.is_file():
            raise UsageError(
                f"{str(self._path)!r} is no complete checkpoint: it has no "
                f"{_PLAN_FILE}, which is written last"
            )
        return file
