"""A driver whose answers a test writes: NVML's shared library, built from nvml.c, and the file that it reads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
RECOVERY_FIELD = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"""

HEALTHY = {
    "temperature": 55, "power": 312_500, "memory": 5 << 30, "ecc_corrected": 3, "ecc_uncorrected": 0,
    "remap_failed": 0, "remap_pending": 0, "throttle": 4, "clock": 1755, "clock_max": 1980, "pcie_replays": 7,
    "links": 4, "links_down": 0, f"field.{RECOVERY_FIELD}.0": 0, "field.52.0": 2, "processes": 0,
}  # fmt: skip
"""A GPU under load: at its power cap, and with a few errors that were corrected long ago."""


def build(folder: Path) -> Path:
    """Make the library in a folder, for LD_LIBRARY_PATH, and return that."""
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(SOURCE)], check=True)
    return folder


class Script:
    """What one host's driver answers: changed at once, as a whole, while it is asked."""

    def __init__(self, path: Path, *uuids: str) -> None:
        """Args: uuids: of the GPUs, all healthy; none: there is no driver."""
        self.path, self._answers, self._more = path, {}, []  # type: Path, dict[str, object], list[str]
        if uuids:
            self._answers["gpus"] = len(uuids)
        for index, uuid in enumerate(uuids):
            self._answers |= {f"{index}.{name}": value for name, value in {"uuid": uuid, **HEALTHY}.items()}
        self._write()

    def answer(self, gpu: int, **answers: object) -> None:
        """From now on GPU `gpu` answers so; two underscores stand for a dot, and None for what it does not support."""
        for name, value in answers.items():
            key = f"{gpu}.{name.replace('__', '.')}"
            self._answers.pop(key, None)
            if value is not None:
                self._answers[key] = value
        self._write()

    def recovery(self, gpu: int, action: int) -> None:
        """The driver wants something done to GPU `gpu`."""
        self._answers[f"{gpu}.field.{RECOVERY_FIELD}.0"] = action
        self._write()

    def xid(self, gpu: int, number: int) -> None:
        """GPU `gpu` reports an error."""
        self._more.append(f"xid {gpu} {number}")
        self._write()

    def hang(self, what: str) -> None:
        """Whoever asks for this is not answered any more."""
        self._more.append(f"hang {what}")
        self._write()

    def recover(self) -> None:
        """The driver answers those who ask from now on."""
        self._more = [line for line in self._more if not line.startswith("hang")]
        self._write()

    def remove(self) -> None:
        """There is no driver any more."""
        self.path.unlink()

    def _write(self) -> None:
        lines = [*(f"{key} {value}" for key, value in self._answers.items()), *self._more]
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text("\n".join(lines) + "\n")
        os.replace(new, self.path)
