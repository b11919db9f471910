"""Which modules a file imports, and whether on loading or only when a function is called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.house.source import Function, tree


@dataclass(frozen=True)
class Import:
    """One imported module; `lazy` where loading the file does not import it."""

    module: str
    line: int
    lazy: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    return tuple(_walk(tree(path), lazy=False))


def _walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield from (Import(f"{node.module}.{alias.name}", node.lineno, lazy) for alias in node.names)
    type_checking = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, lazy or type_checking or isinstance(node, Function | ast.Lambda))
