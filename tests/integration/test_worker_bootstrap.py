"""A script under the bootstrap sees, says and returns what it does under plain Python."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from keepstep_worker import wire as wires
from tests.support.fake_agent import FakeAgent, eventually
from tests.support.scripts import SCRIPTS

pytestmark = pytest.mark.integration
RUNTIME = str(Path(wires.__file__).parent.parent)


def run(folder: Path, *command: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *options, *command],
        cwd=folder,
        env={"PYTHONPATH": RUNTIME, "PATH": os.environ["PATH"]},
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def same(folder: Path, *command: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    plain = run(folder, *command, options=options)
    under = run(folder, "-m", "keepstep_worker", *command, options=options)
    assert under == plain
    return plain


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_is_as_under_plain_python(tmp_path, name):
    (tmp_path / "script.py").write_text(SCRIPTS[name], encoding="latin-1")
    same(tmp_path, "script.py", "--epochs", "3", "-m", "x y")


def test_the_table_holds_both_good_ends_and_bad_ones(tmp_path):
    (tmp_path / "a.py").write_text(SCRIPTS["exception"])
    (tmp_path / "b.py").write_text(SCRIPTS["exit code"])
    code, _, stderr = same(tmp_path, "a.py")
    assert (code, stderr.count("File"), "keepstep" in stderr) == (1, 2, False)
    assert same(tmp_path, "b.py") == (3, "", "")


@pytest.mark.parametrize("name", ["package", "package.inner", "package.none", "none", "alone"])
def test_a_module_is_run_as_python_does(tmp_path, name):
    (tmp_path / "package").mkdir()
    for path in ("package/__init__.py", "package/__main__.py", "package/inner.py", "alone.py"):
        (tmp_path / path).write_text(SCRIPTS["names"])
    under, plain = (
        run(tmp_path, *words, "-m", name, "--epochs", "3", "x y") for words in (("-m", "keepstep_worker"), ())
    )
    assert [re.sub("0x[0-9a-f]+", "0x", str(part)) for part in under] == [
        re.sub("0x[0-9a-f]+", "0x", str(part)) for part in plain
    ]


@pytest.mark.parametrize(
    ("content", "mode"),
    [("#!/bin/bash\n[[ a == a ]] && ", 0o755), ("#!/bin/sh\n", 0o644), ("", 0o755), ("", 0o444)],
    ids=["bash", "not executable", "no first line", "neither"],
)
def test_a_program_is_run_with_its_arguments(tmp_path, content, mode):
    (tmp_path / "run.sh").write_text(content + 'printf \'<%s>\' "$0" "$@"\nexit 5\n')
    (tmp_path / "run.sh").chmod(mode)
    code, output, errors = run(tmp_path, "-m", "keepstep_worker", "--exec", "run.sh", "--name", "a b $HOME", "", "it's")
    assert (code, output, errors) == (5, "<./run.sh><--name><a b $HOME><><it's>", "")


def test_a_program_s_pipes_break_as_under_a_shell(tmp_path):
    (tmp_path / "run.sh").write_text("grep SigIgn /proc/self/status\nwhile :; do echo y; done 2>&1 | head -1\n")
    plain = subprocess.run(["sh", "run.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert run(tmp_path, "-m", "keepstep_worker", "--exec", "run.sh") == (0, plain.stdout, "")
    assert plain.stdout.endswith("\ny\n")


@pytest.mark.parametrize("path", ["sub/script.py", "./sub/script.py", "link.py", "missing.py", "sub/../sub/script.py"])
def test_paths_are_resolved_as_python_does(tmp_path, path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.py").write_text("here = 1")
    (tmp_path / "sub" / "script.py").write_text(SCRIPTS["names"] + "\nimport beside")
    (tmp_path / "link.py").symlink_to("sub/script.py")
    same(tmp_path, path, "a")


def test_an_absolute_path(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPTS["names"])
    same(tmp_path, str(tmp_path / "script.py"))


def test_a_safe_path_stays_safe(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(
        "import sys\nprint(sys.path[:1] == sys.path[:1], 'sub' in str(sys.path))"
    )
    same(tmp_path, "sub/script.py", options=("-P",))


def test_a_folder_and_an_archive_run_their_main(tmp_path):
    source = "import sys\nprint(__name__, sys.argv[1:], sys.path[0])\nimport beside"
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(source)
    (tmp_path / "app" / "beside.py").write_text("print('beside')")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", source)
        archive.writestr("beside.py", "print('beside')")
    assert same(tmp_path, "app", "x")[0] == 0
    assert same(tmp_path, "app.pyz", "x")[0] == 0


def test_without_a_script_it_says_how_to_call_it(tmp_path):
    code, _, stderr = run(tmp_path, "-m", "keepstep_worker")
    assert (code, stderr) == (2, "usage: python -m keepstep_worker SCRIPT | -m MODULE | --exec PROGRAM [ARGUMENT...]\n")


@pytest.fixture
def agent():
    made = FakeAgent()
    yield made
    made.close()


def start(agent: FakeAgent, script: Path, **more: str) -> subprocess.Popen[bytes]:
    endpoint = agent.connect()
    with endpoint:
        return subprocess.Popen(
            [sys.executable, "-m", "keepstep_worker", str(script)],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": RUNTIME, **agent.environment(endpoint, **more)},
            pass_fds=(agent.wire_fd, endpoint.fileno()),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


def test_hello_comes_before_the_script_and_its_children_get_no_descriptor(agent, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "print([name for name in os.environ if name.endswith('_FD')])\n"
        "print(subprocess.run([sys.executable, '-c', 'import os; print(len(os.listdir(\"/proc/self/fd\")))'],\n"
        "      capture_output=True, close_fds=False, text=True).stdout.strip())\n"
    )
    worker = start(agent, script)
    output, errors = worker.communicate(timeout=60)
    assert (worker.returncode, output, errors) == (0, b"[]\n4\n", b"")
    assert agent.of("hello") == [{"kind": "hello", "version": 1, "pid": worker.pid}]
    assert agent.wire.read_progress().phase == wires.PHASE_HELLO


def test_a_python_within_a_program_joins_only_where_it_is_started_so(agent, tmp_path):
    """The program's other processes are left alone; the one that joins is not the agent's own child."""
    (tmp_path / "script.py").write_text("import sys\nprint('keepstep_worker.session' in sys.modules)\n")
    (tmp_path / "run.sh").write_text(
        f"{sys.executable} script.py\n{sys.executable} -m keepstep_worker script.py\n{sys.executable} script.py\n"
    )
    endpoint = agent.connect()
    with endpoint:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": RUNTIME, **agent.environment(endpoint)}
        program = subprocess.run(
            [sys.executable, "-m", "keepstep_worker", "--exec", "run.sh"],
            env={**environment, "KEEPSTEP_PARENT_PID": str(os.getpid())},
            cwd=tmp_path,
            pass_fds=(agent.wire_fd, endpoint.fileno()),
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert (program.returncode, program.stdout, program.stderr) == (0, b"False\nTrue\nFalse\n", b"")
    (hello,) = agent.of("hello")
    assert hello["pid"] not in (0, os.getpid())


def test_the_first_error_is_written_before_the_process_dies(agent, tmp_path):
    script, failure = tmp_path / "script.py", tmp_path / "failure.json"
    script.write_text(
        "from keepstep_worker.session import Session\n"
        "session = Session.current()\n"
        "session.enter_step(41)\n"
        "raise ValueError('the data is bad' + '!' * 3000)\n"
    )
    worker = start(agent, script, KEEPSTEP_FAILURE_FILE=str(failure), KEEPSTEP_RANK="3")
    _, errors = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert errors.startswith(b'Traceback (most recent call last):\n  File "' + str(script).encode())
    found = json.loads(failure.read_text())
    assert found.pop("time_unix") > 0
    assert found.pop("traceback").endswith("!\n")
    assert len(found["message"]) == 2000
    assert found.pop("message").startswith("the data is bad!")
    assert found == {
        "type": "ValueError", "module": "builtins", "rank": 3, "generation": 1, "step": 41, "victim": False,
    }  # fmt: skip
    assert list(tmp_path.glob("failure.json*")) == [failure]


def test_a_server_writes_its_first_error_and_is_none_to_what_it_starts(tmp_path):
    failure = tmp_path / "failure.json"
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint('KEEPSTEP_SERVER' in os.environ, sys.argv)\nraise ValueError('no port')\n"
    )
    told = {
        "KEEPSTEP_SERVER": "ps",
        "KEEPSTEP_GENERATION": "2",
        "KEEPSTEP_RANK": "1",
        "KEEPSTEP_PARENT_PID": str(os.getpid()),
    }
    done = subprocess.run(
        [sys.executable, "-m", "keepstep_worker", "script.py", "--epochs", "3"],
        cwd=tmp_path,
        env={"PYTHONPATH": RUNTIME, "PATH": os.environ["PATH"], "KEEPSTEP_FAILURE_FILE": str(failure), **told},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "False ['script.py', '--epochs', '3']\n")
    found = json.loads(failure.read_text())
    assert (found["type"], found["rank"], found["generation"], found["step"]) == ("ValueError", 1, 2, 0)


@pytest.mark.parametrize("script", ["import sys\nsys.exit(4)", "raise SystemExit('no')", "x = 1"])
def test_an_exit_is_no_error(agent, tmp_path, script):
    (tmp_path / "script.py").write_text(script)
    worker = start(agent, tmp_path / "script.py", KEEPSTEP_FAILURE_FILE=str(tmp_path / "failure.json"))
    worker.communicate(timeout=60)
    assert not (tmp_path / "failure.json").exists()


def test_a_crash_of_the_interpreter_leaves_its_stacks(agent, tmp_path):
    (tmp_path / "script.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    worker = start(agent, tmp_path / "script.py")
    _, errors = worker.communicate(timeout=60)
    assert worker.returncode == -signal.SIGSEGV
    assert b"Fatal Python error: Segmentation fault" in errors


def test_a_worker_dies_with_its_parent(agent, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys, threading\nprint(os.getpid(), flush=True)\nthreading.Event().wait()")
    endpoint = agent.connect()
    environment = agent.environment(endpoint, KEEPSTEP_PARENT_PID="")
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys\n"
            "os.environ['KEEPSTEP_PARENT_PID'] = str(os.getpid())\n"
            "subprocess.Popen([sys.executable, '-m', 'keepstep_worker', sys.argv[1]], close_fds=False).wait()",
            str(script),
        ],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": RUNTIME, **environment},
        pass_fds=(agent.wire_fd, endpoint.fileno()),
        stdout=subprocess.PIPE,
    )
    endpoint.close()
    assert parent.stdout is not None
    worker = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate(timeout=20)
    eventually(lambda: is_over(worker))
    os.close(worker)


def is_over(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_worker_whose_parent_is_gone_already_never_runs_the_script(agent, tmp_path):
    (tmp_path / "script.py").write_text("print('ran')")
    worker = start(agent, tmp_path / "script.py", KEEPSTEP_PARENT_PID="1")
    assert worker.communicate(timeout=60) == (b"", b"")
    assert worker.returncode == 143
