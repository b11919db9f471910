"""What the watch over the script's own files reports; part of `events`."""

from __future__ import annotations

from typing import Literal

from keepstep.core.values import frozen


@frozen
class FilesCopied:
    """What the script wrote changed and is whole; a copy of it is this edition. `sets` name it for people."""

    edition: int
    sets: tuple[str, ...]
    kind: Literal["files_copied"] = "files_copied"


@frozen
class FilesSettled:
    """The folder was gone over for this mark; the newest edition is this one."""

    operation: str
    mark: int
    edition: int
    kind: Literal["files_settled"] = "files_settled"


@frozen
class FilesKept:
    """An edition is committed; `number` is that of the commit. What was there already was not uploaded again."""

    operation: str
    edition: int
    manifest: str
    number: int
    uploaded_bytes: int
    seconds: float
    kind: Literal["files_kept"] = "files_kept"


@frozen
class FilesPutBack:
    """The folder is right; how many sets were brought, and how many files moved aside."""

    operation: str
    generation: int
    edition: int
    brought: int
    aside: int
    kind: Literal["files_put_back"] = "files_put_back"


@frozen
class FilesStuck:
    """The folder can not be put right: no room, no permission."""

    operation: str
    detail: str
    kind: Literal["files_stuck"] = "files_stuck"
