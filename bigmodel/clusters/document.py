"""Clusters as JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bigmodel.clusters.machine import Cluster
from bigmodel.errors import InvalidClusterError, Violation

_ADAPTER = TypeAdapter(Cluster)


def save(cluster: Cluster, path: str | Path) -> Path:
    """Write a cluster file."""
    path = Path(path)
    data = asdict(cluster)
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def load(path: str | Path) -> Cluster:
    """Read a cluster file.

    Raises:
        InvalidClusterError: There is no such file, or it is no cluster.
    """
    path = Path(path)
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidClusterError(
            f"cannot read the cluster file {str(path)!r}: {error.strerror}"
        ) from None
    except ValidationError as error:
        raise InvalidClusterError(
            [
                Violation(
                    field=".".join((str(path), *map(str, item["loc"]))),
                    got=item["input"] if item["loc"] else "the file",
                    rule=item["msg"][0].lower() + item["msg"][1:],
                )
                for item in error.errors()
            ]
        ) from None
