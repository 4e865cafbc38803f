"""Text as training samples: windows of equal length over one row of tokens."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bigmodel.errors import UsageError, Violation


@final
class Windows(Dataset[dict[str, Tensor]]):
    """Windows that do not overlap; the labels are the inputs, which the model shifts.

    Args:
        tokens: All tokens in one row.
        length: Tokens per window.
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        if len(tokens) < length:
            raise UsageError(
                Violation(
                    field="tokens in the text",
                    got=len(tokens),
                    rule=f"one sample needs {length}",
                    cure="use a longer text or shorter samples",
                )
            )
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * self._length
        window = self._tokens[begin : begin + self._length].long()
        return {"input_ids": window, "labels": window}


def standard_library_bytes(limit: int) -> Tensor:
    """Return the sources of Python's standard library as bytes.

    Args:
        limit: Largest number of bytes; files are read in the order of their names.
    """
    content = bytearray()
    for path in _sources():
        content += path.read_bytes()
        if len(content) >= limit:
            break
    return torch.frombuffer(content, dtype=torch.uint8)[:limit]


def _sources() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    yield from sorted(root.glob("*.py"))
    yield from sorted(root.glob("[!_]*/*.py"))
