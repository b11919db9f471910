"""Training jobs in containers, as the platform runs them: one per host, the contract under /opt/ml, `train`."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from keepstep.adapters.journal import read_lines
from tests.containers.engine import IMAGE, ROOT, Engine

GATE = "/opt/ml/model/gate"
"""Where a script that was given it as `gate` waits, so that no quick machine is done before something befalls it."""

SCRIPTS = ROOT / "tests" / "e2e" / "jobs"
DEADLINE_S = 180.0
"""No job of the tests comes near it unless it hangs, on a busy machine neither."""

_POLL_S = 0.1
_T = TypeVar("_T")


@dataclass(frozen=True)
class Cluster:
    """What jobs have in common: an engine, a network, a store's address on it, and who may use that store."""

    engine: Engine
    network: str
    endpoint: str
    credentials: Mapping[str, str]


@dataclass
class Job:
    """A job of some hosts, each a container.

    Attributes:
        folder: holds each host's /opt/ml.
        script: file in tests/e2e/jobs; all files there are the job's code.
        hyperparameters: beside those that name the script and its output.
        environment: beside the store's credentials.
        options: of `docker run`.
        words: what the image is started with.
        groups: the hosts of each instance group, if there are any.
    """

    cluster: Cluster
    folder: Path
    script: str
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[str] = ("algo-1", "algo-2")
    options: Sequence[str] = ()
    words: Sequence[str] = ("train",)
    owner: int = 0
    image: str = IMAGE
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Job:
        """Start every host."""
        mark = uuid.uuid4().hex[:8]
        for host in self.hosts:
            self._fill(host)
        for host in self.hosts:
            self._names[host] = f"{host}-{mark}"
            self.cluster.engine.run("run", "--detach", *self._run_words(host), self.image, *self.words)
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.engine.run("rm", "--force", "--volumes", *self._names.values(), check=False)

    def _run_words(self, host: str) -> list[str]:
        platforms = {"TRAINING_JOB_NAME": "digits", "AWS_REGION": self.cluster.credentials["AWS_DEFAULT_REGION"]}
        theirs = {**self.cluster.credentials, "AWS_ENDPOINT_URL": self.cluster.endpoint}
        environment = {**platforms, **theirs, **self.environment}
        return [
            *("--name", self._names[host], "--hostname", host),
            *("--network", self.cluster.network, "--network-alias", host),
            *("--volume", f"{self.base(host)}:/opt/ml"),
            *(word for item in environment.items() for word in ("--env", "=".join(item))),
            *self.options,
        ]

    def _fill(self, host: str) -> None:
        """Put in what the platform would."""
        base = self.base(host)
        documents = {
            "resourceconfig": {
                **{"current_host": host, "hosts": list(self.hosts), "network_interface_name": "eth0"},
                **self._described(host),
            },
            "hyperparameters": {
                "sagemaker_program": json.dumps(self.script),
                "out": json.dumps("/opt/ml/model"),
                **{name: json.dumps(value) for name, value in self.hyperparameters.items()},
            },
            "inputdataconfig": {},
        }
        for folder in ("input/config", "model", "output"):
            (base / folder).mkdir(parents=True)
        for name, content in documents.items():
            (base / "input" / "config" / f"{name}.json").write_text(json.dumps(content))
        shutil.copytree(SCRIPTS, base / "code", ignore=shutil.ignore_patterns("__pycache__"))
        if self.owner:
            for path in (base, *base.rglob("*")):
                shutil.chown(path, self.owner, self.owner)

    def _described(self, host: str) -> dict[str, Any]:
        """The instance groups, as the platform tells a host of them."""
        kind = "ml.c5.xlarge"
        own = [name for name, hosts in self.groups.items() if host in hosts]
        listed = [
            {"instance_group_name": name, "instance_type": kind, "hosts": list(hosts)}
            for name, hosts in self.groups.items()
        ]
        found = {"current_instance_type": kind, "instance_groups": listed, "current_group_name": "".join(own)}
        return found if listed else {}

    # --- what is done to it ------------------------------------------------------------------------------------------

    def inside(self, host: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in a host's container."""
        return self.cluster.engine.run("exec", self._names[host], *words, check=check)

    def kill_worker(self, host: str) -> None:
        """SIGKILL to the worker that was started last on a host."""
        kill_worker_in(self.cluster.engine, self._names[host], self.base(host))

    def open_gate(self) -> None:
        """Let all ranks pass the gate that they were given."""
        for host in self.hosts:
            self.inside(host, "touch", GATE)

    def stop(self, seconds: int) -> None:
        """Have the platform stop all hosts: SIGTERM, and SIGKILL after so many seconds."""
        self.cluster.engine.run("stop", "--time", str(seconds), *self._names.values())

    def wait(self) -> dict[str, int]:
        """The exit code of each host, once all have ended."""
        words = self.cluster.engine.command("wait", *self._names.values())
        try:
            done = subprocess.run(
                words, env=self.cluster.engine.environment, capture_output=True, text=True, timeout=DEADLINE_S
            )
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.told()}") from None
        return dict(zip(self._names, map(int, done.stdout.split()), strict=True))

    def wait_for(self, look: Callable[[], _T | None], what: str) -> _T:
        """Wait until `look` gives something; fails where a host has ended before, or nothing comes."""
        give_up = time.monotonic() + DEADLINE_S
        while True:
            ended = len(self.cluster.engine.ask("ps", "--quiet", "--filter", "name=^algo-").split()) < len(self.hosts)
            found = look()
            if found:
                return found
            assert not ended, f"a host has ended before {what}:\n{self.told()}"
            assert time.monotonic() < give_up, f"no {what}:\n{self.told()}"
            time.sleep(_POLL_S)

    # --- what it says and leaves -------------------------------------------------------------------------------------

    def base(self, host: str) -> Path:
        """What /opt/ml is on that host."""
        return self.folder / host

    def log(self, host: str) -> str:
        done = self.cluster.engine.run("logs", self._names[host])
        return done.stdout + done.stderr

    def told(self) -> str:
        """The last lines of all hosts."""
        return "\n".join(f"--- {host}\n" + "\n".join(self.log(host).splitlines()[-40:]) for host in self.hosts)

    def events(self, host: str) -> list[dict[str, Any]]:
        """What this host's agents have heard so far."""
        return read_events(self.base(host))

    def reasons(self, host: str) -> list[str]:
        """The reasons of all decisions so far."""
        return [reason for line in read_journal(self.base(host)) for reason, _ in line.get("notes", ())]

    def completed(self, host: str) -> int:
        """The newest step that a host's workers have completed."""
        return max((event.get("completed", 0) for event in self.events(host)), default=0)

    def failure(self, host: str) -> str:
        path = self.base(host) / "output" / "failure"
        return path.read_text() if path.exists() else ""


def read_journal(base: Path) -> list[dict[str, Any]]:
    """All lines that a host's agents have written so far; `base` is its /opt/ml."""
    paths = sorted(base.glob("output/data/keepstep/*/journal*.jsonl"))
    return [line for path in paths for _, line in read_lines(path)]


def read_events(base: Path) -> list[dict[str, Any]]:
    """What a host's agents have heard so far."""
    return [line["event"] for line in read_journal(base) if "event" in line]


def kill_worker_in(engine: Engine, container: str, base: Path) -> None:
    """SIGKILL to the worker that was started last in a container, whose /opt/ml is `base`."""
    started = [event for event in read_events(base) if event["kind"] == "worker_started"]
    engine.run("exec", container, "sh", "-c", f"kill -9 {started[-1]['pid']}")
