"""What the hosts of a run write into their journals, as it comes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keepstep.app.replay import journals_under


class Journals:
    """The journals below a folder, read on from where they were left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: Counter[Path] = Counter()

    def news(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each host's new whole lines, with the host's name."""
        for path in journals_under(self._folder):
            with path.open("rb") as journal:
                journal.seek(self._read[path])
                lines = journal.read().split(b"\n")
            self._read[path] += sum(len(line) + 1 for line in lines[:-1])
            for line in lines[:-1]:
                yield path.parent.name, json.loads(line)
