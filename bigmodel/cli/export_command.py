"""`bigmodel export`: a plan as the command or file of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigmodel.cli.faults import (
    choice_violations,
    folder_violations,
    reporting_faults,
    write,
)
from bigmodel.cli.printing import note
from bigmodel.errors import UsageError, Violation, raise_if_any

_DEVICES = ("cuda", "cpu")


@reporting_faults
def export_command(
    plan: Annotated[
        Path,
        typer.Argument(
            help="The plan: what bigmodel plan --out wrote.", show_default=False
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            help="torchrun, deepspeed, accelerate, horovod, slurm, k8s or trainer.",
            show_default=False,
        ),
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the script, after --.", show_default=False),
    ] = None,
    script: Annotated[str, typer.Option(help="The training script.")] = "train.py",
    nodes: Annotated[
        int | None, typer.Option(help="Machines. Default: 1.", show_default=False)
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            help="Processes of each machine. Default: the plan's number of processes "
            "over the machines.",
            show_default=False,
        ),
    ] = None,
    clip_norm: Annotated[
        float | None,
        typer.Option(
            help="Largest norm of the gradients, for tools that clip by themselves.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    image: Annotated[
        str | None,
        typer.Option(help="Container image, for k8s.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write into this file, and further files beside it. Without it: to "
            "stdout.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the command or the file that another tool trains a plan with.

    For example:

    \b
    bigmodel export plan.json --to slurm --script train.py --gpus-per-node 8 \\
        --out job.sh
    bigmodel export plan.json --to accelerate --out plan.yaml
    bigmodel export plan.json --to trainer --out trainer.json

    Says on stderr where every number comes from, how to use what was written, and what
    the tool cannot be told. Exit codes: 0 written, 2 something given is wrong, or the
    tool cannot do what the plan says.
    """
    from bigmodel.exports.export import Request
    from bigmodel.exports.placement import place
    from bigmodel.exports.targets import TARGETS
    from bigmodel.plans import document

    found = choice_violations("--device", device, _DEVICES)
    found += choice_violations("--to", to, TARGETS.names())
    found += folder_violations({"--out": out})
    if clip_norm is not None and clip_norm <= 0:
        found.append(
            Violation(
                field="--clip-norm",
                got=clip_norm,
                rule="it must be positive",
                cure="leave it out for no clipping",
            )
        )
    if out is not None and out.absolute() == plan.absolute():
        found.append(
            Violation(
                field="--out",
                got=str(out),
                rule="it is the plan file, which would be overwritten",
            )
        )
    raise_if_any(found, UsageError)
    chosen = document.load(plan)
    placement = place(chosen, nodes, gpus_per_node)
    request = Request(
        plan=chosen,
        plan_path=str(plan),
        placement=placement,
        script=script,
        arguments=tuple(args or ()),
        out=out,
        device="cpu" if device == "cpu" else "cuda",
        clip_norm=clip_norm,
        image=image,
    )
    export = TARGETS.get(to)(request)
    for line in (*placement.origins, *export.notes):
        note(line)
    for path, text in export.beside.items():
        write(Path(path), text)
        note(f"wrote {path}")
    if out is None:
        print(export.text, end="")
    else:
        write(out, export.text)
        note(f"wrote {out}")
