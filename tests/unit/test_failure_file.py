"""The failure file: what the platform shows of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.app.places import FAILURE_BYTES_MAX, write_failure

HINT = "\nhint: see to it"


@pytest.mark.parametrize("said", ["short", "x" * 5000, "ü" * 700, "one\nhint: two" + "x" * 2000])
def test_a_long_message_leaves_room_for_the_hint(tmp_path: Path, said: str) -> None:
    path = tmp_path / "output" / "failure"
    write_failure(path, said + HINT)
    shown = path.read_text()
    assert len(shown.encode()) <= FAILURE_BYTES_MAX
    assert shown.endswith(HINT)
    assert said.startswith(shown.removesuffix(HINT))
    assert said == "short" or len(shown.encode()) >= FAILURE_BYTES_MAX - 1


def test_what_has_no_hint_is_cut_at_its_end(tmp_path: Path) -> None:
    write_failure(tmp_path / "failure", "x" * 5000)
    assert (tmp_path / "failure").read_text() == "x" * FAILURE_BYTES_MAX
