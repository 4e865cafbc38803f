"""The command `bigmodel`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from bigmodel.cli.estimate_command import estimate_command
from bigmodel.cli.export_command import export_command
from bigmodel.cli.faults import INTERRUPTED
from bigmodel.cli.horovod_check_command import horovod_check_command
from bigmodel.cli.plan_command import plan_command
from bigmodel.cli.run_command import run_command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("plan")(plan_command)
app.command("estimate")(estimate_command)
app.command("run")(run_command)
app.command("export")(export_command)
app.command("hvd-check")(horovod_check_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        from bigmodel import __version__

        print(f"bigmodel {__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Plan, estimate and train models that do not fit on one device.

    Start with:

    \b
    bigmodel plan gpt2 --cluster 2xcpu --seq-len 128 --global-batch 8 \\
        --precision fp32 --out plan.json
    """


def main() -> None:
    """Run the command line of this process."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
