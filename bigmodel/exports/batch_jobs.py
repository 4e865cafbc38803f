"""A plan as a job of a batch system: SLURM and Kubernetes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from bigmodel.errors import UsageError, Violation
from bigmodel.exports.commands import PORT, torchrun_words
from bigmodel.exports.export import Export, Request


def slurm_export(request: Request) -> Export:
    """Return a script for sbatch: one torchrun on every machine."""
    words = torchrun_words(request, f"$HEAD_NODE:{PORT}", "$SLURM_JOB_ID")
    if request.placement.nodes > 1:
        # torchrun finds out itself which machine is the first.
        words[0:1] = ["srun", "--kill-on-bad-exit=1", "torchrun"]
    text = _render("slurm.sh.j2", request, command=_quoted(words))
    notes = [
        f"submit with: sbatch {request.out or 'FILE'}",
        "add your site's lines: --partition, --account, --time",
    ]
    return Export(text=text, notes=tuple(notes))


def kubernetes_export(request: Request) -> Export:
    """Return a TrainJob of Kubeflow Trainer 2.

    Raises:
        UsageError: No image is given.
    """
    if not request.image:
        raise UsageError(
            Violation(
                field="--image",
                got=request.image,
                rule="a TrainJob runs in a container image, with the script and the "
                "plan file in it or on a volume",
                cure="name one: --image REGISTRY/NAME:TAG",
            )
        )
    place = request.placement
    # The runtime torch-distributed sets PET_NODE_RANK, PET_MASTER_ADDR and
    # PET_MASTER_PORT, which torchrun reads in place of its options.
    command = [
        "torchrun",
        f"--nnodes={place.nodes}",
        f"--nproc-per-node={place.per_node}",
        request.script,
        *request.arguments,
    ]
    text = _render("trainjob.yaml.j2", request, command=command)
    notes = (f"submit with: kubectl create -f {request.out or 'FILE'}",)
    return Export(text=text, notes=notes)


def _render(template: str, request: Request, **values: object) -> str:
    environment = Environment(
        loader=PackageLoader("bigmodel.exports", ""),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["json"] = json.dumps
    environment.filters["shell"] = shlex.quote
    name = re.sub(r"[^a-z0-9]+", "-", Path(request.script).stem.lower()).strip("-")
    return environment.get_template(template).render(
        name=(name or "train")[:50], request=request, place=request.placement, **values
    )


def _quoted(words: list[str]) -> str:
    return " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in words)
