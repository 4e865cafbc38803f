from __future__ import annotations

import pytest

from bigmodel.errors import WorldError
from bigmodel.running.environment import first_host, read_process

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
