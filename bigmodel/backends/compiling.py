"""Compiling every unit by `torch.compile`, in place.

The `forward` of each unit is compiled, so names of parameters and the hooks of wrappers
around it stay as they are; units of the same code share one compiled graph. Where a
unit is recomputed too, its compiled forward is what runs again in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from bigmodel.errors import UsageError, Violation
from bigmodel.plans import Plan


def apply_compile(
    blocks: Mapping[str, nn.Module], plan: Plan, device: torch.device
) -> None:
    """Let blocks run compiled, if the plan says so; before recomputation is applied.

    Raises:
        UsageError: Something is missing that torch's inductor makes code with.
    """
    if not plan.compile:
        return
    missing = _missing_tool(device)
    if missing:
        raise UsageError(
            Violation(
                field="compile",
                got=True,
                rule=f"torch.compile makes code for {device.type}, and {missing}",
                cure="install it, or plan without compile",
            )
        )
    # Under DDP torch would cut the graph of a unit at the ends of buckets, so that
    # reductions can begin; they begin after each unit as it is.
    torch._dynamo.config.optimize_ddp = False
    for block in blocks.values():
        # A plain attribute hides the method of the class; modules allow it.
        block.forward = torch.compile(block.forward)


def _missing_tool(device: torch.device) -> str:
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "there is no Triton that knows this GPU"
    # Inductor's own search: the variable CXX, then g++ and clang++.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler (g++ or clang++) on this machine"
    return ""
