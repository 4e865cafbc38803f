"""Launchers: the right behaviour for faults that were met with existing ones."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch

from benchmarks.parity.launchers import beside_python, clean_environment
from bigmodel.errors import WorldError
from bigmodel.plans import Mesh, Plan
from bigmodel.plans.document import save
from bigmodel.running.environment import Process
from bigmodel.running.hosts import Host, ssh_commands
from bigmodel.running.launcher import run_script
from bigmodel.running.rendezvous import join

PAIR = Plan(backend="ddp", mesh=Mesh(replicate=2), micro_batch=1)
BAD_START = Path(__file__).parents[1] / "running" / "bad_start.py"


def write(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(text)
    return script


def test_launch_01_and_11_two_jobs_at_once_beside_a_taken_port(tmp_path) -> None:
    script = write(
        tmp_path,
        "import sys, torch, torch.distributed as dist\n"
        "from pathlib import Path\n"
        "dist.init_process_group('gloo')\n"
        "ranks = torch.ones(1)\n"
        "dist.all_reduce(ranks)\n"
        "if dist.get_rank() == 0:\n"
        "    Path(sys.argv[1]).write_text(f'{dist.get_world_size()} {int(ranks)}')\n"
        "dist.destroy_process_group()\n",
    )
    plan = str(save(PAIR, tmp_path / "plan.json"))
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("", 29500))
            taken.listen()
        except OSError:
            pass  # something else has it, which is as good
        jobs = [
            subprocess.Popen(
                [
                    *(beside_python("bigmodel"), "run", str(script), "--plan", plan),
                    *("--log-folder", str(tmp_path / f"logs-{job}")),
                    *("--", str(tmp_path / f"result-{job}")),
                ],
                env=clean_environment(),
            )
            for job in range(2)
        ]
        try:
            assert [job.wait(timeout=200) for job in jobs] == [0, 0]
        finally:
            for job in jobs:
                job.terminate()
    for job in range(2):
        assert (tmp_path / f"result-{job}").read_text() == "2 2"
    names = {next((tmp_path / f"logs-{job}").glob("*/")).name for job in range(2)}
    assert len(names) == 2


def test_launch_01_holder_of_the_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = Process(
            launcher="unknown",
            rank=0,
            local_rank=0,
            world_size=2,
            local_world_size=2,
            master_address="127.0.0.1",
            master_port=taken.getsockname()[1],
            store_runs=False,
        )
        with pytest.raises(WorldError) as error:
            join(PAIR, process, torch.device("cpu"), 5.0)
    port = process.master_port
    assert f"rank 0 cannot listen at port {port}" in str(error.value)
    assert f": process {os.getpid()} (" in str(error.value)


@pytest.mark.parametrize("devices", ["0,2", "GPU-8a5f,GPU-77c1"])
def test_launch_03_visible_devices_reach_the_ranks_unchanged(
    tmp_path, monkeypatch, devices: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    script = write(
        tmp_path,
        "import os, sys\n"
        "with open(sys.argv[1] + '/' + os.environ['LOCAL_RANK'], 'w') as file:\n"
        "    file.write(os.environ['CUDA_VISIBLE_DEVICES'])\n",
    )
    assert run_script(script, [str(tmp_path)], PAIR, log_folder=tmp_path / "logs") == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [devices] * 2


def test_launch_03_several_hosts_need_their_own_list(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    hosts = [Host(name=name, slots=1) for name in ("one", "two")]
    with pytest.raises(WorldError, match="--env CUDA_VISIBLE_DEVICES"):
        ssh_commands(hosts, PAIR, ["train.py", "--plan", "plan.json"])
    variables = ["CUDA_VISIBLE_DEVICES=1"]
    words = ["train.py", "--plan", "plan.json"]
    commands = ssh_commands(hosts, PAIR, words, variables=variables)
    assert all(" CUDA_VISIBLE_DEVICES=1 " in words[-1] for words in commands.values())


def test_launch_08_the_first_error_stands_last(tmp_path, capfd) -> None:
    script = write(
        tmp_path,
        "import os, socket, sys, time\n"
        "rank, path = int(os.environ['RANK']), sys.argv[1]\n"
        "if rank == 2:\n"
        "    with socket.socket(socket.AF_UNIX) as server:\n"
        "        server.bind(path)\n"
        "        server.listen()\n"
        "        others = [server.accept() for _ in range(3)]\n"
        "        raise ValueError('boom')\n"
        "with socket.socket(socket.AF_UNIX) as peer:\n"
        "    while peer.connect_ex(path):\n"
        "        time.sleep(0.05)\n"
        "    peer.recv(1)\n"
        "for line in range(50):\n"
        "    print('noise', line, file=sys.stderr)\n"
        "raise RuntimeError('Connection closed by peer')\n",
    )
    plan = Plan(backend="ddp", mesh=Mesh(replicate=4), micro_batch=1)
    name = f"/tmp/boom-{os.getpid()}"
    try:
        assert run_script(script, [name], plan, log_folder=tmp_path / "logs") == 1
    finally:
        Path(name).unlink(missing_ok=True)
    last = capfd.readouterr().err.splitlines()[-15:]
    assert last[-1] == "error: rank 2 failed with exit code 1: ValueError: boom"
    assert "    raise ValueError('boom')" in last


def test_rank_that_dies_at_its_start_ends_the_others(tmp_path, capfd) -> None:
    script = write(
        tmp_path,
        "import os, sys, time\n"
        "print('hello from', os.environ['RANK'], flush=True)\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('no memory left', file=sys.stderr)\n"
        "    sys.exit(4)\n"
        "time.sleep(300)\n",
    )
    begin = time.monotonic()
    assert run_script(script, [], PAIR, log_folder=tmp_path / "logs") == 4
    assert time.monotonic() - begin < 30
    shown = capfd.readouterr()
    assert "hello from 1" not in shown.out
    assert "no memory left" in shown.err
    assert shown.err.splitlines()[-1] == "error: rank 1 failed with exit code 4"


def test_hang_10_rank_phase_and_step_are_named(tmp_path, capfd) -> None:
    code = run_script(BAD_START, ["memory"], PAIR, log_folder=tmp_path / "logs")
    end = time.monotonic()
    assert code == 1
    error = capfd.readouterr().err
    last = error.splitlines()[-1]
    assert last.startswith(
        "error: rank 1 failed with exit code 1 in backward of step 2 (bad_start.py:"
    )
    assert last.endswith(": MemoryError: no memory")
    log = next((tmp_path / "logs").glob("*/attempt_0/1"))
    failed = (log / "stderr.log").read_text().split("failed at ")[1].split()[0]
    assert end - float(failed) < 10
    report = json.loads((log / "error.json").read_text())
    assert "no memory" in report["message"]["extraInfo"]["py_callstack"]
