"""What to write in place of Horovod's calls in a script, line by line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bigmodel.errors import UsageError
from bigmodel.running.horovod_calls import FRAMEWORKS, NOT_TORCH, REPLACEMENTS, Row

_UNKNOWN = Row(
    replacement="", note="nothing here takes its place; torch.distributed may"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One use of Horovod in a script."""

    line: int
    """Line of the script, from 1."""
    call: str
    """What stands there, under Horovod's own name: `hvd.DistributedOptimizer(
    backward_passes_per_step=4)`; of its arguments only those with a meaning here."""
    replacement: str
    """What to write; empty where nothing is needed."""
    note: str
    """Why, and what is different."""


def check_script(path: str | Path) -> tuple[Replacement, ...]:
    """Return every use of Horovod in a Python script, with what replaces it.

    The script is read, not run. Names are followed through imports (`import
    horovod.torch as hvd`, `from horovod.torch import allreduce as ar`); text in strings
    and comments does not count.

    Args:
        path: The script.

    Returns:
        In the order of lines; empty where the script does not use Horovod.

    Raises:
        UsageError: There is no such file, or it is no Python.
    """
    source = Path(path)
    if not source.is_file():
        raise UsageError(f"there is no script {str(source)!r}")
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{str(source)!r} cannot be read as Python: {error}") from None
    names = dict(_imports(tree))
    finder = _Finder(names)
    finder.visit(tree)
    return tuple(sorted(finder.found, key=lambda r: (r.line, r.call)))


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield local names and what of Horovod they stand for, as a dotted path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "horovod":
                    if alias.asname:
                        yield alias.asname, alias.name
                    else:
                        yield "horovod", "horovod"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.split(".")[0] == "horovod":
                for alias in node.names:
                    yield alias.asname or alias.name, f"{module}.{alias.name}"


class _Finder(ast.NodeVisitor):
    """Collects the outermost expressions that lead to Horovod."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self.found: list[Replacement] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._imported(node.lineno, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level:
            self._imported(node.lineno, node.module)

    def visit_Call(self, node: ast.Call) -> None:
        path = self._path(node.func)
        if path is None:
            self.generic_visit(node)
            return
        self._add(node.lineno, path, node)
        for child in (*node.args, *node.keywords):
            self.visit(child)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._use(node)

    def _use(self, node: ast.Attribute | ast.Name) -> None:
        path = self._path(node)
        if path is None:
            self.generic_visit(node)
        elif isinstance(node.ctx, ast.Load):
            self._add(node.lineno, path, None)

    def _path(self, node: ast.expr) -> str | None:
        """Return the dotted path within Horovod that an expression names."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._names:
            return None
        return ".".join((self._names[node.id], *reversed(parts)))

    def _imported(self, line: int, module: str) -> None:
        if module.split(".")[0] != "horovod":
            return
        framework = module.removeprefix("horovod").lstrip(".").split(".")[0]
        text, note = "import bigmodel", "no process is set up at import"
        if framework in NOT_TORCH:
            text, note = "", f"horovod.{framework} trains no model of PyTorch"
        self.found.append(
            Replacement(line=line, call=f"import {module}", replacement=text, note=note)
        )

    def _add(self, line: int, path: str, call: ast.Call | None) -> None:
        name = _within(path)
        if not name:
            return
        row = REPLACEMENTS.get(name, _UNKNOWN)
        given = {k.arg: k for k in call.keywords if k.arg} if call else {}
        said = [(key, text) for key, text in row.options if key in given]
        arguments = ", ".join(ast.unparse(given[key]) for key, _ in said)
        self.found.append(
            Replacement(
                line=line,
                call=f"hvd.{name}({arguments})" if call else f"hvd.{name}",
                replacement=row.replacement,
                note="; ".join((row.note, *(text for _, text in said))),
            )
        )


def _within(path: str) -> str:
    """Return the path after `horovod` and the name of the framework."""
    parts = path.split(".")[1:]
    if parts and parts[0] in FRAMEWORKS:
        parts = parts[1:]
    return ".".join(parts)
