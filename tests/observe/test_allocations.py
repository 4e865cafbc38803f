"""Allocated bytes of phases, from the CPU allocator's own count."""

from __future__ import annotations

from threading import Thread

import torch

from bigmodel.observe.allocations import phase, record_phases

MEGABYTE = 1_000_000


def test_a_phase_has_its_peak_and_what_it_leaves():
    kept: list[torch.Tensor] = []

    def run() -> None:
        with phase("first"):
            kept.append(torch.zeros(MEGABYTE, dtype=torch.uint8))
            torch.zeros(2 * MEGABYTE, dtype=torch.uint8)
        with phase("second"):
            kept.clear()

    first, second = record_phases(run)
    assert (first.start, first.peak, first.end) == (0, 3 * MEGABYTE, MEGABYTE)
    assert (second.start, second.peak, second.end) == (MEGABYTE, MEGABYTE, 0)


def test_what_another_thread_frees_is_free():
    # As gloo's threads do with the tensors of a collective.
    kept = [torch.empty(0)]

    def run() -> None:
        kept[0] = torch.zeros(MEGABYTE, dtype=torch.uint8)
        thread = Thread(target=kept.clear)
        thread.start()
        thread.join()
        with phase("after"):
            torch.zeros(10, dtype=torch.uint8)

    (after,) = record_phases(run)
    assert (after.peak, after.end) == (10, 0)
