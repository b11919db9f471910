"""Build both wheels and try them where no source tree can help: `try_wheels.py FOLDER`.

The folder is emptied first. Needs `build` and `hatchling` in the running interpreter, and the package registry for the
agent's pinned dependencies. Exits non-zero with the failed command's output.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("pyproject.toml", "ruff.toml", "tests/")


def run(*argv: str | Path, cwd: Path) -> str:
    """Run a command without this process's PYTHONPATH and return what it prints; fail loudly."""
    done = subprocess.run(
        ["env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", *map(str, argv)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        raise SystemExit(f"exit {done.returncode} of {' '.join(map(str, argv))}\n{done.stdout}")
    return done.stdout


def build_wheel(source: Path, folder: Path) -> Path:
    before = set(folder.glob("*.whl"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, cwd=folder)
    (wheel,) = set(folder.glob("*.whl")) - before
    names = zipfile.ZipFile(wheel).namelist()
    stray = [name for name in names if name.endswith(LEFT_OUT[:2]) or LEFT_OUT[2] in name]
    if stray:
        raise SystemExit(f"{wheel.name} holds what it should not: {stray}")
    return wheel


def clean_python(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def try_agent(wheel: Path, folder: Path) -> None:
    """Command, module and presets, from a folder that is not the repository."""
    python = clean_python(folder / "agent")
    pinned = ROOT / "requirements" / "agent.txt"
    run(python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", pinned, cwd=folder)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    run(python, "-m", "pip", "check", cwd=folder)
    version = wheel.name.split("-")[1]
    said = run(python.parent / "keepstep", "--version", cwd=folder)
    if version not in said:
        raise SystemExit(f"keepstep --version says {said!r}, the wheel is {version}")
    if "usage" not in run(python, "-m", "keepstep", "--help", cwd=folder).lower():
        raise SystemExit("python -m keepstep --help prints no usage")
    listing = (
        "from importlib.resources import files; print(*[p.name for p in (files('keepstep') / 'policies').iterdir()])"
    )
    installed = {name for name in run(python, "-c", listing, cwd=folder).split() if name.endswith(".yaml")}
    expected = {path.name for path in (ROOT / "policies").glob("*.yaml")}
    if installed != expected or not {"default.yaml", "spot.yaml"} <= installed:
        raise SystemExit(f"presets in the wheel: {sorted(installed)}; in the tree: {sorted(expected)}")
    for preset in sorted(installed):
        run(python.parent / "keepstep", "policy", "check", preset.removesuffix(".yaml"), cwd=folder)


def try_worker(wheel: Path, folder: Path) -> list[str]:
    """Import every module with nothing installed beside; return the versions of Python it was tried with."""
    program = (
        "import importlib, pkgutil, sys, keepstep_worker as k\n"
        "names = [m.name for m in pkgutil.walk_packages(k.__path__, 'keepstep_worker.') if m.name[-8:] != '__main__']\n"
        "for name in names: importlib.import_module(name)\n"
        "assert 'keepstep_worker.wire' in names\n"
        "assert not {'tensorflow', 'keras', 'numpy', 'keepstep'} & set(sys.modules)\n"
        "print(sys.version.split()[0])\n"
    )
    python = clean_python(folder / "bare")
    run(python, "-m", "pip", "install", "--quiet", "--no-index", wheel, cwd=folder)
    versions = [run(python, "-I", "-c", program, cwd=folder).strip()]
    unpacked = folder / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    oldest = shutil.which("python3.9")
    if oldest and subprocess.run([oldest, "-c", ""], capture_output=True).returncode == 0:
        versions.append(run(oldest, "-c", program, cwd=unpacked).strip())
    return versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    agent, worker = build_wheel(ROOT, folder), build_wheel(ROOT / "runtime" / "keepstep_worker", folder)
    versions = try_worker(worker, folder)
    print(f"{worker.name}: imports with the standard library alone, Python {', '.join(versions)}")
    try_agent(agent, folder)
    print(f"{agent.name}: command, module and presets work in a clean environment")


if __name__ == "__main__":
    main()
