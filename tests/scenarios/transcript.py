"""A transcript is a text: what it shows, the stage, and commands, each followed by what the node thought of it.

    # A worker dies and training goes on from the slabs.
    stage hosts=2 restart.budget="8 per 1h"

    > trains 8
        0.00 agent_started -> lease_wanted => grant lease 5.0
        ...

`python -m tests.scenarios.transcript` writes the answers anew: read what has changed before you keep it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.scenarios.stage import Stage

FOLDER = Path(__file__).with_name("transcripts")


def play(text: str) -> str:
    """The transcript with its answers as they are now."""
    stage, told = None, []
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        told.append(line)
        if line.startswith("stage"):
            stage = build(shlex.split(line)[1:])
        elif line.startswith("> "):
            assert stage is not None, "a transcript sets its stage before the first command"
            perform(stage, shlex.split(line[2:]))
            told += [f"    {answer}" for answer in stage.lines]
            stage.lines.clear()
    if stage is not None:
        told.append(f"    exit code {stage.state.exit_code}" if stage.state.exit_code is not None else "    goes on")
    return "\n".join(told) + "\n"


def build(settings: list[str]) -> Stage:
    values = dict(setting.split("=", 1) for setting in settings)
    hosts, store, peer = values.pop("hosts", "2"), values.pop("store", "yes"), values.pop("peer", "algo-2")
    feeder = values.pop("feeder", "")
    return Stage(int(hosts), store == "yes", tuple(f"{key}={value}" for key, value in values.items()), peer, feeder)


def perform(stage: Stage, words: list[str]) -> None:
    name, *values = words
    getattr(stage, "peer_" if name == "peer" else name)(*values)


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text(play(path.read_text()))
