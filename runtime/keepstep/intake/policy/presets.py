"""The presets: YAML files that ship with keepstep, in the wheel or in the source tree."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import keepstep

SUFFIX = ".yaml"


def preset_folder() -> Traversable:
    """`keepstep/policies` where keepstep is installed, `policies/` of the repository where it runs from source."""
    installed = files(keepstep) / "policies"
    if installed.is_dir():
        return installed
    return Path(keepstep.__file__).resolve().parents[2] / "policies"


def preset_names() -> tuple[str, ...]:
    folder = preset_folder()
    if not folder.is_dir():
        return ()
    return tuple(sorted(entry.name.removesuffix(SUFFIX) for entry in folder.iterdir() if entry.name.endswith(SUFFIX)))


def read_preset(name: str) -> str | None:
    """The text of a preset; None where there is none of that name."""
    if name not in preset_names():
        return None
    return (preset_folder() / f"{name}{SUFFIX}").read_text(encoding="utf-8")
