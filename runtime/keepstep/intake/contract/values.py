"""The contract as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from keepstep.core.job import EntryKind
from keepstep.core.values import frozen


@frozen
class ContractOptions:
    """What the command line says; None and empty where it says nothing.

    Attributes:
        script: the user's script.
        arguments: its arguments.
        policy: a preset's name, or a file.
        store: a directory, s3://bucket/prefix, or none.
    """

    script: str | None = None
    arguments: tuple[str, ...] = ()
    policy: str | None = None
    store: str | None = None


@frozen
class CodeSource:
    """Where the user's code comes from, if it is not here.

    Attributes:
        source: an S3 URL, an archive, a folder or a script.
        into: the folder that is to hold it.
        file: where that was said.
        key: under which name.
        region: S3's region, where one is said.
        endpoint: an S3 other than Amazon's.
    """

    source: str
    into: Path
    file: str
    key: str
    region: str | None = None
    endpoint: str | None = None


BASE = Path("/opt/ml")
"""Where the platform's files are in a container."""


@frozen
class Paths:
    """The platform's folders and files, all below one base (/opt/ml in a container)."""

    base: Path

    @property
    def input(self) -> Path:
        return self.base / "input"

    @property
    def input_config(self) -> Path:
        return self.base / "input" / "config"

    @property
    def input_data(self) -> Path:
        return self.base / "input" / "data"

    @property
    def code(self) -> Path:
        """Where AWS's toolkit keeps the user's code."""
        return self.base / "code"

    @property
    def code_channel(self) -> Path:
        """Where a channel named `code` puts it."""
        return self.base / "input" / "data" / "code"

    @property
    def model(self) -> Path:
        return self.base / "model"

    @property
    def output(self) -> Path:
        return self.base / "output"

    @property
    def output_data(self) -> Path:
        return self.base / "output" / "data"

    @property
    def output_intermediate(self) -> Path:
        return self.base / "output" / "intermediate"

    @property
    def failure_file(self) -> Path:
        """What the platform shows of a failed job: 1,024 characters of it."""
        return self.base / "output" / "failure"

    @property
    def warm_pool_cache(self) -> Path:
        """Stays from one job to the next where the platform keeps the host warm; absent elsewhere."""
        return self.base / "sagemaker" / "warmpoolcache"

    @property
    def checkpoints(self) -> Path:
        return self.base / "checkpoints"


@frozen
class Contract:
    """What the platform and the command line say about this container and its job.

    Attributes:
        job_name: fit for keys and object names.
        current_host: one of `hosts`.
        hosts: every host of the job, in natural order (the platform's own order is lexicographic).
        network_interface_name: as `resourceconfig.json` has it, `eth0` where it does not say.
        resource_config: `resourceconfig.json` as it is, instance groups included.
        input_data_config: `inputdataconfig.json` as it is.
        hyperparameters: all of them, each value decoded from JSON where it is JSON.
        channels: folder of each input channel, by name.
        entry: the script's name as the user gave it.
        kind: what kind of thing it is.
        script: absolute path of the user's script; of a module, of its package's folder.
        arguments: the script's arguments.
        code_dir: working directory of the script.
        is_submitted: whether the platform brought the code, and not the command line.
        policy_source: a preset's name, or a file.
        store: a directory, an s3:// URL or the word none; None where only the policy says.
    """

    job_name: str
    current_host: str
    hosts: tuple[str, ...]
    network_interface_name: str
    resource_config: Mapping[str, Any]
    input_data_config: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]
    channels: Mapping[str, Path]
    entry: str
    kind: EntryKind
    script: Path
    arguments: tuple[str, ...]
    code_dir: Path
    is_submitted: bool
    policy_source: str
    store: str | None
    paths: Paths = field(default_factory=lambda: Paths(BASE))

    @property
    def program(self) -> str:
        """What is run, as its interpreter takes it: a path seen from `code_dir`, or a module's name."""
        return self.entry.removesuffix(".py") if self.kind == "module" else self.entry

    @property
    def is_chief(self) -> bool:
        """Whether this host is the first in natural order."""
        return self.current_host == self.hosts[0]
