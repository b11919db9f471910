"""Compiles what a wheel of keepstep has of C, where there is a compiler; without one it is as good, and slower."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MACHINE = "x86_64"
"""The one that there is code for."""
TAG = f"py3-none-manylinux_2_17_{MACHINE}"
"""What is compiled needs no library, not even C's: any Linux will do."""


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the compiled library to a wheel."""
        if os.uname().machine != MACHINE or shutil.which(os.environ.get("CC", "gcc")) is None or version == "editable":
            return
        self._folder = tempfile.mkdtemp(prefix="keepstep-native-")
        built = Path(self._folder) / f"stream-{MACHINE}.so"
        subprocess.run([Path(self.root) / "runtime" / "keepstep_worker" / "native" / "compile.sh", built], check=True)
        build_data["force_include"][str(built)] = f"keepstep_worker/native/{built.name}"
        build_data["pure_python"], build_data["tag"] = False, TAG

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder)
