"""Ranks that are told by variables alone who they are and where they meet.

    python forked.py WAY[,WAY...] FOLDER launched NAME...

Two ranks of `worker.py` for each way, one way after another; several ways write to
FOLDER/WAY. The ranks are forks of this process, which has imported everything.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

WAYS = {
    "slurm-variables": "srun",
    "mpich-variables": "mpiexec",
    "env-address": "unknown",
    "tcp-address": "unknown",
    "shared-file": "unknown",
}
"""From a way of saying it to what `Process.launcher` must be."""


def variables(way: str, rank: int, port: int, folder: Path) -> dict[str, str]:
    """Return what a launcher of this kind would set for a rank."""
    me = str(rank)
    ranks = {"RANK": me, "LOCAL_RANK": me, "WORLD_SIZE": "2"}
    if way == "slurm-variables":
        return {
            "SLURM_PROCID": me,
            "SLURM_LOCALID": me,
            "SLURM_NTASKS": "2",
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_ID": str(port),
            "SLURM_STEP_NODELIST": "localhost",
        }
    if way == "mpich-variables":
        return {
            "PMI_RANK": me,
            "PMI_SIZE": "2",
            "MPI_LOCALRANKID": me,
            "MPI_LOCALNRANKS": "2",
            "MASTER_PORT": str(port),
        }
    if way == "env-address":
        return {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    if way == "tcp-address":
        return {**ranks, "BIGMODEL_INIT": f"tcp://localhost:{port}"}
    return {**ranks, "BIGMODEL_INIT": f"file://{folder / 'meeting'}"}


def main() -> None:
    from benchmarks.parity import worker

    ways, place, *arguments = sys.argv[1:]
    for way in ways.split(","):
        folder = Path(place) / way if "," in ways else Path(place)
        folder.mkdir(exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = []
        for rank in range(2):
            if (child := os.fork()) == 0:
                os.environ.update(variables(way, rank, port, folder))
                sys.argv[1:] = [str(folder), *arguments]
                worker.main()
                sys.stdout.flush()
                os._exit(0)
            ranks.append(child)
        for child in ranks:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
