"""What one node decides, event by event, told so that it can be read."""

from __future__ import annotations

import pytest

from tests.scenarios.transcript import FOLDER, play

TRANSCRIPTS = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_node_decides_as_told(path):
    told = path.read_text()
    assert play(told) == told
