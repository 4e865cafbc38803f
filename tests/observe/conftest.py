"""Makes the models of this folder importable by its tests."""

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).with_name("tiny_models.py")
_SPEC = importlib.util.spec_from_file_location("tiny_models", _PATH)
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules["tiny_models"] = _MODULE
_SPEC.loader.exec_module(_MODULE)
