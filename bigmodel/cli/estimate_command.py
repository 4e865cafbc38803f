"""`bigmodel estimate`: memory and time of one plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigmodel.cli import options
from bigmodel.cli.faults import (
    choice_violations,
    counts_violations,
    reporting_faults,
)
from bigmodel.cli.printing import print_json, print_tables
from bigmodel.errors import Violation, raise_if_any


@reporting_faults
def estimate_command(
    model: options.Model,
    cluster: options.ClusterName = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="A plan file; or say the plan by the options below.",
            show_default=False,
        ),
    ] = None,
    seq_len: options.SeqLen = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="ddp, fsdp2, deepspeed or pipeline, on all devices of the cluster.",
            show_default=False,
        ),
    ] = None,
    micro_batch: Annotated[
        int, typer.Option(help="Samples of one forward on one rank.")
    ] = 1,
    accumulation: Annotated[
        int, typer.Option(help="Micro-batches per rank and optimizer step.")
    ] = 1,
    recompute: Annotated[
        str,
        typer.Option(
            help="full: keep only the inputs of every block and recompute the rest in "
            "the backward; selective: keep what matrix products and attention return "
            "too; none."
        ),
    ] = "none",
    precision: options.PrecisionName = "bf16",
    optimizer: options.Optimizer = "adamw",
    zero_stage: Annotated[
        int | None,
        typer.Option(help="ZeRO stage of deepspeed: 1, 2 or 3.", show_default=False),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(help="Pipeline stages.", show_default=False),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Pipeline schedule: 1f1b or gpipe.", show_default=False),
    ] = None,
    reshard: Annotated[
        bool | None,
        typer.Option(
            "--reshard/--no-reshard",
            help="fsdp2: free gathered weights after forward (ZeRO-3), or keep them.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Predict memory and time of one plan, with where every byte comes from.

    For example:

    \b
    bigmodel estimate llama-3.1-8b --cluster 8xH100-80GB --seq-len 8192 \\
        --backend fsdp2 --micro-batch 1 --accumulation 8 --recompute full

    \b
    bigmodel estimate gpt2-xl --cluster 4xA100-40GB --plan plan.json

    Exit codes: 0 it was predicted, also where the plan does not fit; 2 something given
    is wrong.
    """
    from bigmodel.plans.training_plan import PRECISIONS, RECOMPUTE_POLICIES

    found = counts_violations(
        {
            "--seq-len": seq_len,
            "--micro-batch": micro_batch,
            "--accumulation": accumulation,
            "--zero-stage": zero_stage,
            "--stages": stages,
        }
    )
    found += choice_violations("--precision", precision, PRECISIONS)
    found += choice_violations("--recompute", recompute, RECOMPUTE_POLICIES)
    if (plan is None) == (backend is None):
        found.append(
            Violation(
                field="--plan and --backend",
                got="both" if plan else "neither",
                rule="a plan is said by a file or by options",
                cure="give one of them",
            )
        )
    raise_if_any(found)
    from bigmodel.api.clusters import cluster as read_cluster
    from bigmodel.api.planning import estimate
    from bigmodel.api.tracing import trace
    from bigmodel.plans import document
    from bigmodel.reports.tables import estimate_report

    where = read_cluster(cluster)
    if plan is not None:
        chosen = document.load(plan)
        result = estimate(model, plan=chosen, cluster=where, seq_len=seq_len)
    else:
        from bigmodel.backends.catalog import BACKENDS
        from bigmodel.cli.plan_options import PlanOptions, build_plan
        from bigmodel.simulator import Costs

        BACKENDS.get(backend or "")
        spec = trace(
            model,
            seq_len=seq_len,
            precision=precision,  # pyright: ignore[reportArgumentType]
            target=where.device.kind,
        )
        wanted = PlanOptions(
            backend=backend or "",
            micro_batch=micro_batch,
            accumulation=accumulation,
            recompute=recompute,  # pyright: ignore[reportArgumentType]
            precision=precision,  # pyright: ignore[reportArgumentType]
            optimizer=optimizer,
            zero_stage=zero_stage,
            stages=stages,
            schedule=schedule,
            reshard=reshard,
        )
        chosen = build_plan(wanted, Costs(spec, where))
        result = estimate(spec, plan=chosen, cluster=where)
    if as_json:
        print_json(result.to_dict())
    else:
        print_tables(estimate_report(result))
