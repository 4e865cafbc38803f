"""Gradients, norms and gathers, on two ranks against one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bigmodel.plans import Fsdp2Options
from tests.fsdp2.subjects import (
    GATHER,
    REDUCE,
    Block,
    Chain,
    chain,
    counted,
    engine,
    expected_gradients,
    mine,
    points,
    same_gradients,
    squared,
    units,
)

RECOMPUTED = ("full",) * 3


def check_gathers_are_counted() -> None:
    """AC-01: two gathers a block, one of the root, recomputed or not."""
    batch = points(4)
    expected = expected_gradients(
        chain(), lambda model: squared(model(batch[0]), batch)
    )
    for recompute in ((), RECOMPUTED):
        trained = engine(recompute=recompute)
        with counted(GATHER) as calls:
            local = mine(batch, 2)
            trained.backward(squared(trained.forward(local[0]), local))
        assert len(calls) == 2 * 3 + 1, len(calls)
        same_gradients(trained._engine.module, expected)
        trained.step()


def check_two_forwards_before_one_backward() -> None:
    """AC-08."""
    first, second = points(4), points(4, seed=2)
    expected = expected_gradients(
        chain(),
        lambda model: (
            squared(model(first[0]), first) + squared(model(second[0]), second)
        ),
    )
    for reshard in (True, False):
        for recompute in ((), RECOMPUTED):
            options = Fsdp2Options(reshard_after_forward=reshard)
            trained = engine(recompute=recompute, fsdp2=options)
            a, b = mine(first, 2), mine(second, 2)
            loss = squared(trained.forward(a[0]), a) + squared(trained.forward(b[0]), b)
            trained.backward(loss)
            same_gradients(trained._engine.module, expected)
            trained.step()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


def token_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def check_tied_weights() -> None:
    """UNU-08: tied parts that are units of their own share the root group."""
    batch = torch.tensor([0, 1, 2, 5]), torch.tensor([1, 2, 3, 0])
    expected = expected_gradients(Tied(), lambda m: token_loss(m(batch[0]), batch))
    for source in (Tied(), Tied):
        trained = engine(source, token_loss, units=("embedding", "middle", "head"))
        module = trained._engine.module
        assert not isinstance(module.head, FSDPModule)
        assert isinstance(module.middle, FSDPModule)
        local = mine(batch, 2)
        trained.backward(token_loss(trained.forward(local[0]), local))
        same_gradients(module, expected)
        trained.step()
        assert module.head.weight is module.embedding.weight


class TwoOutputs(Block):
    def forward(self, pair):
        x = pair[0] if isinstance(pair, tuple) else pair
        out = super().forward(x)
        return out, out.square().mean()


class Experts(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoOutputs() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, extra = self.first(x), 0.0
        for block in self.blocks:
            x, more = block(x)
            extra = extra + more
        return self.last(x) + extra


def experts() -> Experts:
    torch.manual_seed(1)
    return Experts()


def check_block_with_two_outputs() -> None:
    """ZERO-06: one reduction a group and backward."""
    batch = points(4)

    def loss(output: Tensor, _: object = None) -> Tensor:
        return output.square().mean()

    # The mean over the ranks' batches of a square is not that of the whole.
    halves = [
        expected_gradients(experts(), lambda model, at=at: loss(model(batch[0][at])))
        for at in (slice(0, 2), slice(2, 4))
    ]
    expected = {name: (halves[0][name] + halves[1][name]) / 2 for name in halves[0]}
    trained = engine(experts(), loss)
    with counted(REDUCE) as calls:
        trained.backward(loss(trained.forward(mine(batch, 2)[0])))
    assert len(calls) == 3 + 1, len(calls)
    same_gradients(trained._engine.module, expected)


class Sides(nn.Module):
    """Two weights whose gradients are 3 and 4, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(1, 1, bias=False)
        self.right = nn.Linear(1, 1, bias=False)
        self.frozen = nn.Linear(1, 1, bias=False)
        self.frozen.requires_grad_(False)
        for layer in (self.left, self.right, self.frozen):
            nn.init.ones_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (3 * self.left(x) + 4 * self.right(x) + 100 * self.frozen(x)).mean()


def norm_of_sides(**changes) -> float:
    trained = engine(Sides(), None, clip_norm=1.0, units=("left", "right"), **changes)
    result = trained.step((torch.ones(2, 1),))
    weights = trained.state_dict()
    if trained.is_first:
        # Clipped to a norm of 1, with a rate of 0.1.
        torch.testing.assert_close(weights["left.weight"].item(), 1 - 0.06)
        torch.testing.assert_close(weights["right.weight"].item(), 1 - 0.08)
        assert weights["frozen.weight"].item() == 1.0
    assert result.grad_norm is not None
    return result.grad_norm.item()


def check_norm_with_frozen_parameters() -> None:
    """UNU-13."""
    assert abs(norm_of_sides() - 5.0) < 1e-5


def check_norm_of_shards_and_whole_parameters() -> None:
    """MP-10: a gradient that all ranks hold counts once."""
    options = Fsdp2Options(ignored=("right",))
    assert abs(norm_of_sides(fsdp2=options) - 5.0) < 1e-5


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        # Mean over ranks and rows of x is 1, so every gradient is 1.
        return (self.weight.sum() * x).mean()


def check_small_updates_add_up() -> None:
    """MP-06: fp32 masters; in bfloat16 alone 1 - 1e-3 is 1."""
    trained = engine(
        One(),
        None,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        precision="bf16",
        units=(),
    )
    kinds = {value.dtype for value in trained._engine.module.parameters()}
    assert kinds == {torch.float32}, kinds
    for _ in range(100):
        trained.step((torch.ones(2, 1),))
    weights = trained.state_dict()
    if trained.is_first:
        torch.testing.assert_close(
            weights["weight"], torch.full((2, 1), 0.9), atol=1e-5, rtol=0
        )


def check_postponed_gradients() -> None:
    """GA-08: whole gradients meanwhile or shards of them, and the same at the end."""
    batch = points(8)
    size = sum(value.numel() for value in chain().parameters())
    expected = expected_gradients(
        chain(), lambda model: squared(model(batch[0]), batch)
    )
    for postpone in (False, True):
        options = Fsdp2Options(postpone_reduction=postpone)
        trained = engine(accumulation=2, fsdp2=options)
        module = trained._engine.module
        local = mine(batch, 4)
        with counted(REDUCE) as calls:
            part = tuple(value[:2] for value in local)
            trained.backward(squared(trained.forward(part[0]), part))
            reduced = len(calls)
            kept = sum(
                group.unsharded_param.grad.numel()
                for state in module.modules()
                if isinstance(state, FSDPModule)
                for group in state._get_fsdp_state()._fsdp_param_group.fsdp_params
                if group.unsharded_param.grad is not None
            )
            shards = sum(
                value.grad.to_local().numel()
                for value in module.parameters()
                if value.grad is not None
            )
            part = tuple(value[2:] for value in local)
            trained.backward(squared(trained.forward(part[0]), part))
        assert (kept, shards) == ((size, 0) if postpone else (0, size // 2))
        assert (reduced, len(calls)) == ((0, 4) if postpone else (4, 8))
        same_gradients(module, expected)


def check_unused_whole_parameter_is_left_alone() -> None:
    """UNU-15 for ignored modules: no rank has a gradient, so none is made."""

    class Unused(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(2, 2)

    trained = engine(Unused(), fsdp2=Fsdp2Options(ignored=("idle",)), units=units())
    before = trained._engine.module.idle.weight.detach().clone()
    trained.step(mine(points(4), 2))
    assert torch.equal(trained._engine.module.idle.weight, before)
