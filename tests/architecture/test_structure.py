"""The rules of the house that import-linter does not know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import bigmodel

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 has no TOML reader")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bigmodel"
LONGEST = 400
TAKEN = {"plan", "estimate", "trace", "prepare", "launch"}
EMPTY_WORDS = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def sources() -> list[Path]:
    folders = ("bigmodel", "tests", "benchmarks", "recipes", "examples")
    return [path for name in folders for path in sorted((ROOT / name).rglob("*.py"))]


def test_no_file_is_long():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in sources()
    }
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


def test_no_module_hides_a_public_function_or_says_nothing():
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    names |= {path.name for path in PACKAGE.rglob("*") if path.is_dir()}
    assert names & (TAKEN | EMPTY_WORDS) == set()


def test_the_public_names_are_exactly_those_promised():
    for name in bigmodel.__all__:
        assert getattr(bigmodel, name) is not None
    assert set(bigmodel.__all__) <= set(dir(bigmodel))
    with pytest.raises(AttributeError):
        bigmodel.nothing_of_the_kind  # noqa: B018


def test_every_backend_is_in_the_contract_of_independence():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = [c for c in contracts if c["type"] == "independence"]
    folders = {
        f"bigmodel.backends.{path.parent.name}"
        for path in (PACKAGE / "backends").glob("*/describe.py")
    }
    assert set(contract["modules"]) == folders


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("bigmodel", exclude_type_checking_imports=True)
    imports = {
        name: graph.find_modules_directly_imported_by(name) for name in graph.modules
    }
    # What is imported by nobody that is left, layer by layer; a circle stays.
    while free := [name for name, used in imports.items() if not used & set(imports)]:
        for name in free:
            del imports[name]
    assert sorted(imports) == []


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after running code."""
    script = (
        f"{code}\nimport sys\nprint('\\n'.join(m.split('.')[0] for m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(done.stdout.split())


def test_importing_the_library_imports_no_torch():
    assert "torch" not in modules_after("import bigmodel")


def test_the_pure_half_imports_no_torch():
    code = "import bigmodel.search, bigmodel.reports.page, bigmodel.backends.catalog"
    assert "torch" not in modules_after(code)


def test_planning_loads_no_training_library_and_leaves_cuda_alone():
    code = (
        "import torch, bigmodel\n"
        "from torch.nn import Linear, Sequential\n"
        "decision = bigmodel.plan(lambda: Sequential(Linear(8, 8), Linear(8, 8)),"
        " (torch.zeros(2, 8), torch.zeros(2, 8)), cluster='2xA100-40GB',"
        " global_batch=4, loss=lambda o, b: (o - b[1]).square().mean())\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert decision.plan.world == 2"
    )
    assert modules_after(code) & {"deepspeed", "fairscale", "accelerate"} == set()
