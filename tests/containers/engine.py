"""A Docker Engine of the tests' own: a daemon with its own data, which leaves the machine's firewall alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from keepstep import kernel

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "containers"
"""Images live here from one run of the tests to the next."""

DEBIAN, BASE, IMAGE = "keepstep-debian:12", "keepstep-base", "keepstep"
HOROVOD_BASE, HOROVOD = "keepstep-horovod-base", "keepstep-horovod"
START_S = 60.0
_PID = KEPT / "engine.pid"
_SUITE = "bookworm"
_POLL_S = 0.05


class NoEngineError(Exception):
    """This machine lets nobody start a Docker Engine."""


class Engine:
    """Docker's command line, spoken to one daemon."""

    def __init__(self, socket: Path) -> None:
        self.environment = {**os.environ, "DOCKER_HOST": f"unix://{socket}", "DOCKER_BUILDKIT": "1"}

    def command(self, *words: str) -> list[str]:
        """The command line: Debian's own, which fits its daemon, whatever else is on PATH."""
        return ["/usr/bin/docker", *words]

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        done = subprocess.run(
            self.command(*words), env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert not check or done.returncode == 0, (
            f"docker {' '.join(words)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
        return done

    def ask(self, *words: str) -> str:
        """What one command prints."""
        return self.run(*words).stdout.strip()

    def build(
        self, dockerfile: str, tag: str, arguments: Mapping[str, str], secrets: Mapping[str, Path], *options: str
    ) -> None:
        """Build an image from the source tree; the network is the machine's own."""
        words = [word for item in arguments.items() for word in ("--build-arg", "=".join(item))]
        words += [word for name, path in secrets.items() for word in ("--secret", f"id={name},src={path}")]
        self.run("build", "--network", "host", "-f", str(ROOT / dockerfile), "-t", tag, *words, *options, str(ROOT))

    def has(self, image: str) -> bool:
        return self.run("image", "inspect", image, check=False).returncode == 0


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """Start the daemon, and stop it at the end with all that it runs.

    Raises:
        NoEngineError: it does not start.
    """
    KEPT.mkdir(parents=True, exist_ok=True)
    _end_former()
    with tempfile.TemporaryDirectory(prefix="engine-") as place:
        socket = Path(place) / "docker.sock"  # a path of a socket must be short
        words = [
            *("/usr/sbin/dockerd", "--host", f"unix://{socket}", "--pidfile", str(_PID)),
            *("--data-root", str(KEPT / "engine"), "--exec-root", f"{place}/exec"),
            *("--iptables=false", "--ip6tables=false"),
        ]
        with (KEPT / "engine.log").open("wb") as log:
            daemon = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            found = Engine(socket)
            _wait_until_it_answers(found, daemon)
            try:
                yield found
            finally:
                for container in found.ask("ps", "--quiet", "--all").split():
                    found.run("rm", "--force", "--volumes", container, check=False)
        finally:
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(30)
            for pid in kernel.family(kernel.processes(), [daemon.pid]):
                kernel.kill(pid)
            daemon.kill()
            daemon.wait(30)


def _end_former() -> None:
    """End a daemon that a run of the tests has left behind when it was killed: it holds the images."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(_PID.read_text())
        if b"dockerd" in Path(f"/proc/{pid}/cmdline").read_bytes():
            for each in (pid, *kernel.family(kernel.processes(), [pid])):
                kernel.kill(each)
            give_up = time.monotonic() + START_S
            while kernel.is_alive(pid) and time.monotonic() < give_up:
                time.sleep(_POLL_S)


def _wait_until_it_answers(found: Engine, daemon: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_S
    while found.run("version", check=False).returncode != 0:
        told = (KEPT / "engine.log").read_text(errors="replace")[-3000:]
        if daemon.poll() is not None:
            raise NoEngineError(f"dockerd has ended:\n{told}")
        assert time.monotonic() < give_up, f"dockerd does not answer:\n{told}"
        time.sleep(_POLL_S)


def make_debian(found: Engine) -> None:
    """Debian as an image, from its own packages."""
    if found.has(DEBIAN):
        return
    root = KEPT / "debian"
    shutil.rmtree(root, ignore_errors=True)
    words = ["debootstrap", "--variant=minbase", "--include=ca-certificates", _SUITE, str(root)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"debootstrap has failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    archive = KEPT / "debian.tar"
    subprocess.run(["tar", "--numeric-owner", "-C", str(root), "-cf", str(archive), "."], check=True)
    found.run("import", str(archive), DEBIAN)
    archive.unlink()
    shutil.rmtree(root)


def secrets() -> dict[str, Path]:
    """What this machine's own pip needs to know, as `docker build` is to be told it."""
    settings = (os.environ.get("PIP_CONFIG_FILE", ""), str(Path.home() / ".config/pip/pip.conf"), "/etc/pip.conf")
    named = {"pip": settings, "ca": (os.environ.get("SSL_CERT_FILE", ""),)}
    found = {name: [Path(each) for each in paths if Path(each).is_file()] for name, paths in named.items()}
    return {name: paths[0] for name, paths in found.items() if paths}


def images(found: Engine, told: Sequence[str] = ()) -> None:
    """Build the project's image, and what it stands on."""
    make_debian(found)
    found.build("tests/containers/base.Dockerfile", BASE, {}, secrets())
    found.build("docker/Dockerfile", IMAGE, {"BASE": BASE, "DEBIAN": DEBIAN}, secrets(), *told)


def horovod_images(found: Engine) -> None:
    """The project's image once more, on one with Horovod."""
    found.build("tests/containers/horovod.Dockerfile", HOROVOD_BASE, {}, secrets())
    found.build("docker/Dockerfile", HOROVOD, {"BASE": HOROVOD_BASE, "DEBIAN": DEBIAN}, secrets())
