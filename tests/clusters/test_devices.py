"""The table of devices."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bigmodel.clusters import DEVICES
from bigmodel.units import GB


@pytest.mark.parametrize("name", DEVICES.names())
def test_every_row_can_be_right(name):
    row = DEVICES.get(name)
    device = row.device
    assert device.name == name
    assert device.source.startswith("https://")
    assert device.kind == "cuda"
    # Tensor cores are faster than fp32, and memory is near what the name says.
    assert device.peaks["float16"] > device.peaks["float32"]
    assert device.peaks.get("bfloat16", device.peaks["float16"]) > 0
    named = int(name.rpartition("-")[2].removesuffix("GB")) * GB
    assert 0.9 * named < device.memory < 1.1 * named
    # Nothing outside is faster than what is inside the machine, nor that than memory.
    assert row.network.bandwidth <= row.link.bandwidth * 2
    assert row.link.bandwidth < device.bandwidth


def test_newer_devices_are_faster():
    rows = [DEVICES.get(n).device for n in ("V100-32GB", "A100-80GB", "H100-80GB")]
    for older, newer in pairwise(rows):
        assert older.peaks["float16"] < newer.peaks["float16"]
        assert older.bandwidth < newer.bandwidth
    assert "bfloat16" not in rows[0].peaks
