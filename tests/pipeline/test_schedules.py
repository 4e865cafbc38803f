"""The rows of `bigmodel.schedules` are what torch's schedules execute.

Recorded, not read: in torch 2.13 `Schedule1F1B.pipeline_order` lets the last stage
begin with its second forward, while what runs is right.
"""

from __future__ import annotations

import pytest
import torch

from bigmodel.backends.catalog import BACKENDS
from bigmodel.backends.pipeline.torch_schedules import TORCH_SCHEDULES
from bigmodel.plans import Mesh, Plan, Stages
from bigmodel.schedules import SCHEDULES


class RecordingStage:
    """Stands for a pipeline stage: sends nothing and notes what it is told to do."""

    device = torch.device("cpu")
    has_backward = True

    def __init__(self, index: int, count: int) -> None:
        self.stage_index = index
        self.num_stages = count
        self.is_first = index == 0
        self.is_last = index == count - 1
        self.done: list[str] = []

    def forward_one_chunk(self, index: int, *args, **kwargs) -> torch.Tensor:
        self.done.append(f"{self.stage_index}F{index}")
        return torch.zeros(())

    def backward_one_chunk(self, index: int, *args, **kwargs) -> None:
        self.done.append(f"{self.stage_index}B{index}")

    def no_operations(self, *args, **kwargs) -> list:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = no_operations
    get_bwd_send_ops = _get_init_p2p_neighbors_ops = no_operations

    def nothing(self, *args, **kwargs) -> None:
        return None

    _prepare_forward_infra = _prepare_backward_infra = nothing
    clear_runtime_states = perform_reduce_grad = nothing


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(TORCH_SCHEDULES))
def test_rows_are_what_torch_executes(name: str, stages: int, micro_batches: int):
    if name == "1f1b" and micro_batches < stages:
        pytest.skip("torch refuses it")
    rows = SCHEDULES.get(name)(stages, micro_batches)
    for index, row in enumerate(rows):
        stage = RecordingStage(index, stages)
        schedule = TORCH_SCHEDULES[name](
            stage,  # type: ignore[arg-type]
            n_microbatches=micro_batches,
            loss_fn=lambda output, target: output,
        )
        numbers = torch.arange(micro_batches)
        schedule.step(numbers, target=numbers, return_outputs=False)
        assert stage.done == [str(action) for action in row]


def test_every_schedule_has_a_class_of_torch():
    assert sorted(TORCH_SCHEDULES) == sorted(SCHEDULES.names())


def test_too_few_micro_batches_are_refused():
    plan = Plan(
        backend="pipeline",
        mesh=Mesh(pipeline=2),
        units=("0", "1"),
        stages=Stages(schedule="1f1b", cuts=(1,)),
    )
    (violation,) = BACKENDS.get("pipeline").violations(plan, None, None)
    assert violation.field == "accumulation"
    assert "a micro-batch for each of 2 stages" in violation.rule
