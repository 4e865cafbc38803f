"""Reading `8xH100-80GB`, `4x8xA100-40GB`, `H100:8`: devices, machines x devices."""

from __future__ import annotations

import re

from bigmodel.clusters.devices import DEVICES, DeviceRow
from bigmodel.clusters.machine import Cluster, Node
from bigmodel.errors import (
    InvalidClusterError,
    UnknownNameError,
    Violation,
    raise_if_any,
)

_PATTERN = re.compile(r"(?:(-?\d+)x)?(?:(-?\d+)x)?([A-Za-z][\w.-]*?)(?::(-?\d+))?")

CPU = "cpu"
"""Name of the devices that stand for this machine's own cores."""


def parse(text: str) -> tuple[int, int, str]:
    """Return machines, devices in a machine and the device's name.

    Raises:
        InvalidClusterError: The text is no cluster, or a count is not positive.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise InvalidClusterError(
            Violation(
                field="cluster",
                got=text,
                rule="it must name devices, such as 8xH100-80GB (one machine), "
                "4x8xA100-40GB (four machines), 2xcpu (this machine's cores)",
                cure=f"devices: {', '.join(DEVICES.names())}, {CPU}",
            )
        )
    first, second, name, suffix = match.groups()
    counts = [int(count) for count in (first, second, suffix) if count is not None]
    raise_if_any(
        [
            Violation(
                field="cluster",
                got=text,
                rule=f"{count} is no number of devices",
                cure="counts are at least 1",
            )
            for count in counts
            if count < 1
        ],
        InvalidClusterError,
    )
    if len(counts) > 2:
        raise InvalidClusterError(
            Violation(field="cluster", got=text, rule="it has more than two counts")
        )
    nodes, devices = [1, 1, *counts][-2:]
    return nodes, devices, name


def find_device(name: str) -> DeviceRow:
    """Return the row of a device by its full name, or by its name without the memory.

    Raises:
        UnknownNameError: No row matches, or several do.
    """
    wanted = name.lower()
    exact = [row for key, row in DEVICES if key.lower() == wanted]
    rows = exact or [
        row for key, row in DEVICES if key.lower().rpartition("-")[0] == wanted
    ]
    if len(rows) == 1:
        return rows[0]
    raise UnknownNameError("device", name, (*DEVICES.names(), CPU))


def from_table(text: str) -> Cluster:
    """Return the cluster that a text names, with the links of its devices' machines."""
    nodes, devices, name = parse(text)
    row = find_device(name)
    return Cluster(
        name=text,
        node=Node(device=row.device, count=devices, link=row.link),
        num_nodes=nodes,
        link=row.network,
    )
