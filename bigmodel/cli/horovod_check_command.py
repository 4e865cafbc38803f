"""`bigmodel hvd-check`: what to write in place of Horovod's calls in a script."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bigmodel.cli import options
from bigmodel.cli.faults import reporting_faults
from bigmodel.cli.printing import print_json


@reporting_faults
def horovod_check_command(
    script: Annotated[
        Path, typer.Argument(help="A Python script.", show_default=False)
    ],
    as_json: options.AsJson = False,
) -> None:
    """List every use of Horovod in a script, and what to write instead.

    The script is read, not run.
    """
    from bigmodel.running.horovod_checker import check_script

    found = check_script(script)
    if as_json:
        print_json({"uses": [asdict(use) for use in found]})
        return
    if not found:
        print(f"{script} does not use Horovod")
    for use in found:
        print(f"{script}:{use.line}: {use.call}")
        print(f"    write: {use.replacement or '(nothing)'}")
        if use.note:
            print(f"    {use.note}")
