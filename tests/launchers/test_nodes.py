"""Several machines: two network namespaces of this one, or hosts behind ssh."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.parity.comparison import deviation
from benchmarks.parity.launchers import (
    WORKER,
    beside_python,
    clean_environment,
    ending_group,
    find_tool,
    free_port,
    launched_cases,
)
from bigmodel.plans.document import save

CASE = next(case for case in launched_cases() if case.name == "ddp-mlp-plain")
BIGMODEL = beside_python("bigmodel")
SECONDS = 200


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> str:
    return str(save(CASE.plan, tmp_path_factory.mktemp("plan") / "plan.json"))


def finish_all(*commands: list[str], **variables: str) -> list[tuple[int, str]]:
    """Run commands at once; return exit code and output of each."""
    with ExitStack() as running:
        started = []
        for command in commands:
            process = subprocess.Popen(
                command,
                env={**clean_environment(), **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            running.enter_context(ending_group(process))
            started.append(process)
        outputs = [process.communicate(timeout=SECONDS)[0] for process in started]
        return [(p.returncode, text) for p, text in zip(started, outputs, strict=True)]


def assert_trained(folder: Path, results: list[tuple[int, str]]) -> None:
    output = "\n".join(text for _, text in results)
    assert [code for code, _ in results] == [0] * len(results), output
    assert deviation(CASE, folder, output).faults(CASE) == []


@pytest.fixture(scope="module")
def machines() -> Iterator[list[list[str]]]:
    """Return the words that run a command in each of two joined namespaces."""
    if find_tool("ip") is None:
        pytest.skip("ip (iproute2) is missing")
    names = [f"bm{os.getpid()}{side}" for side in "ab"]
    ends = [f"bm{os.getpid() % 10**7}{side}" for side in "ab"]

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add {ends[0]} type veth peer name {ends[1]}")
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip(f"link set {end} netns {name}")
            ip(f"-n {name} addr add 10.231.77.{number}/24 dev {end}")
            ip(f"-n {name} link set {end} up")
            ip(f"-n {name} link set lo up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"ip may not make network namespaces here: {error.stderr.decode()}")
    try:
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def test_torchrun_on_two_machines(machines, tmp_path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    words += ["--nproc-per-node=1", "--master-addr=10.231.77.1", "--master-port=29500"]
    script = [str(WORKER), str(tmp_path), "launched", CASE.name]
    results = finish_all(
        *(
            [*machine, *words, f"--node-rank={rank}", *script]
            for rank, machine in enumerate(machines)
        )
    )
    assert_trained(tmp_path, results)


def nodes(plan: str, address: str, port: int, *more: str) -> list[list[str]]:
    words = [BIGMODEL, "run", "--plan", plan, "--nodes=2", f"--master-addr={address}"]
    words += [f"--master-port={port}", *more]
    return [[*words, f"--node-rank={rank}"] for rank in range(2)]


def test_bigmodel_run_on_two_machines(machines, plan, tmp_path) -> None:
    logs = f"--log-folder={tmp_path / 'logs'}"
    script = [str(WORKER), "--", str(tmp_path), "launched", CASE.name]
    results = finish_all(
        *(
            [*machine, *words, *script]
            for machine, words in zip(
                machines, nodes(plan, "10.231.77.1", 29500, logs), strict=True
            )
        )
    )
    assert_trained(tmp_path, results)
    assert (
        "2 nodes with 1 processes each, meeting at 10.231.77.1:29500" in results[0][1]
    )


def test_node_that_never_joins_is_named(plan, tmp_path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    logs = f"--log-folder={tmp_path / 'logs'}"
    port = free_port()
    words = nodes(plan, "localhost", port, logs, "--join-timeout=2", str(script))
    begin = time.monotonic()
    [(code, text)] = finish_all(words[0])
    assert code == 1
    assert "node 1 of 2 never came: node 0" in text
    assert f"waited 2 s at localhost:{port}" in text
    assert "Traceback" not in text
    assert time.monotonic() - begin < 60


def test_launch_05_failed_node_is_named_and_its_code_is_everybodys(
    plan, tmp_path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise SystemExit(3)\n"
        "time.sleep(100)\n"
    )
    logs = f"--log-folder={tmp_path / 'logs'}"
    results = finish_all(*nodes(plan, "localhost", free_port(), logs, str(script)))
    host = os.uname().nodename
    for code, text in results:
        assert code == 3, text
        last = text.splitlines()[-1]
        assert last == f"error: rank 1 failed with exit code 3 on node 1 ({host})"


def write_hosts(folder: Path) -> str:
    """Write a host file in which this machine stands under two names."""
    (folder / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    return str(folder / "hosts")


def test_launch_05_failed_host_is_named(plan, tmp_path) -> None:
    remote = tmp_path / "remote"
    remote.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    remote.chmod(0o755)
    script = tmp_path / "train.py"
    script.write_text("import os\nraise SystemExit(3 * int(os.environ['RANK']))\n")
    command = [BIGMODEL, "run", str(script), "--plan", plan, "--ssh", str(remote)]
    command += ["--hostfile", write_hosts(tmp_path), "--log-folder", str(tmp_path)]
    command += ["--env", "CUDA_VISIBLE_DEVICES="]
    [(code, text)] = finish_all(command)
    assert code == 3, text
    assert "rank 1 failed with exit code 3 on node 1" in text
    assert "failed with exit code 3" in text.splitlines()[-1]
    assert text.splitlines()[-1].startswith("error: host ")


def test_launch_06_every_call_has_the_options_of_ssh(plan, tmp_path, capsys) -> None:
    from bigmodel.cli.main import app

    words = ["run", "train.py", "--plan", plan, "--hostfile", write_hosts(tmp_path)]
    words += ["--ssh", "ssh -p 2222 -l user", "--dry-run", "--env"]
    app([*words, "CUDA_VISIBLE_DEVICES=0", "--", "--steps", "2"], standalone_mode=False)
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    for rank, (line, host) in enumerate(
        zip(lines, ("localhost", "127.0.0.1"), strict=True)
    ):
        assert line[:5] == ["ssh", "-p", "2222", "-l", "user"]
        assert host in line
        assert f"--node-rank {rank}" in line[-1]
        assert line[-1].endswith("-- --steps 2")


@contextmanager
def ssh_server() -> Iterator[list[str]]:
    """Run a server with keys of its own; yield the words of a client."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        for key in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key],
                check=True,
            )
        shutil.copy(folder / "user.pub", folder / "authorized_keys")
        (folder / "config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\n"
            "PasswordAuthentication no\nUsePAM no\nPermitRootLogin yes\n"
            f"PidFile {folder}/pid\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        server = find_tool("sshd")
        assert server is not None
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [server, "-D", "-e", "-f", folder / "config"], stderr=log
            )
        client = ["-p", str(port), "-i", f"{folder}/user", "-l", getpass.getuser()]
        client += ["-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR"]
        client += ["-o", "UserKnownHostsFile=/dev/null", "-o", "IdentitiesOnly=yes"]
        try:
            deadline = time.monotonic() + 30
            while subprocess.run(
                ["ssh", *client, "localhost", "true"], check=False
            ).returncode:
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.2)
            yield client
        finally:
            process.terminate()
            process.wait()


@pytest.fixture(scope="module")
def client() -> Iterator[list[str]]:
    missing = [tool for tool in ("sshd", "ssh", "pdsh") if find_tool(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is missing")
    if os.geteuid():
        pytest.skip("sshd is started by root only")
    with ssh_server() as words:
        yield words


def test_bigmodel_run_over_ssh(client, plan, tmp_path) -> None:
    # That ranks of two machines train is shown above; here, that they are started.
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "names = 'RANK', 'WORLD_SIZE', 'BIGMODEL_PLAN', 'ME'\n"
        "with open(sys.argv[1] + '/' + os.environ['RANK'] + '.txt', 'w') as file:\n"
        "    file.write(' '.join(os.environ[name] for name in names))\n"
    )
    command = [BIGMODEL, "run", str(script), "--plan", plan]
    command += ["--ssh", shlex.join(["ssh", *client])]
    command += ["--hostfile", write_hosts(tmp_path), "--log-folder", str(tmp_path)]
    command += ["--env", "CUDA_VISIBLE_DEVICES=", "--env", "ME=a b"]
    [(code, text)] = finish_all([*command, "--", str(tmp_path)])
    assert code == 0, text
    for rank, file in enumerate(("plan.json", "plan.node-1.json")):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert said == f"{rank} 2 {tmp_path / file} a b"


def test_deepspeed_hostfile_over_ssh(client, tmp_path) -> None:
    command = [beside_python("deepspeed"), "--hostfile", write_hosts(tmp_path)]
    command += ["--no_ssh_check", "--no_local_rank", "--master_addr=127.0.0.1"]
    command += [f"--master_port={free_port()}", str(WORKER)]
    results = finish_all(
        [*command, str(tmp_path), "launched", CASE.name],
        PDSH_SSH_ARGS_APPEND=shlex.join(client),
        PDSH_RCMD_TYPE="ssh",
    )
    assert_trained(tmp_path, results)
