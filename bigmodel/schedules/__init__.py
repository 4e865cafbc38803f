"""Pipeline schedules as lists of actions; a schedule is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from bigmodel.registry import Registry
from bigmodel.schedules import gpipe, one_f_one_b
from bigmodel.schedules.action import Action as Action
from bigmodel.schedules.action import Rows as Rows

SCHEDULES: Registry[Callable[[int, int], Rows]] = Registry("pipeline schedule")
"""From a schedule's name to `rows(num_stages, num_micro_batches)`."""
SCHEDULES.add("gpipe", gpipe.rows)
SCHEDULES.add("1f1b", one_f_one_b.rows)
