"""What options do, looked for after prepare and not taken from the plan."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from bigmodel.errors import InvalidPlanError, UsageError
from bigmodel.plans import Fsdp2Options, Offload
from tests.fsdp2.subjects import REDUCE, Block, chain, counted, engine, mine, points


def train(steps: int = 3, **changes) -> tuple[list[float], dict[str, torch.Tensor]]:
    trained = engine(
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), **changes
    )
    losses = [
        trained.step(mine(points(4, seed=step), 2)).loss.item() for step in range(steps)
    ]
    return losses, trained.state_dict()


def check_prefetch_lists() -> None:
    """CFG-08: the effect of `prefetch` is on the modules."""
    module = engine(fsdp2=Fsdp2Options(prefetch=2))._engine.module
    states = {
        name: value._get_fsdp_state()
        for name, value in module.named_modules()
        if isinstance(value, FSDPModule)
    }
    names = {id(state): name for name, state in states.items()}

    def listed(name: str, way: str) -> list[str]:
        found = getattr(states[name], f"_states_to_{way}_prefetch")
        return [names[id(state)] for state in found]

    assert listed("", "forward") == ["blocks.0", "blocks.1"]
    assert listed("blocks.1", "forward") == ["blocks.2"]
    assert listed("", "backward") == ["blocks.2", "blocks.1"]
    assert listed("blocks.2", "backward") == ["blocks.1", "blocks.0"]


def check_reduction_in_bfloat16() -> None:
    """Gradients travel as bfloat16, the step stays fp32, losses stay close."""
    wide, _ = train(precision="bf16")
    options = Fsdp2Options(reduce_dtype="bfloat16")
    with counted(REDUCE) as calls:
        narrow, weights = train(precision="bf16", fsdp2=options)
    assert set(calls) == {torch.bfloat16}
    assert {value.dtype for value in weights.values()} <= {torch.float32}
    torch.testing.assert_close(narrow, wide, atol=3e-2, rtol=0)


def check_offloading_changes_no_number() -> None:
    """MP-11: offloaded gradients are clipped and stepped, in the CPU's memory."""
    offload = Offload(parameters="cpu", optimizer="cpu")
    for precision in ("fp32", "bf16"):
        losses, weights = train(clip_norm=0.1, precision=precision)
        others, other = train(clip_norm=0.1, precision=precision, offload=offload)
        assert losses == others
        for name, value in weights.items():
            assert torch.equal(value, other[name]), name


def check_half_an_offload_is_refused() -> None:
    for offload in (Offload(parameters="cpu"), Offload(optimizer="cpu")):
        with pytest.raises(InvalidPlanError, match="together"):
            engine(offload=offload)


def check_methods_other_than_forward() -> None:
    """ZERO-10: a listed method gathers; the error of another one names the remedy."""
    x = torch.ones(2, 4)
    module = engine()._engine.module
    with pytest.raises(UsageError, match=r"encode.*fsdp2\.methods"):
        module.encode(x)
    expected = chain().encode(x)
    trained = engine(fsdp2=Fsdp2Options(methods=("encode", "blocks.0.twice")))
    module = trained._engine.module
    torch.testing.assert_close(module.encode(x), expected)
    assert module.encode(x).shape == (2, 8)


def _twice(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.inner(block.inner(x))


Block.twice = _twice


def check_method_of_a_block() -> None:
    trained = engine(fsdp2=Fsdp2Options(methods=("blocks.0.twice",)))
    x = torch.ones(2, 8)
    found = trained._engine.module.blocks[0].twice(x)
    torch.testing.assert_close(found, chain().blocks[0].twice(x))


def check_unknown_method_is_refused() -> None:
    for path, word in (("nothing", "no such method"), ("first.forward", "only the")):
        with pytest.raises(UsageError, match=word):
            engine(fsdp2=Fsdp2Options(methods=(path,)))


def check_unknown_module_to_ignore_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing"):
        engine(fsdp2=Fsdp2Options(ignored=("nothing",)))


def check_state_dict_is_a_copy() -> None:
    """What was handed out stays as it was while training goes on."""
    trained = engine(fsdp2=Fsdp2Options(ignored=("first",)))
    before = trained.state_dict()
    kept = {name: value.clone() for name, value in before.items()}
    trained.step(mine(points(4), 2))
    for name, value in kept.items():
        assert torch.equal(before[name], value), name


def check_evaluation_frees_gathered_weights() -> None:
    for reshard in (True, False):
        options = Fsdp2Options(reshard_after_forward=reshard)
        trained = engine(fsdp2=options)
        trained.evaluate(mine(points(4), 2))
        module = trained._engine.module
        for name, value in module.named_modules():
            if isinstance(value, FSDPModule):
                group = value._get_fsdp_state()._fsdp_param_group
                assert group.is_sharded, name
        trained.step(mine(points(4), 2))
