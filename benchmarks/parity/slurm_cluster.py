"""A SLURM cluster of this machine alone, with a configuration and keys of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_SECONDS = 60


@contextmanager
def one_node_cluster(folder: Path) -> Iterator[Mapping[str, str]]:
    """Run munged, slurmctld and slurmd; yield the variables that srun needs.

    Must be root. No control groups: a folder stands for their mount point.
    """
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as running:
        # A short path: that of a socket may have a hundred characters.
        place = Path(name)
        for sub in ("state", "spool", "cgroups"):
            (place / sub).mkdir()
        key = place / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        (place / "cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={place}/cgroups\n"
            "CgroupAutomount=no\n"
        )
        (place / "slurm.conf").write_text(_configuration(place))
        env = {**os.environ, "SLURM_CONF": str(place / "slurm.conf")}
        munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
        munged += [f"--socket={place}/munge.sock", f"--pid-file={place}/munged.pid"]
        munged += [f"--seed-file={place}/munged.seed"]
        for words in (munged, ["slurmctld", "-D"], ["slurmd", "-D"]):
            running.enter_context(_daemon(words, env, place))
            if words is munged:
                _wait(lambda: (place / "munge.sock").exists(), place)
        _wait(lambda: _is_idle(env), place)
        yield {"SLURM_CONF": str(place / "slurm.conf")}


def _configuration(place: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    return f"""ClusterName=parity
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.sock
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextmanager
def _daemon(words: list[str], env: Mapping[str, str], place: Path) -> Iterator[None]:
    program = shutil.which(words[0], path=_PATH)
    if program is None:
        raise FileNotFoundError(words[0])
    with (place / f"{words[0]}.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *words[1:]], env=env, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_idle(env: Mapping[str, str]) -> bool:
    words = ["sinfo", "--noheader", "--format=%t"]
    found = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    return found.stdout.strip() == "idle"


def _wait(ready, place: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while not ready():
        if time.monotonic() > deadline:
            logs = [path.read_text()[-2000:] for path in place.glob("*.log")]
            raise TimeoutError("\n".join(logs))
        time.sleep(0.2)
