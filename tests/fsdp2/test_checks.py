"""Two real ranks: what the plan says is what runs."""

from __future__ import annotations

import pytest

from tests.fsdp2 import filling_checks, option_checks
from tests.fsdp2.launch import check

NAMES = [
    name
    for module in (option_checks, filling_checks)
    for name in vars(module)
    if name.startswith("check_")
]


@pytest.mark.parametrize("name", NAMES)
def test_check(name: str) -> None:
    check(name)
