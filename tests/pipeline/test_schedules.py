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
from bigmodel.schedules import SCHEDULES, stages_of


class RecordingStage:
    """Stands for a pipeline stage: sends nothing and notes what it is told to do."""

    device = torch.device("cpu")
    has_backward = True
    submod = torch.nn.Identity()

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
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_rows_are_what_torch_executes(name: str, stages: int, micro_batches: int):
    entry = SCHEDULES.get(name)
    if entry.refusal(stages, stages, micro_batches):
        pytest.skip("torch refuses it")
    rows = entry.rows(stages, stages, micro_batches)
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


SEVERAL = [name for name, entry in SCHEDULES if entry.placement != "one"]


@pytest.mark.parametrize("micro_batches", [1, 3, 4, 6, 8, 10, 12, 16])
@pytest.mark.parametrize(("ranks", "laps"), [(2, 2), (3, 2), (4, 2), (2, 3)])
@pytest.mark.parametrize("name", SEVERAL)
def test_rows_of_several_stages_a_rank_are_torch_orders(
    name: str, ranks: int, laps: int, micro_batches: int
):
    entry, stages = SCHEDULES.get(name), ranks * laps
    if entry.placement == "v" and laps != 2:
        pytest.skip("a V has two stages a rank")

    def build():
        held = stages_of(0, ranks, stages, entry.placement)
        local = [RecordingStage(index, stages) for index in held]
        for stage in local:
            stage.group_size, stage.group_rank = ranks, 0
        return TORCH_SCHEDULES[name](local, n_microbatches=micro_batches)

    if entry.refusal(ranks, stages, micro_batches):
        with pytest.raises(ValueError, match="micro"):
            build()
        return
    order = build().pipeline_order
    for rank, row in enumerate(entry.rows(ranks, stages, micro_batches)):
        assert [str(action) for action in row] == [
            str(part)
            for action in order[rank]
            if action is not None
            for part in action.sub_actions or (action,)
        ]


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_every_micro_batch_passes_every_stage_once_and_nothing_waits_for_ever(name):
    entry, ranks, count = SCHEDULES.get(name), 4, 12
    stages = ranks if entry.placement == "one" else 2 * ranks
    rows = [list(row) for row in entry.rows(ranks, stages, count)]
    done: set[tuple[int, str, int]] = set()

    def ready(action) -> bool:
        stage, index = action.stage, action.micro_batch
        if action.phase == "F":
            return stage == 0 or (stage - 1, "F", index) in done
        if action.phase == "W":
            return (stage, "I", index) in done
        if (stage, "F", index) not in done:
            return False
        return stage == stages - 1 or (stage + 1, "I", index) in done

    while any(rows):
        runnable = [row for row in rows if row and ready(row[0])]
        assert runnable, "every rank waits"
        for row in runnable:
            action = row.pop(0)
            for phase in {"B": "IW"}.get(action.phase, action.phase):
                key = (action.stage, phase, action.micro_batch)
                assert key not in done
                done.add(key)
    assert len(done) == 3 * stages * count


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
