"""The source text as the house tests see it: files, syntax trees, imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AGENT = ROOT / "runtime" / "keepstep"
WORKER = ROOT / "runtime" / "keepstep_worker"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tracked() -> tuple[Path, ...]:
    """Every file of the repository, those not yet added included, ignored ones excluded."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in listed.split("\0") if name)
    return tuple(sorted({path for path in paths if path.is_file()}))


def python_files(*folders: str) -> list[Path]:
    roots = [ROOT / folder for folder in folders]
    return [path for path in tracked() if path.suffix == ".py" and any(path.is_relative_to(root) for root in roots)]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def label(path: Path, line: int | None = None) -> str:
    name = path.relative_to(ROOT).as_posix()
    return name if line is None else f"{name}:{line}"


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in nodes(path) if isinstance(node, Function))


def run_tool(*argv: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a tool of this environment from the repository root, with the source root on its path."""
    return subprocess.run(
        [str(Path(sys.executable).parent / argv[0]), *argv[1:]],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "runtime"), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )
