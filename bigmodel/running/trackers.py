"""Experiment trackers: TensorBoard, Weights & Biases and whatever accelerate knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch

from bigmodel.errors import MissingDependencyError, UsageError, Violation


@final
class Trackers:
    """Writes numbers to several trackers, on the one rank that makes it.

    Args:
        wanted: Names as accelerate has them (`tensorboard`, `wandb`, `mlflow`, ...), or
            trackers of one's own, of its class `GeneralTracker`.
        run: Name of the run.
        folder: Where those that write files put them.

    Raises:
        UsageError: A name is unknown, its library is missing, or it needs a folder.
        MissingDependencyError: accelerate is not installed.
    """

    def __init__(
        self, wanted: Sequence[Any], run: str, folder: str | Path | None
    ) -> None:
        self._trackers: list[Any] = []
        if not wanted:
            return
        try:
            from accelerate import PartialState, tracking
        except ImportError:
            raise MissingDependencyError(
                "accelerate", "accelerate", "Progress(trackers=...)"
            ) from None
        # Its trackers write to a logger that asks for this; where there is a process
        # group already, it takes that one, and tells no other rank.
        PartialState(cpu=not torch.cuda.is_available())
        known = tracking.LOGGER_TYPE_TO_CLASS
        available = {str(name) for name in tracking.get_available_trackers()}
        for tracker in wanted:
            if not isinstance(tracker, str):
                tracker.start()
                self._trackers.append(tracker)
                continue
            if tracker not in known or tracker not in available:
                raise UsageError(
                    Violation(
                        field="trackers",
                        got=tracker,
                        rule="installed are "
                        f"{', '.join(sorted(available)) or 'none'}, and accelerate "
                        f"knows {', '.join(sorted(map(str, known)))}",
                        cure="install the tracker's library",
                    )
                )
            kind = known[tracker]
            if kind.requires_logging_directory and folder is None:
                raise UsageError(
                    Violation(
                        field="logging_dir",
                        got=None,
                        rule=f"tracker {tracker!r} writes files",
                        cure="give a folder",
                    )
                )
            # Only one rank makes them, so there is nobody to ask.
            here = type(kind.__name__, (kind,), {"main_process_only": False})
            arguments = (folder,) if kind.requires_logging_directory else ()
            made = here(run, *arguments)
            made.start()
            self._trackers.append(made)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers of one optimizer step."""
        for tracker in self._trackers:
            tracker.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left."""
        for tracker in self._trackers:
            tracker.finish()
