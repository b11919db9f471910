"""A chief's interpreter ends, whoever holds what its coordinator would wait for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys, threading, types
sys.path.insert(0, {runtime!r})
from keepstep_worker import coordinator

def hold(lock, taken):
    with lock:
        taken.set()
        threading.Event().wait()

class ClusterCoordinator:
    def __init__(self):
        self.lock, taken = threading.Lock(), threading.Event()
        threading.Thread(target=hold, args=(self.lock, taken), daemon=True).start()
        taken.wait()

    def __del__(self):
        print("stops", flush=True)
        self.lock.acquire({wait})

module = types.SimpleNamespace(ClusterCoordinator=ClusterCoordinator)
if {mended}:
    coordinator.install(module)
made = ClusterCoordinator()
{body}
print("done", flush=True)
"""


GARBAGE = "import gc\ngc.disable()\nmade.itself = made\ndel made"
"""As an exception's traceback leaves it: what is collected when the interpreter ends, and not before."""


def run(mended: bool, wait: bool, body: str = "") -> str:
    script = SCRIPT.format(runtime=str(ROOT / "runtime"), mended=mended, wait=wait, body=body)
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode() + "hangs"
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(90)
def test_a_coordinator_is_left_alone_when_the_interpreter_ends() -> None:
    assert run(mended=True, wait=True, body=GARBAGE) == "done\n"


def test_before_that_it_stops_as_ever() -> None:
    assert run(mended=True, wait=False, body="del made") == "stops\ndone\n"


def test_a_tensorflow_without_one_is_left_alone() -> None:
    script = (
        f"import sys, types\nsys.path.insert(0, {str(ROOT / 'runtime')!r})\nfrom keepstep_worker import coordinator\n"
    )
    for module in ("types.SimpleNamespace()", "types.SimpleNamespace(ClusterCoordinator=int)"):
        script += f"coordinator.install({module})\n"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=20)
