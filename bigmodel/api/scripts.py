"""What training scripts share: their options, and where their plan comes from.

A script that was started by a launcher is given a plan file. Started by hand with
`--write-plan` it plans for its own model, writes the file and ends.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from bigmodel.api.planning import plan
from bigmodel.backends.engine import LossFunction
from bigmodel.errors import UsageError
from bigmodel.plans import Plan
from bigmodel.plans.document import load
from bigmodel.plans.training_plan import PRECISIONS
from bigmodel.running.environment import read_process


def script_parser(
    description: str | None, *, steps: int = 100, learning_rate: float = 1e-3
) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have.

    Args:
        description: The script's docstring.
        steps: Default of `--steps`.
        learning_rate: Default of `--learning-rate`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", help="plan file; default: BIGMODEL_PLAN")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="folder for what the run leaves behind")
    parser.add_argument("--metrics", help="write one JSON object per step to this file")
    asking = parser.add_argument_group("planning, in place of training")
    asking.add_argument("--write-plan", help="write a plan file for this model and end")
    asking.add_argument("--cluster", help="such as 8xH100-80GB; default: this machine")
    asking.add_argument("--global-batch", type=int, default=8, help="samples per step")
    asking.add_argument("--precision", choices=PRECISIONS, default="fp32")
    asking.add_argument("--backend", action="append", help="only these; repeatable")
    # The deepspeed launcher appends it; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def script_plan(
    args: argparse.Namespace,
    model: object,
    batch: Any,
    loss: LossFunction | None = None,
) -> Plan:
    """Return the plan that the script was started with.

    With `--write-plan` it plans, writes the file, prints the decision and exits.

    Args:
        args: Of a `script_parser`.
        model: The model or what makes it, as for `bigmodel.plan`.
        batch: A sample batch.
        loss: The loss function, if the model does not return its loss.

    Raises:
        UsageError: There is no plan.
    """
    if args.write_plan:
        decision = plan(
            model,
            batch,
            cluster=args.cluster,
            global_batch=args.global_batch,
            precision=args.precision,
            loss=loss,
            backends=args.backend,
        )
        print(decision)
        print(f"wrote {decision.save(args.write_plan)}")
        sys.exit(0)
    path = args.plan or read_process().plan_path
    if path is None:
        script = sys.argv[0]
        raise UsageError(
            "no plan is given; write one with: "
            f"python {script} --write-plan plan.json --cluster 2xcpu, "
            f"and start with: bigmodel run {script} --plan plan.json"
        )
    return load(path)
