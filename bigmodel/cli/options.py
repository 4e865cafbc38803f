"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        help="A name such as llama-3.1-8b, or the path of a config.json of "
        "transformers, or of a folder that holds one. Nothing is downloaded.",
        show_default=False,
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="8xH100-80GB (one machine), 4x8xA100-40GB (four), 2xcpu (this machine's "
        "cores), or a cluster file. Without it: this machine.",
        show_default=False,
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len",
        help="Tokens of a sample. Without it: what the model is usually trained with.",
        show_default=False,
    ),
]
PrecisionName = Annotated[
    str,
    typer.Option(
        "--precision",
        help="bf16 (with fp32 master weights), fp32, or autocast.",
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer",
        help="adamw (also adamw-fused, -foreach, -loop), adam, sgd, sgd-momentum "
        "or adafactor.",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print JSON, and nothing else, on stdout."),
]
