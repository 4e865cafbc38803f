"""The table of backends: every folder here that describes itself."""

from __future__ import annotations

import importlib
import pkgutil

from bigmodel.backends.backend import AbstractBackend
from bigmodel.registry import Registry

BACKENDS: Registry[AbstractBackend] = Registry("backend")
"""From a backend's name to its description."""


def _discover() -> None:
    package = importlib.import_module("bigmodel.backends")
    for found in pkgutil.iter_modules(package.__path__):
        if found.ispkg:
            module = importlib.import_module(f"bigmodel.backends.{found.name}.describe")
            BACKENDS.add(found.name, module.BACKEND)


_discover()
