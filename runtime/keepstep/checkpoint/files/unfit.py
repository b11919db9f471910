"""What is said of a file that can not be a checkpoint, or not now."""

from __future__ import annotations

from pathlib import Path


class UnfitFile(Exception):
    """A file is not what a complete set needs; trying again is of use only once somebody has written it anew.

    Attributes:
        file: its name or path.
        found: what is there.
        wanted: what ought to be there.
    """

    def __init__(self, file: str | Path, found: str, wanted: str) -> None:
        super().__init__(f"{file}: {found}; wanted: {wanted}")
        self.file, self.found, self.wanted = str(file), found, wanted


class UncopiedFile(UnfitFile):
    """The copy of a set can not be made now: no room, no permission. Nothing is wrong with the set."""


class ChangingFile(UnfitFile):
    """A file is being written, or was changed or taken away under our hands: look at its folder again, and try then."""
