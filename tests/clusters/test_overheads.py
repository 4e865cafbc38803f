"""Every device has its overheads, and they are in order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigmodel.clusters import DEVICES
from bigmodel.clusters.overheads import (
    CONTEXT,
    CONTEXT_HIGH,
    CONTEXT_LOW,
    ROWS,
    communicator,
    context,
    overhead_row,
)
from bigmodel.units import GIB, MIB

NAMES = [name for name, _ in DEVICES]


@pytest.mark.parametrize("name", NAMES)
def test_every_device_has_a_row(name):
    row = DEVICES.get(name)
    assert name.split("-")[0] in ROWS
    for share in (context(row.device), communicator(row.link)):
        assert 0 < share.low < share.likely < share.high < 2 * GIB
        assert share.because


@pytest.mark.parametrize(
    ("count", "read"), [(34, 107), (82, 256), (142, 426), (188, 555)]
)
def test_contexts_agree_with_those_that_were_read(count, read):
    # Multiprocessors and MiB, without kernels: see the docstring of the table.
    assert CONTEXT_LOW * count - MIB <= read * MIB <= CONTEXT_HIGH * count + MIB
    assert CONTEXT * count == pytest.approx(read * MIB, rel=0.04)


def test_a_device_without_a_row_says_whose_it_takes():
    known = DEVICES.get("H100-80GB").device
    strange = replace(known, name="X1-80GB")
    assert context(strange).likely == context(known).likely
    assert "(those of H100)" in context(strange).because
    assert "(those of H100)" not in context(known).because


def test_workspaces_are_those_of_torch():
    assert overhead_row(DEVICES.get("A100-80GB").device).workspace == 8_519_680
    assert overhead_row(DEVICES.get("H100-80GB").device).workspace == 32 * MIB
