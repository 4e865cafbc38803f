"""One case on this process's device: predicted, then really trained and measured."""

from __future__ import annotations

import json
import statistics
import time
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bigmodel
from benchmarks.memory_accuracy.one_device_cases import (
    Case,
    Scale,
    make_batch,
    make_model,
)
from benchmarks.memory_accuracy.optimizers import OPTIMIZERS
from bigmodel.clusters import Cluster
from bigmodel.plans import Plan
from bigmodel.running.environment import visible_devices
from bigmodel.running.measuring import measure_memory
from bigmodel.running.session import Engine, prepare
from bigmodel.search import Estimate, predict
from bigmodel.simulator import Costs

STEPS = 6
"""Optimizer steps; the second half counts, as in `measure_memory`."""


def run_case(case: Case, scale: Scale, cluster: Cluster, out: Path) -> None:
    """Write what became of a case, also where it failed; for a process of its own."""
    try:
        found = _run(case, scale, cluster)
    except Exception as error:
        # Whatever it is, it belongs to this case, and the others go on.
        last = traceback.format_exception_only(error)[-1].strip()
        found = {"failed": last, "traceback": traceback.format_exc()}
    out.write_text(json.dumps(found))


def _run(case: Case, scale: Scale, cluster: Cluster) -> dict[str, Any]:
    torch.manual_seed(0)
    spec = bigmodel.trace(
        partial(make_model, case.model, scale),
        make_batch(case.model, scale, 2),
        precision=case.precision,
        target=cluster.device.kind,
    )
    plan = case.plan(scale, spec.units)
    estimate = predict(plan, Costs(spec, cluster))
    found = {"plan": plan.describe(), "predicted": _predicted(estimate)}
    if estimate.low > estimate.capacity:
        words = f"it needs {estimate.low} bytes of {estimate.capacity} at least"
        return found | {"left_out": words}
    on_gpu = cluster.device.kind == "cuda"
    measure = _measure_on_gpu if on_gpu else _measure_on_cpu
    return found | {"measured": measure(case, scale, plan)}


def _predicted(estimate: Estimate) -> dict[str, Any]:
    rank = estimate.fullest
    return {
        **{name: interval.likely for name, interval in rank.numbers.items()},
        "intervals": {
            name: interval.to_dict() for name, interval in rank.numbers.items()
        },
        "moment": rank.moment,
        "terms": {term.name: term.num_bytes for term in rank.terms},
        "seconds": estimate.seconds,
    }


def _engine(case: Case, scale: Scale, plan: Plan) -> Engine:
    make = partial(make_model, case.model, scale)
    return prepare(plan, make, partial(OPTIMIZERS[case.optimizer], lr=1e-4))


def _measure_on_cpu(case: Case, scale: Scale, plan: Plan) -> dict[str, Any]:
    memory = measure_memory(
        lambda: _engine(case, scale, plan),
        lambda engine: make_batch(case.model, scale, plan.local_batch),
        steps=STEPS,
    )
    # No allocator of torch, and no driver, to ask on a CPU.
    return {
        "allocated": memory.peak,
        "reserved": None,
        "device_total": None,
        "seconds": None,
        "more": asdict(memory),
    }


def _measure_on_gpu(case: Case, scale: Scale, plan: Plan) -> dict[str, Any]:
    before = _used_by_driver()
    engine = _engine(case, scale, plan)
    torch.cuda.synchronize()
    made = torch.cuda.max_memory_reserved()
    batch = make_batch(case.model, scale, plan.local_batch)
    peaks: list[int] = []
    seconds: list[float] = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        engine.step(batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        peaks.append(torch.cuda.max_memory_allocated())
    reserved = torch.cuda.max_memory_reserved()
    # While the engine lives: what it keeps outside of torch's allocator counts.
    free, total = torch.cuda.mem_get_info()
    after = _used_by_driver()
    statistics_now = torch.cuda.memory_stats()
    engine.close()
    known = before is not None and after is not None
    return {
        "allocated": max(peaks[STEPS // 2 :]),
        "reserved": reserved,
        "device_total": after - before if known else total - free,
        "seconds": statistics.median(seconds[STEPS // 2 :]),
        "more": {
            "peaks": peaks,
            "reserved_when_made": made,
            "mem_get_info": {"free": free, "total": total},
            "nvml_used": {"before": before, "after": after},
            "retries": statistics_now.get("num_alloc_retries"),
            "segments": statistics_now.get("segment.all.current"),
        },
    }


def _used_by_driver() -> int | None:
    """Return the bytes in use by all processes; None without NVML.

    Of the first GPU that this process may see: NVML knows all by their own numbers.
    """
    try:
        import pynvml
    except ImportError:
        return None
    pynvml.nvmlInit()
    try:
        first = (visible_devices() or "0").split(",")[0].strip()
        by_number = first.isdigit()
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(first))
            if by_number
            else pynvml.nvmlDeviceGetHandleByUUID(first)
        )
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    finally:
        pynvml.nvmlShutdown()
