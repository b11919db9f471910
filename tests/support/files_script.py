"""A script without TensorFlow that writes TensorFlow's checkpoints: golden files under names with a number.

Args: the watched folder (`%h`: this host), the folder of golden files, the number of the last save, and what to do in
the end: `exit`, `sigterm` (wait for it and save once more), `die:4` (at that number), or `die:4:HOST`, where that host
waits for the others to have written all of theirs, and they for its death.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

NAME = "ckpt"


def newest(folder: Path) -> int:
    """The number of the newest save, as its state file tells it; 0 for none."""
    try:
        text = (folder / "checkpoint").read_text()
    except FileNotFoundError:
        return 0
    return int(text.partition('"')[2].partition('"')[0].rpartition("-")[2])


def save(folder: Path, golden: Path, number: int) -> None:
    """Write a set as TensorFlow does: under other names first, the state file last."""
    under_way = folder / f"{NAME}-{number}_temp"
    under_way.mkdir(parents=True, exist_ok=True)
    for path in sorted(golden.glob("ckpt-7.*")):
        part = under_way / f"part-00000-of-00001{path.suffix}"
        part.write_bytes(path.read_bytes())
        part.rename(folder / path.name.replace("ckpt-7", f"{NAME}-{number}"))
    under_way.rmdir()
    state = folder / "checkpoint.tmp0123456789abcdef0123456789abcdef"
    state.write_text(f'model_checkpoint_path: "{NAME}-{number}"\nall_model_checkpoint_paths: "{NAME}-{number}"\n')
    state.rename(folder / "checkpoint")
    print(f"saved {number}", flush=True)


def main() -> None:
    host = os.environ["SM_CURRENT_HOST"]
    folder, golden = Path(sys.argv[1].replace("%h", host)), Path(sys.argv[2])
    last, end = int(sys.argv[3]), sys.argv[4]
    folder.mkdir(parents=True, exist_ok=True)
    began = newest(folder)
    print(f"goes on from {began}", flush=True)
    for number in range(began + 1, last + 1):
        save(folder, golden, number)
        if end in (f"die:{number}", f"die:{number}:{host}"):
            while end.endswith(host) and not (golden.parent / "ready").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
    if end.startswith("die") and end.count(":") == 2 and began == 0:
        (golden.parent / "ready").touch()
        signal.pause()  # another host's script dies, and takes this one with it
    if end == "sigterm":
        signal.sigwait({signal.SIGTERM})
        save(folder, golden, last + 1)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
