"""`bigmodel estimate`: memory and time of one plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigmodel.cli import options
from bigmodel.cli.faults import (
    choice_violations,
    counts_violations,
    folder_violations,
    reporting_faults,
    write,
)
from bigmodel.cli.printing import note, print_json, print_tables
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
    rank: Annotated[
        int | None,
        typer.Option(
            help="Explain this rank's memory; without it that of the fullest.",
            show_default=False,
        ),
    ] = None,
    measures: Annotated[
        bool,
        typer.Option(
            "--measures/--no-measures",
            help="Predict also what would save memory: each takes as long as the plan.",
        ),
    ] = True,
    as_json: options.AsJson = False,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a report with pictures into this file.", show_default=False
        ),
    ] = None,
) -> None:
    """Predict memory and time of one plan, with where every byte comes from.

    For example:

    \b
    bigmodel estimate llama-3.1-8b --cluster 8xH100-80GB --seq-len 8192 \\
        --backend fsdp2 --micro-batch 1 --accumulation 8 --recompute full

    \b
    bigmodel estimate gpt2-xl --cluster 4xA100-40GB --plan plan.json \\
        --rank 3 --html memory.html

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
    if rank is not None and rank < 0:
        found.append(
            Violation(field="--rank", got=rank, rule="ranks are numbered from 0 on")
        )
    raise_if_any(found + folder_violations({"--html": html}))
    from bigmodel.api.clusters import cluster as read_cluster
    from bigmodel.api.planning import estimate, estimate_chosen
    from bigmodel.plans import document
    from bigmodel.reports.estimate_page import render_estimate_page
    from bigmodel.reports.tables import estimate_report

    where = read_cluster(cluster)
    if plan is not None:
        chosen = document.load(plan)
        result = estimate(
            model, plan=chosen, cluster=where, seq_len=seq_len, measures=measures
        )
    else:
        from bigmodel.backends.catalog import BACKENDS
        from bigmodel.cli.plan_options import PlanOptions, build_plan

        BACKENDS.get(backend or "")
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
        result = estimate_chosen(
            model,
            choose=lambda costs: build_plan(wanted, costs),
            precision=precision,  # pyright: ignore[reportArgumentType]
            cluster=where,
            seq_len=seq_len,
            measures=measures,
        )
    asked = {} if rank is None else {"rank": result.of_rank(rank).to_dict()}
    if html is not None:
        title = f"{model} on {where.describe()}"
        write(html, render_estimate_page(result, title, rank))
        note(f"wrote {html}")
    if as_json:
        print_json(result.to_dict() | asked)
    else:
        print_tables(estimate_report(result, rank))
