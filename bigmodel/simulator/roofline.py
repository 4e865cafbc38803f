"""Seconds of an operator: the larger of computing and moving, plus its launch.

The roofline model (Williams et al. 2009). Matrix products reach `Device.efficiency` of
the dense peak of their element type, everything else `Device.bandwidth_efficiency` of
the memory bandwidth.
"""

from __future__ import annotations

from bigmodel.clusters import Device
from bigmodel.models import Op


def op_seconds(op: Op, micro_batch: int, device: Device) -> float:
    """Return the seconds of one operator at a micro-batch on a device."""
    moving = op.bytes_moved.at(micro_batch) / (
        device.bandwidth * device.bandwidth_efficiency
    )
    flops = op.flops.at(micro_batch)
    if not flops:
        return max(moving, device.launch_seconds)
    peak = device.peaks.get(op.dtype, device.peaks["float32"])
    return max(moving, flops / (peak * device.efficiency), device.launch_seconds)


def pass_seconds(num_bytes: float, device: Device) -> float:
    """Return the seconds of reading or writing this many bytes."""
    return num_bytes / (device.bandwidth * device.bandwidth_efficiency)
