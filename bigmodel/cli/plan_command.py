"""`bigmodel plan`: the fastest way of training a model that fits."""

from __future__ import annotations

import json
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
from bigmodel.errors import raise_if_any


@reporting_faults
def plan_command(
    model: options.Model,
    global_batch: Annotated[
        int,
        typer.Option(
            help="Samples per optimizer step over all devices.", show_default=False
        ),
    ],
    cluster: options.ClusterName = None,
    seq_len: options.SeqLen = None,
    precision: options.PrecisionName = "bf16",
    optimizer: options.Optimizer = "adamw",
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Consider only this backend; may be given several times.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the plan into this file, for bigmodel run.", show_default=False
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a report with pictures into this file.", show_default=False
        ),
    ] = None,
) -> None:
    """Find the fastest plan that fits, and say why.

    For example:

    \b
    bigmodel plan llama-3.1-8b --cluster 8xH100-80GB --seq-len 8192 \\
        --global-batch 64 --out plan.json --html report.html

    \b
    bigmodel plan my-model/config.json --cluster 2xcpu --seq-len 128 \\
        --global-batch 8 --precision fp32 --backend ddp --backend fsdp2

    Exit codes: 0 a plan was found, 2 something given is wrong, 3 nothing fits.
    """
    from bigmodel.plans.training_plan import PRECISIONS

    raise_if_any(
        counts_violations({"--global-batch": global_batch, "--seq-len": seq_len})
        + choice_violations("--precision", precision, PRECISIONS)
        + folder_violations({"--out": out, "--html": html})
    )
    # Only now: loading torch takes seconds, and a wrong number should not wait for it.
    from bigmodel.api.planning import plan
    from bigmodel.plans import document
    from bigmodel.reports.page import render_page
    from bigmodel.reports.tables import decision_report

    decision = plan(
        model,
        cluster=cluster,
        global_batch=global_batch,
        optimizer=optimizer,
        precision=precision,  # pyright: ignore[reportArgumentType]
        seq_len=seq_len,
        backends=backend or None,
    )
    full = decision.to_dict()
    if out is not None:
        contents = {
            "format": document.FORMAT,
            "plan": document.to_dict(decision.plan),
            "model": decision.model,
            "cluster": decision.cluster,
            "seq_len": seq_len,
            "prediction": {k: v for k, v in full["best"].items() if k != "plan"},
        }
        write(out, json.dumps(contents, indent=1) + "\n")
        note(f"wrote {out}; train with: bigmodel run SCRIPT --plan {out}")
    if html is not None:
        write(html, render_page(decision))
        note(f"wrote {html}")
    # Last: whoever reads stdout may stop before its end.
    if as_json:
        print_json(full)
    else:
        print_tables(decision_report(decision))
