"""Intermediate output: what the script leaves in the platform's folder for it is uploaded while it trains.

As AWS's toolkit does, where the hyperparameter `sagemaker_s3_output` says to where, and unless the platform does it
itself: then the folder is there before anybody else could have made it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from keepstep import kernel
from keepstep.errors import ConfigError
from keepstep.intake.contract import Contract
from keepstep.intake.files import printable, show

KEY = "sagemaker_s3_output"
_MARK = "intermediate"
_LAST_LOOK_S = 60.0


class Intermediate:
    """One host's part in it; does nothing where nothing is asked for."""

    def __init__(
        self, contract: Contract, environ: Mapping[str, str], scratch: Path, log: Callable[[str], None]
    ) -> None:
        """Make the folder, where it is keepstep's to make.

        Raises:
            ConfigError: what is asked for can not be used.
        """
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._task: dict[str, object] = {}
        url = _url_of(contract, environ)
        folder, mark = contract.paths.output_intermediate, scratch / _MARK
        if not url or (folder.exists() and not mark.exists()):
            return
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            mark.touch()
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(str(error), "folders that can be written", key=str(folder)) from error
        region = environ.get("AWS_REGION") or contract.hyperparameters.get("sagemaker_region")
        self._task = {
            "folder": str(folder), "url": url, "name": f"keepstep {contract.current_host}",
            "region": region if isinstance(region, str) else None, "endpoint": environ.get("S3_ENDPOINT_URL"),
        }  # fmt: skip

    async def begin(self) -> None:
        """Start the process that uploads. For the main thread only: it dies with its parent thread."""
        if not self._task:
            return
        words = (*kernel.interpreter(), "-m", "keepstep.app.relaying")
        try:
            self._process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.PIPE)
        except OSError as error:
            self._log(f"intermediate output is not uploaded: {error}")
            return
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._task).encode() + b"\n")

    async def finish(self) -> None:
        """Have it look once more, and wait for that as long as is reasonable."""
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(_LAST_LOOK_S):
                code = await process.wait()
        except TimeoutError:
            code = -1
            process.kill()
        if code:
            self._log(f"not all intermediate output was uploaded: {self._task['folder']}")


def _url_of(contract: Contract, environ: Mapping[str, str]) -> str:
    """Where files go: below the job's own name, as the platform's own output does; empty for nowhere.

    Raises:
        ConfigError: it is no place in S3.
    """
    said = contract.hyperparameters.get(KEY)
    if said in (None, "") or (isinstance(said, str) and said.startswith("file://")):
        return ""
    if not isinstance(said, str) or not said.startswith("s3://") or not said.removeprefix("s3://").strip("/"):
        file = printable(str(contract.paths.input_config / "hyperparameters.json"))
        raise ConfigError(f"found {show(said)}", "s3://bucket/prefix", file=file, key=KEY)
    parts = (said.rstrip("/"), environ.get("TRAINING_JOB_NAME", ""), "output", "intermediate")
    return "/".join(filter(None, parts))
