"""Makes store-v1 beside this file: a store as the first version of the formats left it. Not to be run again for it.

Two checkpoints of two ranks, and one of files that a script wrote itself; what stands in store-v1 stays as it is, and
later versions have to read it. A new version of a format gets a store of its own: change the name below.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from keepstep.adapters.store_directory import DirectoryStore
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.files.watched import Watched
from keepstep.checkpoint.filing.keeping import keep
from keepstep.checkpoint.keys import ManifestName
from tests.support.script_files import lay
from tests.support.stores import stored_checkpoint

WHERE = Path(__file__).with_name("store-v1")
CREATED_UNIX = 1_750_000_000


def main() -> None:
    if WHERE.exists():
        raise SystemExit(f"{WHERE} stands already: it is what must stay readable")
    store = DirectoryStore(WHERE)
    for generation, step in ((1, 10), (2, 20)):
        manifest = stored_checkpoint(store, ManifestName(generation, step, "run"), created_unix=CREATED_UNIX)
        commit(store, manifest, lambda: "0" * 32)
    with tempfile.TemporaryDirectory() as name:
        lay("managed", Path(name) / "checkpoints")
        watched = Watched(Path(name) / "checkpoints", Path(name) / "spool")
        keep(store, "job", watched.scan()[0], 2, "run", CREATED_UNIX)
    for unfinished in WHERE.glob(".*"):
        shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()


if __name__ == "__main__":
    main()
