"""docker/compose.yaml for real: three hosts, S3 and Prometheus, each as an image that can be built everywhere.

Grafana can not: what its panels ask is asked here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from tests.containers import engine as engines
from tests.containers.engine import IMAGE, ROOT, Engine
from tests.containers.jobs import DEADLINE_S, SCRIPTS
from tests.support.dashboard import expressions

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

HOSTS = ("algo-1", "algo-2", "algo-3")
BESIDE = {"s3": "keepstep-s3", "prometheus": "keepstep-prometheus"}
GATES = {30: "/opt/ml/model/first", 60: "/opt/ml/model/second"}
"""Where the script waits, within a step: for the restart, and for Prometheus to have seen training go on."""

STEPS = 80
STEPS_PER_EPOCH = 1280 // 96  # of the script that is trained by default
ONES = dict.fromkeys(HOSTS, 1.0)
KILL = 'kill -9 $(grep -l "[k]eepstep_worker" /proc/[0-9]*/cmdline | cut -d/ -f3)'
"""As the README has it: without pkill, which not every image has, and without a word that the shell itself matches."""

OF_SOME_HOSTS = ("cpu_throttled", "waited", "memory_limit", "disk_errors", "fabric", "temperature", "thermal_slowdowns")
NOTHING_TO_SHOW = ("keepstep_gpu", "keepstep_script_metric", *(f"keepstep_host_{name}" for name in OF_SOME_HOSTS))
"""There is no GPU, the script reports no numbers, and not every kernel tells as much of a host."""

_POLL_S = 0.2
_T = TypeVar("_T")


class Played:
    """What compose has brought up."""

    def __init__(self, engine: Engine, environment: Mapping[str, str]) -> None:
        self.engine = engine
        self._environment = {**engine.environment, **environment}
        self._ids: dict[str, str] = {}

    def compose(self, *words: str) -> str:
        """Run Debian's docker-compose to its end; gives what it prints."""
        command = ["/usr/bin/docker-compose", "-p", "keepstep-played", "-f", str(ROOT / "docker" / "compose.yaml")]
        done = subprocess.run(
            [*command, *words], env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, f"compose {' '.join(words)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def container(self, service: str) -> str:
        """Its id, asked for once: docker-compose takes a second to say so, and the hosts need the processors."""
        if service not in self._ids:
            self._ids[service] = self.compose("ps", "-q", service).strip()
        return self._ids[service]

    def address(self, service: str) -> str:
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self.engine.ask("inspect", "--format", form, self.container(service))

    def running(self) -> bool:
        """Whether all hosts are."""
        form = "{{.State.Running}}"
        return "false" not in self.engine.ask("inspect", "--format", form, *map(self.container, HOSTS))

    def told(self) -> str:
        """The last lines of all hosts."""
        return self.compose("logs", "--no-color", "--tail", "200", *HOSTS)

    def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        """What Prometheus answers: labels and value of each series."""
        url = f"http://{self.address('prometheus')}:9090/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever this machine's proxy is
        try:
            with opener.open(url, timeout=10) as answer:
                found = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from None
        return [(series["metric"], float(series["value"][1])) for series in found]

    def by_host(self, query: str) -> dict[str, float]:
        return {labels["host"]: value for labels, value in self.ask(query)}

    def wait_for(self, look: Callable[[], _T | None], what: str) -> _T:
        """Wait until `look` gives something; fails where a host has ended before, or nothing comes."""
        give_up = time.monotonic() + DEADLINE_S
        while True:
            running = self.running()
            with contextlib.suppress(urllib.error.URLError, ConnectionError):  # who is to answer may be starting
                if found := look():
                    return found
            assert running, f"a host has ended before {what}:\n{self.told()}"
            assert time.monotonic() < give_up, f"no {what}:\n{self.told()}"
            time.sleep(_POLL_S)

    def wait(self) -> dict[str, int]:
        """The exit code of each host, once all have ended."""
        words = self.engine.command("wait", *map(self.container, HOSTS))
        try:
            done = subprocess.run(
                words, env=self.engine.environment, capture_output=True, text=True, timeout=DEADLINE_S
            )
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.told()}") from None
        return dict(zip(HOSTS, map(int, done.stdout.split()), strict=True))


@pytest.fixture(scope="module")
def beside(engine: Engine) -> Engine:
    """The engine, with what else it takes."""
    for target, tag in BESIDE.items():
        engine.build("tests/containers/beside.Dockerfile", tag, {}, engines.secrets(), "--target", target)
    return engine


@contextlib.contextmanager
def played(engine: Engine, environment: Mapping[str, str]) -> Iterator[Played]:
    """Bring all but Grafana up, on ports that are free, and take it down again."""
    images = {"KEEPSTEP_IMAGE": IMAGE, "MOTO_IMAGE": BESIDE["s3"], "PROMETHEUS_IMAGE": BESIDE["prometheus"]}
    own = {"PATH": f"/usr/bin:{os.environ['PATH']}", "S3_PORT": "0", "PROMETHEUS_PORT": "0"}
    found = Played(engine, {**images, **own, **environment})
    try:
        found.compose("up", "--detach", *HOSTS, "prometheus")
        yield found
    finally:
        found.compose("down", "--volumes", "--timeout", "0")


def write_hyperparameters(path: Path, **values: object) -> str:
    """A file of them as the platform writes it, or written anew; gives its path."""
    path.write_text(json.dumps({name: json.dumps(value) for name, value in values.items()}))
    return str(path)


def code_of(folder: Path, place: Path, policy: str) -> dict[str, str]:
    """A folder of code with a policy of its own in it; gives what compose is to be told of them."""
    code = Path(shutil.copytree(folder, place / "code", ignore=shutil.ignore_patterns("__pycache__")))
    (code / "policy.yaml").write_text(f"version: 1\n{policy}\n")
    return {"CODE": str(code), "KEEPSTEP_POLICY": "/opt/ml/code/policy.yaml"}


def kill_a_worker(job: Played) -> None:
    """As the README has it; returns when Prometheus knows of the restart."""
    assert job.by_host("sum by (host) (keepstep_restarts_total)") == dict.fromkeys(HOSTS, 0.0)
    assert KILL in (ROOT / "docker" / "README.md").read_text()
    job.compose("exec", "-T", "algo-2", "sh", "-c", KILL)
    job.wait_for(lambda: job.by_host('keepstep_restarts_total{cause="killed"}') == ONES, "restart")


def see_it_recovered(job: Played) -> None:
    """Returns when Prometheus knows that a step was completed after the restart."""
    job.wait_for(lambda: job.by_host("keepstep_recovery_seconds_count{phase='total'}") == ONES, "recovery")


def test_prometheus_sees_a_worker_killed_and_the_job_end_well(beside: Engine, tmp_path: Path) -> None:
    gate = ",".join(f"{step}:{path}" for step, path in GATES.items())
    given = write_hyperparameters(
        tmp_path / "given.json", sagemaker_program="loop.py", out="/opt/ml/model", steps=STEPS, gate=gate
    )
    policy = "hang: {deadline: off}\ncheckpoint: {snapshot_every: 1 steps}"  # who waits at a gate hangs
    code = code_of(SCRIPTS, tmp_path, policy)
    with played(beside, {**code, "HYPERPARAMETERS": given}) as job:

        def let_pass(step: int) -> None:
            for host in HOSTS:
                job.compose("exec", "-T", host, "touch", GATES[step])

        job.wait_for(lambda: job.by_host('up{job="keepstep"}') == ONES, "agent on each host")
        job.wait_for(lambda: job.by_host("keepstep_step") == dict.fromkeys(HOSTS, 29.0), "all hosts at the gate")
        kill_a_worker(job)
        let_pass(30)  # going on from step 29, none completes a step before
        see_it_recovered(job)
        let_pass(60)
        assert job.wait() == dict.fromkeys(HOSTS, 0), job.told()
        assert f"checkpoint committed: step {STEPS}" in job.told()
        assert job.by_host("sum by (host) (max_over_time(keepstep_restarts_total[10m]))") == ONES


@pytest.mark.skipif(not os.environ.get("KEEPSTEP_TEST_ALL"), reason="takes minutes: KEEPSTEP_TEST_ALL=1 has it")
def test_every_panel_is_answered_and_a_job_that_was_stopped_goes_on(beside: Engine, tmp_path: Path) -> None:
    """The script that it trains by default; it would go on for hours, is stopped, and then is told to be done soon."""
    path = tmp_path / "given.json"
    default = json.loads((ROOT / "docker" / "job" / "hyperparameters.json").read_text())
    job_of = {name: json.loads(value) for name, value in default.items()}
    given = write_hyperparameters(path, **{**job_of, "epochs": 1_000_000})
    code = code_of(ROOT / "examples", tmp_path, "checkpoint: {every: 5s}")
    with played(beside, {**code, "HYPERPARAMETERS": given}) as job:
        job.wait_for(lambda: set(job.by_host("keepstep_durable_step > 0")) == set(HOSTS), "checkpoint")
        kill_a_worker(job)
        see_it_recovered(job)
        for title, expression in expressions():
            if not any(name in expression for name in NOTHING_TO_SHOW):
                asked = expression.replace("$__range", "5m")
                job.wait_for(partial(job.ask, asked), f"answer for {title}: {asked}")
        job.compose("stop", *HOSTS)
        assert job.wait() == dict.fromkeys(HOSTS, 143), job.told()
        reached = max(map(int, re.findall(r"checkpoint committed: step (\d+)", job.told())))
        write_hyperparameters(path, **{**job_of, "epochs": reached // STEPS_PER_EPOCH + 2})
        job.compose("up", "--detach", *HOSTS)
        assert job.wait() == dict.fromkeys(HOSTS, 0), job.told()
        assert f"at step {reached}" in job.told()
        assert "final_accuracy=" in job.told()
