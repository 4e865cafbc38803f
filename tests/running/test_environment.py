from __future__ import annotations

import pytest
import torch

from bigmodel.errors import UsageError, WorldError
from bigmodel.plans import Mesh, Plan
from bigmodel.running.environment import first_host, read_process
from bigmodel.running.rendezvous import join

NAMES = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "CROSS_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_ID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "BIGMODEL_PLAN",
    "BIGMODEL_INIT",
    "BIGMODEL_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
    "PMI_RANK",
    "PMI_SIZE",
]

COMMON = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "1234"}


@pytest.fixture
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def set_to(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_alone(environment):
    process = read_process()
    assert (process.launcher, process.rank, process.world_size) == ("none", 0, 1)


def test_torchrun(environment):
    environment(
        **COMMON,
        LOCAL_WORLD_SIZE="2",
        TORCHELASTIC_RUN_ID="x",
        TORCHELASTIC_USE_AGENT_STORE="True",
        BIGMODEL_PLAN="plan.json",
    )
    process = read_process()
    assert process.launcher == "torchrun"
    assert process.store_runs
    assert (process.rank, process.local_rank, process.world_size) == (3, 1, 4)
    assert process.local_world_size == 2
    assert process.plan_path == "plan.json"


def test_deepspeed(environment):
    environment(**COMMON, LOCAL_SIZE="2", CROSS_RANK="1")
    process = read_process()
    assert process.launcher == "deepspeed"
    assert process.local_world_size == 2
    assert not process.store_runs


def test_srun(environment):
    environment(
        SLURM_PROCID="5",
        SLURM_LOCALID="1",
        SLURM_NTASKS="8",
        SLURM_STEP_ID="0",
        SLURM_JOB_ID="123456",
        SLURM_JOB_NODELIST="gpu[003-007,9],login",
    )
    process = read_process()
    assert (process.rank, process.local_rank, process.world_size) == (5, 1, 8)
    assert process.master_address == "gpu003"
    assert process.master_port == 20000 + 123456 % 12000


def test_batch_script_of_slurm_runs_alone(environment):
    environment(SLURM_PROCID="0", SLURM_NTASKS="8", SLURM_JOB_ID="1")
    assert read_process().world_size == 1


def test_no_number(environment):
    environment(RANK="zero", WORLD_SIZE="2")
    with pytest.raises(WorldError, match="RANK is 'zero'"):
        read_process()


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1234",
}


def test_mpirun_on_several_machines_does_not_say_where_rank_0_is(environment):
    environment(**OPEN_MPI)
    with pytest.raises(WorldError, match="MASTER_ADDR and MASTER_PORT"):
        read_process()
    environment(MASTER_ADDR="node1", MASTER_PORT="1234")
    process = read_process()
    assert (process.launcher, process.rank, process.local_rank) == ("mpirun", 3, 1)
    assert (process.world_size, process.local_world_size) == (4, 2)
    assert (process.master_address, process.master_port) == ("node1", 1234)


def test_workers_started_again_meet_anew(environment):
    environment(**COMMON, TORCHELASTIC_RUN_ID="x", TORCHELASTIC_RESTART_COUNT="0")
    first = read_process().job
    environment(TORCHELASTIC_RESTART_COUNT="1")
    assert read_process().job != first


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-007,9],login", "gpu003"),
        ("a[1-2]-ib", "a1-ib"),
        ("", "127.0.0.1"),
    ],
)
def test_first_host(hosts, first):
    assert first_host(hosts) == first


def test_horovodrun(environment):
    variables = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    environment(
        **{f"HOROVOD_{name}": value for name, value in variables.items()},
        HOROVOD_GLOO_RENDEZVOUS_ADDR="10.0.0.7",
        HOROVOD_GLOO_RENDEZVOUS_PORT="45001",
    )
    process = read_process()
    assert (process.launcher, process.rank, process.world_size) == ("horovodrun", 3, 4)
    assert (process.local_rank, process.local_world_size) == (1, 2)
    assert process.master_address == "10.0.0.7"
    # Not the port that horovodrun itself listens at, nor one that the system deals out.
    assert 20000 <= process.master_port < 32000


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ("tcp://node1", "ranks meet at env://, tcp://HOST:PORT or file:///PATH"),
        ("node1:29500", "ranks meet at env://, tcp://HOST:PORT or file:///PATH"),
        ("file:///no/such/folder/job", "there is no folder '/no/such/folder'"),
    ],
)
def test_meeting_place_that_is_none(environment, place, rule):
    environment(RANK="0", WORLD_SIZE="2", BIGMODEL_INIT=place)
    plan = Plan(backend="ddp", mesh=Mesh(replicate=2), micro_batch=1)
    with pytest.raises(UsageError) as error:
        join(plan, read_process(), torch.device("cpu"), 5.0)
    assert f"BIGMODEL_INIT is {place!r}; {rule}" in str(error.value)
