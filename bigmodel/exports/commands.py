"""A plan as the command line of a launcher.

The script finds the plan in BIGMODEL_PLAN, as `bigmodel.prepare` and the recipes do.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from bigmodel.backends.deepspeed.config import deepspeed_config
from bigmodel.errors import UsageError, Violation
from bigmodel.exports.export import Export, Request
from bigmodel.units import MIB

PORT = 29500
"""Where ranks meet; torchrun's and accelerate's own default."""


def command_line(words: Sequence[str]) -> str:
    """Return a command as a shell reads it; words that begin with $ are variables."""
    return " ".join(
        f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in words
    )


def torchrun_words(request: Request, endpoint: str, job: str) -> list[str]:
    """Return torchrun's words, the same on every machine.

    Args:
        request: What is asked.
        endpoint: Where machines meet: HOST:PORT.
        job: Distinguishes jobs that meet at the same place.
    """
    place = request.placement
    words = [
        "torchrun",
        f"--nnodes={place.nodes}",
        f"--nproc-per-node={place.per_node}",
    ]
    if place.nodes == 1:
        # A free port of its own for every run.
        words.append("--standalone")
    else:
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        words.append(f"--rdzv-id={job}")
    return [*words, request.script, *request.arguments]


def torchrun_export(request: Request) -> Export:
    """Return the command that is run on every machine."""
    several = request.placement.nodes > 1
    lines = ["#!/usr/bin/env bash", "set -eu"]
    endpoint = ""
    if several:
        usage = "host name of the first machine"
        lines += [f'HEAD_NODE="${{1:?{usage}}}"', 'JOB="${2:?a name for this job}"']
        endpoint = f"$HEAD_NODE:{PORT}"
    words = torchrun_words(request, endpoint, "$JOB")
    command = " ".join(
        f'"{word}"' if "$" in word else shlex.quote(word) for word in words
    )
    lines.append(f"{_plan_variable(request)} {command}")
    notes = ()
    if several:
        notes = (
            f"run on each of {request.placement.nodes} machines: bash FILE HOST JOB",
        )
    return Export(text="\n".join(lines) + "\n", notes=notes)


def deepspeed_export(request: Request) -> Export:
    """Return the command that is run on the first machine.

    For a plan of backend `deepspeed` its configuration lies beside, for a script that
    calls `deepspeed.initialize` itself.
    """
    place = request.placement
    lines, notes = ["#!/usr/bin/env bash", "set -eu"], []
    words = ["deepspeed", f"--num_gpus={place.per_node}"]
    if place.nodes > 1:
        lines.append('HOSTFILE="${1:?a hostfile with lines: HOST slots=N}"')
        words += ["--hostfile=$HOSTFILE", f"--num_nodes={place.nodes}"]
        notes.append(
            f"other machines see BIGMODEL_PLAN={request.plan_path} if that line stands "
            "in the file .deepspeed_env of your home or working folder"
        )
    words += ["--no_local_rank", request.script, *request.arguments]
    command = " ".join(
        f'"{word}"' if "$" in word else shlex.quote(word) for word in words
    )
    lines.append(f"{_plan_variable(request)} {command}")
    beside = {}
    path = request.beside(".deepspeed.json")
    if request.plan.backend == "deepspeed":
        if path is None:
            notes.append("with --out the DeepSpeed configuration is written beside it")
        else:
            config = deepspeed_config(request.plan, request.clip_norm)
            beside[path] = json.dumps(config, indent=2) + "\n"
            notes.append(
                f"{path} is for a script that calls deepspeed.initialize itself; "
                "bigmodel.prepare does not need it"
            )
    return Export(text="\n".join(lines) + "\n", beside=beside, notes=tuple(notes))


def horovod_export(request: Request) -> Export:
    """Return the command for a plan of backend `horovod`.

    Raises:
        UsageError: The plan is not one of Horovod's.
    """
    plan, place = request.plan, request.placement
    if plan.backend != "horovod":
        raise UsageError(
            Violation(
                field="backend",
                got=plan.backend,
                rule="horovodrun starts plans of backend 'horovod'",
                cure="export to torchrun, or plan with backends=['horovod']",
            )
        )
    lines = ["#!/usr/bin/env bash", "set -eu"]
    words = ["horovodrun", "--gloo", "-np", str(plan.world)]
    if place.nodes > 1:
        example = f"host1:{place.per_node},host2:{place.per_node}"
        lines.append(f'HOSTS="${{1:?hosts, such as {example}}}"')
        words += ["-H", "$HOSTS"]
    threshold = plan.horovod.fusion_megabytes
    # horovodrun takes MiB, the variable HOROVOD_FUSION_THRESHOLD bytes.
    words += ["--fusion-threshold-mb", f"{threshold:g}"]
    words += ["python", request.script, *request.arguments]
    lines.append(f"{_plan_variable(request)} {command_line(words)}")
    note = f"the fusion buffer holds {round(threshold * MIB)} bytes on every rank"
    return Export(text="\n".join(lines) + "\n", notes=(note,))


def _plan_variable(request: Request) -> str:
    return f"BIGMODEL_PLAN={shlex.quote(request.plan_path)}"
