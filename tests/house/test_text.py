"""What no file may say: an address that only one place can reach, or that something is still to be done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.source import ROOT, label, tracked

# Legal text and binary files say what they say; this file has to name what it looks for.
EXEMPT = {ROOT / "LICENSE", Path(__file__).resolve()}

FORBIDDEN = {
    "a package registry": (
        r"pypi\.org|pythonhosted\.org|deb\.debian\.org|archive\.ubuntu\.com|registry\.npmjs\.org|proxy\.golang\.org"
    ),
    "an index or a local file in a pinned list": r"--(extra-)?index-url|--find-links|\bfile:///",
    "a path of one machine": r"(?<![\w.\-/])/work/|(?<![\w.\-/])/root/\.pyenv",
    "something left to do": r"\b(TODO|FIXME|XXX)\b|(?i:\bnot (yet )?implemented\b)|\bNotImplementedError\b",
}


def texts() -> list[tuple[Path, str]]:
    found = []
    for path in tracked():
        if path in EXEMPT:
            continue
        content = path.read_bytes()
        if b"\0" not in content:
            found.append((path, content.decode("utf-8")))
    return found


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what):
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{label(path, number)} {line.strip()[:80]}"
        for path, text in texts()
        if pattern.search(text)
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a package registry", "curl https://pypi" + ".org/simple"),
        ("an index or a local file in a pinned list", "--index" + "-url=x"),
        ("a path of one machine", "cd /work" + "/main"),
        ("something left to do", "# TO" + "DO: later"),
        ("something left to do", "raise NotImplemented" + "Error"),
    ],
)
def test_the_patterns_find_what_they_are_for(what, line):
    assert re.search(FORBIDDEN[what], line)
