"""The tools that a plan can be exported to."""

from __future__ import annotations

from collections.abc import Callable

from bigmodel.exports.accelerate_file import accelerate_export
from bigmodel.exports.batch_jobs import kubernetes_export, slurm_export
from bigmodel.exports.commands import (
    deepspeed_export,
    horovod_export,
    torchrun_export,
)
from bigmodel.exports.export import Export, Request
from bigmodel.exports.trainer import trainer_export
from bigmodel.registry import Registry

TARGETS: Registry[Callable[[Request], Export]] = Registry("target")
"""From a tool's name to its exporter."""

for _name, _export in (
    ("torchrun", torchrun_export),
    ("deepspeed", deepspeed_export),
    ("accelerate", accelerate_export),
    ("horovod", horovod_export),
    ("slurm", slurm_export),
    ("k8s", kubernetes_export),
    ("trainer", trainer_export),
):
    TARGETS.add(_name, _export)
