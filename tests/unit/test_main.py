"""Who gets which command line: init, which must load little, or the CLI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from keepstep import __main__, __version__, init
from keepstep.app import cli

HEAVY = {
    "asyncio",
    "subprocess",
    "logging",
    "dataclasses",
    "typing",
    "pathlib",
    "inspect",
    "pydantic",
    "yaml",
    "keepstep.app",
}


def test_every_command_of_the_cli_reaches_it():
    (choices,) = [action.choices for action in cli._parser()._actions if action.choices]
    assert set(choices) - {"train"} <= __main__.COMMANDS


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        ([], []),
        (["train"], []),
        (["train", "--lr", "3"], ["--lr", "3"]),
        (["train.py", "--lr", "3"], ["train.py", "--lr", "3"]),
        (["serve"], ["serve"]),
        (["--anything"], ["--anything"]),
    ],
)
def test_a_containers_command_goes_to_init(monkeypatch, words, passed_on):
    monkeypatch.setattr(init, "main", lambda argv: 40 + (argv == passed_on))
    assert __main__.main(words) == 41


def test_the_version_is_said(capsys):
    assert __main__.main(["--version"]) == 0
    assert capsys.readouterr().out == f"keepstep {__version__}\n"


def test_init_loads_no_more_than_it_needs():
    """What a module costs, init costs on every host for ever."""
    code = "import sys; from keepstep import __main__, init; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {sys.path}; {code}"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert "keepstep.init" in loaded
    assert HEAVY & set(loaded) == set()


def test_whoever_has_read_enough_of_it_is_not_told_of_that():
    """As `keepstep policy explain | head -1` does."""
    reading, writing = os.pipe()
    os.close(reading)
    code = f"import sys; sys.path[:0] = {sys.path}; from keepstep.app import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "policy", "explain", "default"]
    try:
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_an_interrupt_from_the_keyboard_is_one_line(monkeypatch, capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_parser", interrupted)
    assert cli.main(["checkpoint", "ls", "nowhere"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "keepstep: interrupted\n"
