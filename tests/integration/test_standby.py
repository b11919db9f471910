"""A script sees, says and returns what it does under plain Python, whatever its process did before: a standby has made
its imports, a forerunner began before its world was known.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep import kernel
from keepstep.init import FORWARDED
from keepstep_worker import wire as wires
from tests.support.fake_agent import DEADLINE_S, FakeAgent
from tests.support.scripts import SCRIPTS

pytestmark = pytest.mark.integration
RUNTIME = str(Path(wires.__file__).parent.parent)

MORE_SCRIPTS = {
    "arguments": "import argparse\np = argparse.ArgumentParser()\np.add_argument('--epochs', type=int)\n"
    "p.add_argument('-m')\nprint(p.parse_args(), p.prog)",
    "wrong arguments": "import argparse\nargparse.ArgumentParser().parse_args()",
    "relative files": "import os\nprint(open('data.txt').read(), os.getcwd(), os.listdir())",
    "beside": "import beside\nprint(beside.__file__)",
    "fork": "import multiprocessing as mp, os\ndef f(x):\n    return x + 1\n"
    "with mp.get_context('fork').Pool(1) as p:\n    print(p.map(f, [1]))",
    "threads at exit": "import threading\ngate = threading.Event()\n"
    "threading.Thread(target=lambda: (gate.wait(), print('thread'))).start()\nprint('end')\ngate.set()",
    "signals": "import os, signal\nprint([(n.name, signal.getsignal(n)) for n in signal.Signals])\n"
    "signal.signal(signal.SIGTERM, lambda *a: print('term', a[0]))\n"
    "os.kill(os.getpid(), signal.SIGTERM)\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "descriptors": "import os\nprint(sorted(os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in range(3)))",
    "streams": "import sys\nprint(sys.stdin.read(), sys.stdout.line_buffering, sys.stdout.encoding)",
    "flags": "import gc, sys\nprint(sys.flags, sys.warnoptions, sys.executable, gc.isenabled(), gc.get_threshold())",
    "scheduler": "import os\nprint(os.sched_getscheduler(0), os.getpriority(0, 0), os.sched_getaffinity(0))",
    "import": "import tensorflow\nprint(tensorflow.value, tensorflow.__spec__.name, tensorflow.__spec__.origin,\n"
    "      type(tensorflow.__loader__).__name__, type(tensorflow.__spec__.loader).__name__)",
    "not yet imported": "import sys\nprint([n for n in sys.modules if n in ('tensorflow', 'keras', 'tf_keras')])",
    "looked up": "import importlib.util as u\nfound = u.find_spec('tensorflow')\nprint(found.origin, found.name,\n"
    "      found.submodule_search_locations)\nimport tensorflow\nprint(tensorflow.count)",
    "submodule": "from tensorflow.part import number\nimport tensorflow.part as part\nprint(number, part.__file__)",
    "set by an import": "import os\nprint(os.environ.get('BEHAVIOR'))\nimport tensorflow\n"
    "print(os.environ['BEHAVIOR'])",
    "lazily": "def f():\n    import tensorflow as tf\n    return tf.value\nprint(f(), f())",
    "settings": "import os\nos.environ['TF_MODE'] = 'script'\nimport tensorflow as t\n"
    "print(t.mode, os.environ['TF_MODE'])",
}


@pytest.fixture
def agent():
    made = FakeAgent()
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path):
    """What the script finds: a module beside it, a file, and a package that stands for TensorFlow."""
    package = tmp_path / "site" / "tensorflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import os\nos.environ['BEHAVIOR'] = '2'\nfrom tensorflow.part import number\nvalue = number + 1\n"
        "mode = os.environ.get('TF_MODE', 'unset')\n"
        "count = globals().get('count', 0) + 1\n"
    )
    (package / "part.py").write_text("number = 1")
    work = tmp_path / "work"
    work.mkdir()
    (work / "beside.py").write_text("here = 1")
    (work / "data.txt").write_text("data")
    return work


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": f"{RUNTIME}:{folder.parent / 'site'}"}


def plainly(folder: Path, *command: str) -> tuple[int, bytes, bytes]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=environment(folder), capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


class Waiting:
    """A process that waits to be told which worker it is.

    Args:
        variable: names its end of the socket.
    """

    def __init__(self, agent: FakeAgent, folder: Path, variable: str, *words: str, **settings: str) -> None:
        self.agent, self.folder = agent, folder
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(DEADLINE_S)
        own = {variable: str(theirs.fileno()), "KEEPSTEP_PARENT_PID": str(os.getpid())}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "keepstep_worker", *words],
                cwd=folder, env=environment(folder) | own | settings, pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip

    def ready(self) -> dict[str, object]:
        return json.loads(self.ours.recv(65536))

    def becomes(self, *command: str, **more: str) -> tuple[int, bytes, bytes]:
        """Runs a script as the next worker, to its end."""
        endpoint = self.agent.connect()
        given = environment(self.folder) | self.agent.environment(endpoint, **more)
        worker = {"command": [sys.executable, "-m", "keepstep_worker", *command], "environment": given}
        with os.fdopen(os.memfd_create("worker"), "w+b") as file, endpoint, self.ours:
            file.write(json.dumps(worker).encode())
            file.flush()
            file.seek(0)
            send(self.ours, b"{}", self.agent.wire_fd, endpoint.fileno(), file.fileno())
            endpoint.close()
            return self.ends()

    def hung_up_on(self) -> tuple[int, bytes, bytes]:
        """Its end where the agent wants nothing of it any more."""
        self.ours.close()
        return self.ends()

    def ends(self) -> tuple[int, bytes, bytes]:
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output, errors


def send(endpoint: socket.socket, packet: bytes, *fds: int) -> None:
    endpoint.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


class Standby(Waiting):
    """A standby in a process of its own."""

    def __init__(self, agent: FakeAgent, folder: Path, **settings: str) -> None:
        super().__init__(agent, folder, "KEEPSTEP_STANDBY_FD", "tensorflow", **settings)


class Copy(Waiting):
    """A standby that a fork server has made: a child of this process, which stands in for the agent."""

    def __init__(self, server: Standby) -> None:
        self.agent, self.folder = server.agent, server.folder
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(DEADLINE_S)
        pipes = [os.pipe(), os.pipe()]
        self.outputs = [os.fdopen(read, "rb") for read, _ in pipes]
        with theirs:
            send(server.ours, b'{"kind": "fork"}', theirs.fileno(), *(write for _, write in pipes))
        for _, write in pipes:
            os.close(write)
        self.pid = 0

    def ready(self) -> dict[str, object]:
        told = super().ready()
        self.pid = told["pid"]
        return told

    def ends(self) -> tuple[int, bytes, bytes]:
        output, errors = (each.read() for each in self.outputs)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        for each in self.outputs:
            each.close()
        return code, output, errors


@pytest.fixture
def subreaper():
    kernel.become_subreaper()
    yield
    kernel.become_subreaper(becomes=False)


def forerunner(agent: FakeAgent, folder: Path, *command: str) -> Waiting:
    """A process that is begun as an agent begins it: before it listens to any signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        return Waiting(agent, folder, "KEEPSTEP_FORERUNNER_FD", *command)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


COMMAND = ("script.py", "--epochs", "3", "-m", "x y")


def write_script(folder: Path, name: str) -> None:
    text = {**SCRIPTS, **MORE_SCRIPTS}[name]
    (folder / "script.py").write_text(text, encoding="latin-1" if name == "encoding" else None)


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE_SCRIPTS])
def test_a_forerunner_runs_a_script_as_plain_python_does(agent, folder, name):
    write_script(folder, name)
    process = forerunner(agent, folder, *COMMAND)
    assert process.becomes(*COMMAND) == plainly(folder, *COMMAND)


def test_a_forerunner_ends_where_the_agent_hangs_up(agent, folder):
    process = forerunner(agent, folder, *COMMAND)
    assert process.hung_up_on() == (0, b"", b"")


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE_SCRIPTS])
def test_a_script_is_run_as_under_plain_python(agent, folder, name):
    write_script(folder, name)
    settings = {"TF_MODE": "script"} if name == "settings" else {}
    standby = Standby(agent, folder, **settings)
    assert standby.ready() == {
        "kind": "ready", "files": {"tensorflow": str(folder.parent / "site" / "tensorflow" / "__init__.py")},
        "can_fork": True,
    }  # fmt: skip
    assert standby.becomes(*COMMAND) == plainly(folder, *COMMAND)
    assert agent.of("unfit") == []


def test_it_may_be_told_before_it_is_ready(agent, folder):
    (folder / "script.py").write_text("import tensorflow\nprint(tensorflow.value)")
    assert Standby(agent, folder).becomes("script.py") == (0, b"2\n", b"")


def test_a_worker_tells_what_it_imports_and_what_it_has_set_by_then(agent, folder):
    (folder / "script.py").write_text(
        "import os\nos.environ['TF_MODE'] = 'script'\nos.environ['SECRET'] = 'x'\ndel os.environ['CUDA_CACHE']\n"
        "import tensorflow\nos.environ['TF_LATER'] = '1'\n"
    )
    endpoint = agent.connect()
    with endpoint:
        worker = subprocess.run(
            [sys.executable, "-m", "keepstep_worker", "script.py"],
            cwd=folder, env=environment(folder) | agent.environment(endpoint, CUDA_CACHE="1", TF_KEPT="1"),
            pass_fds=(agent.wire_fd, endpoint.fileno()), timeout=60, check=False,
        )  # fmt: skip
    assert worker.returncode == 0
    told = agent.wait_for("imported")
    assert told["module"] == "tensorflow"
    assert told["file"] == str(folder.parent / "site" / "tensorflow" / "__init__.py")
    assert told["changes"] == {"TF_MODE": "script", "CUDA_CACHE": None}


@pytest.mark.parametrize("imports", ["import tensorflow", "from tensorflow.part import number"])
@pytest.mark.parametrize("setting", ["other", "script"])
def test_where_the_settings_are_others_the_script_begins_afresh(agent, folder, setting, imports):
    """The standby has imported with none; what it had printed by then is printed again."""
    (folder / "script.py").write_text(
        f"import os, sys\nos.environ['TF_MODE'] = {setting!r}\nprint('begins', sys.argv)\n{imports}\n"
        "import tensorflow\nprint(tensorflow.mode)\nsys.exit(3)"
    )
    found = Standby(agent, folder).becomes("script.py", "a b")
    begins = b"begins ['script.py', 'a b']\n"
    assert found == (3, begins + begins + setting.encode() + b"\n", b"")
    assert agent.of("unfit") == [{"kind": "unfit", "variables": ["TF_MODE"]}]
    assert len(agent.of("hello")) == 2
    assert agent.wait_for("imported")["changes"] == {"TF_MODE": setting}


def test_its_settings_are_not_those_of_the_script(agent, folder):
    """What was learnt from another worker is gone by the time the script looks."""
    (folder / "script.py").write_text("import os\nprint(os.environ.get('TF_MODE'), os.environ['OWN'])")
    found = Standby(agent, folder, TF_MODE="script").becomes("script.py", OWN="mine")
    assert found == (0, b"None mine\n", b"")


def test_it_ends_where_the_agent_hangs_up(agent, folder):
    standby = Standby(agent, folder)
    standby.ready()
    assert standby.hung_up_on() == (0, b"", b"")


def test_an_import_that_fails_says_why(agent, folder):
    (folder.parent / "site" / "tensorflow" / "part.py").write_text("raise OSError('libcuda.so')")
    standby = Standby(agent, folder)
    with standby.ours:
        assert standby.ours.recv(65536) == b""
    _, errors = standby.process.communicate(timeout=60)
    assert standby.process.returncode == 1
    assert errors.endswith(b"OSError: libcuda.so\n")


# --- copies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE_SCRIPTS])
def test_a_copy_runs_a_script_as_plain_python_does(agent, folder, subreaper, name):
    write_script(folder, name)
    server = Standby(agent, folder, **({"TF_MODE": "script"} if name == "settings" else {}))
    server.ready()
    copy = Copy(server)
    copy.ready()
    assert copy.becomes(*COMMAND) == plainly(folder, *COMMAND)
    assert agent.of("unfit") == []
    assert server.hung_up_on() == (0, b"", b"")


def test_a_copy_leads_a_session_of_its_own_and_is_a_child_of_the_agent(agent, folder, subreaper):
    server = Standby(agent, folder)
    files = server.ready()["files"]
    copies = [Copy(server) for _ in range(3)]
    told = [copy.ready() for copy in copies]
    assert told == [{"kind": "ready", "files": files, "pid": copy.pid} for copy in copies]
    assert len({copy.pid for copy in copies}) == 3
    for copy in copies:
        assert (os.getpgid(copy.pid), os.getsid(copy.pid)) == (copy.pid, copy.pid)
        assert kernel.processes()[copy.pid].parent == os.getpid()
    assert server.hung_up_on() == (0, b"", b"")
    assert [copy.hung_up_on() for copy in copies] == [(0, b"", b"")] * 3


def test_a_copy_that_is_not_the_agents_child_ends(agent, folder):
    """Where the kernel gives orphans to somebody else, nobody would see its exit; its fork server can do without."""
    (folder / "script.py").write_text("import tensorflow\nprint(tensorflow.value)")
    server = Standby(agent, folder)
    server.ready()
    copy = Copy(server)
    with copy.ours:
        assert copy.ours.recv(65536) == b""
    assert [output.read() for output in copy.outputs] == [b"", b""]
    for output in copy.outputs:
        output.close()
    assert server.becomes("script.py") == (0, b"2\n", b"")


def test_what_an_import_has_written_is_not_written_by_each_copy(agent, folder, subreaper):
    """The agent passes it on: here is only what the server has written itself."""
    with open(folder.parent / "site" / "tensorflow" / "part.py", "a") as file:
        file.write("\nprint('imported')")
    (folder / "script.py").write_text("import tensorflow\nprint('script')")
    server = Standby(agent, folder)
    server.ready()
    copy = Copy(server)
    copy.ready()
    assert copy.becomes("script.py") == (0, b"script\n", b"")
    assert server.hung_up_on() == (0, b"imported\n", b"")


def test_copies_draw_other_numbers(agent, folder, subreaper):
    """What modules draw from must not begin alike in all of them."""
    package = folder.parent / "site" / "numpy"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "random.py").write_text("import os\ndef seed():\n    global drawn\n    drawn = os.urandom(8)\nseed()")
    (folder.parent / "site" / "tensorflow" / "part.py").write_text("import numpy.random, random\nnumber = 1")
    (folder / "script.py").write_text("import numpy.random, random\nprint(random.random(), numpy.random.drawn.hex())")
    server = Standby(agent, folder)
    server.ready()
    drawn = set()
    for copy in [Copy(server), Copy(server)]:
        copy.ready()
        drawn.update(copy.becomes("script.py")[1].split())
    assert len(drawn) == 4
    assert server.hung_up_on() == (0, b"", b"")


def a_driver() -> str:
    """A device that is neither memory nor a terminal."""
    for path in ("/dev/fuse", "/dev/net/tun", "/dev/vsock", "/dev/hwrng"):
        if os.access(path, os.R_OK):
            return path
    pytest.skip("no driver can be opened here")


@pytest.mark.parametrize("holds", ["a thread", "a driver"])
def test_an_import_that_holds_what_a_copy_would_not_have_is_told(agent, folder, holds):
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    with open(folder.parent / "site" / "tensorflow" / "part.py", "a") as file:
        file.write("\n" + (thread if holds == "a thread" else f"import os\nos.open({a_driver()!r}, 0)"))
    (folder / "script.py").write_text("import tensorflow\nprint(tensorflow.value)")
    standby = Standby(agent, folder)
    assert standby.ready()["can_fork"] is False
    assert standby.becomes("script.py") == (0, b"2\n", b"")
