"""Trust: the files by which a node proves to the others that it is of this job."""

from __future__ import annotations

from pathlib import Path

from keepstep.core.values import frozen


@frozen
class TlsFiles:
    """PEM files that only this user can read: the job's authority, this node's certificate and its key."""

    ca: Path
    cert: Path
    key: Path
