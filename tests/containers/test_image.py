"""The image itself: what it adds to the user's, and what it must not hold."""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path

import pytest

from keepstep import __version__
from tests.containers import engine as engines
from tests.containers.engine import BASE, DEBIAN, IMAGE, Engine

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

ADDED_BYTES_MAX = 200 << 20
"""The agent's environment with boto3, awscrt, cryptography and pydantic, and etcd."""


def test_it_stays_small(engine: Engine) -> None:
    sizes = {name: int(engine.ask("image", "inspect", "--format", "{{.Size}}", name)) for name in (BASE, IMAGE)}
    added = sizes[IMAGE] - sizes[BASE]
    print(f"image: {added / 1e6:.0f} MB over its base of {sizes[BASE] / 1e6:.0f} MB")
    assert 0 < added < ADDED_BYTES_MAX


def test_what_the_builder_is_told_in_confidence_stays_in_no_layer(engine: Engine, tmp_path: Path) -> None:
    """Both secrets carry a mark of their own; neither history nor any file of any layer has it."""
    mark = f"confidential-{uuid.uuid4().hex}"
    secrets = {}
    for name, path in engines.secrets().items():
        secrets[name] = tmp_path / name
        secrets[name].write_text(f"{path.read_text()}\n# {mark}\n")
    secrets |= {name: tmp_path / name for name in ("pip", "ca", "apt") if name not in secrets}
    for path in secrets.values():
        if not path.exists():
            path.write_text(f"# {mark}\n" if path.name != "apt" else f"// {mark}\n")
    if not engines.secrets().get("ca"):
        del secrets["ca"]  # an authority of nothing but a comment would let no download through
    arguments = {"BASE": BASE, "DEBIAN": DEBIAN}
    engine.build("docker/Dockerfile", "keepstep-confidential", arguments, secrets, "--no-cache")
    assert mark not in engine.ask("history", "--no-trunc", "keepstep-confidential")
    words = engine.command("save", "keepstep-confidential")
    with subprocess.Popen(words, env=engine.environment, stdout=subprocess.PIPE) as saved:
        found = subprocess.run(["grep", "--text", "--count", mark], stdin=saved.stdout, capture_output=True, text=True)
    assert saved.returncode == 0
    assert found.stdout.strip() == "0"
    engine.run("image", "rm", "keepstep-confidential")


def test_it_says_what_it_is_and_starts_nothing_by_a_shell(engine: Engine) -> None:
    config = json.loads(engine.ask("image", "inspect", "--format", "{{json .Config}}", IMAGE))
    assert config["Entrypoint"] == ["/opt/keepstep/entrypoints/train"]
    assert not config["Cmd"]
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config["Labels"]["org.opencontainers.image.title"] == "keepstep"
    assert config["Labels"]["org.opencontainers.image.version"] == __version__


def test_it_is_not_healthy_without_an_agent(engine: Engine) -> None:
    done = engine.run("run", "--rm", "--entrypoint", "/opt/keepstep/entrypoints/healthcheck", IMAGE, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "no agent has started here")


def test_the_users_interpreter_is_as_it_was(engine: Engine) -> None:
    listed = [engine.ask("run", "--rm", "--entrypoint", "pip", name, "freeze") for name in (BASE, IMAGE)]
    assert listed[0] == listed[1]
