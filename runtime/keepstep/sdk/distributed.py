"""SDK v3's way to name what distributes a training. Needs the `sagemaker` package, version 3."""

from __future__ import annotations

from pathlib import Path

from sagemaker.train.distributed import DistributedConfig


class KeepstepDriver(DistributedConfig):  # type: ignore[misc] # the SDK is not installed where types are checked
    """Has SDK v3's start script become `keepstep train`; the folder is copied over the SDK's own drivers.

    Attributes:
        settings: knobs of the policy, as `checkpoint.every=2min`.
    """

    settings: list[str] = []  # noqa: RUF012 - a field of pydantic's, which copies it

    @property
    def driver_dir(self) -> str:
        """The folder that holds the driver."""
        return str(Path(__file__).parent / "driver")

    @property
    def driver_script(self) -> str:
        """The driver's file name."""
        return "keepstep_driver.py"
