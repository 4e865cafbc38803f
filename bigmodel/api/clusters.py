"""Naming a cluster: the public function `cluster`."""

from __future__ import annotations

from pathlib import Path

from bigmodel.clusters import Cluster, document, notation
from bigmodel.errors import InvalidClusterError, UsageError, Violation


def cluster(source: str | Path | Cluster | None = None) -> Cluster:
    """Return a cluster as data.

        bigmodel.cluster("8xH100-80GB")     one machine with 8 GPUs
        bigmodel.cluster("4x8xA100-40GB")   four of them
        bigmodel.cluster("2xcpu")           two processes on this machine's cores
        bigmodel.cluster("cluster.json")    a file
        bigmodel.cluster()                  what this job runs on

    Args:
        source: One of these.

    Raises:
        UnknownNameError: A device that is in no table; lists the known ones.
        InvalidClusterError: The text or the file says something impossible.
    """
    if isinstance(source, Cluster):
        return source
    if source is None:
        from bigmodel.observe.probe import probe_cluster
        from bigmodel.running.environment import read_process

        process = read_process()
        return probe_cluster(None if process.launcher == "none" else process.world_size)
    if isinstance(source, Path):
        return document.load(source)
    if not isinstance(source, str):
        raise UsageError(
            f"a {type(source).__name__} is no cluster; give a name such as "
            "'8xH100-80GB', the path of a cluster file, or a Cluster"
        )
    if source.endswith(".json") or "/" in source or Path(source).is_file():
        return document.load(source)
    nodes, devices, name = notation.parse(source)
    if name.lower() != notation.CPU:
        return notation.from_table(source)
    if nodes > 1:
        raise InvalidClusterError(
            Violation(
                field="cluster",
                got=source,
                rule="cpu stands for the cores of this machine, and there is one",
                cure=f"use {nodes * devices}xcpu",
            )
        )
    from bigmodel.observe.probe import cpu_cluster

    return cpu_cluster(devices)
