"""What SDK v3's start script runs in the container in place of one of its own drivers: it becomes `keepstep train`.

Runs with the user's interpreter, and so needs nothing but the standard library.
"""

import json
import os
import sys
from pathlib import Path

CHANNEL = Path(__file__).resolve().parents[1]
"""The channel in which the SDK brings its drivers, this one, and what they are told."""


def main() -> None:
    told = json.loads((CHANNEL / "distributed.json").read_text())
    source = json.loads((CHANNEL / "sourcecode.json").read_text())
    words = [word for setting in told.get("settings") or () for word in ("--set", setting)]
    os.environ["SAGEMAKER_PROGRAM"] = source["entry_script"]
    try:
        os.execvp("keepstep", ["keepstep", "train", *words])
    except OSError as error:
        sys.exit(f"keepstep can not be started: {error}; wanted an image with keepstep in it, see docker/Dockerfile")


if __name__ == "__main__":
    main()
