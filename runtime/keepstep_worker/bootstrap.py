"""Starts the user's script as plain Python would, with the agent listening.

    PYTHON -m keepstep_worker SCRIPT ARGS...         as PYTHON SCRIPT ARGS...
    PYTHON -m keepstep_worker -m MODULE ARGS...      as PYTHON -m MODULE ARGS...
    PYTHON -m keepstep_worker --exec PROGRAM ARGS... becomes another program, which no interpreter is looked into
    PYTHON -m keepstep_worker --serve                TensorFlow's server of the task that TF_CONFIG names
    PYTHON -m keepstep_worker --feed ROLE            a part of tf.data's service (see `feeding`)
    PYTHON -m keepstep_worker --rank ...             the first three, as a rank that mpirun has started
    PYTHON -m keepstep_worker --mpirun WORDS...      mpirun, and what it needs on this and on other hosts:
                                                     --orted, --reach (see `ranks` and `launcher`)

A script or a module leaves no trace that it could stumble over: sys.argv, sys.path[0], the namespace of `__main__`,
exit codes, tracebacks and the end of the process are those of plain Python. A program such as a shell script passes on
to what it starts the means to join. A Python that it starts by this very bootstrap, as in `python -m keepstep_worker
train.py`, is instrumented; no other one is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import runpy
import signal
import sys
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from keepstep_worker import firsterror, forerunner, hook, identity, inquiry, rank, standby
from keepstep_worker.forkserver import die_with_parent
from keepstep_worker.session import Session

_EXIT_USAGE = 2
_SHELL = "/bin/sh"
_INSTRUMENTED = {
    "tensorflow.python.distribute.collective_all_reduce_strategy": "keepstep_worker.initial_values",
    "keras.src.backend.tensorflow.trainer": "keepstep_worker.keras3",
    "tf_keras.src.engine.training": "keepstep_worker.tfkeras",
    "keras.src.engine.training": "keepstep_worker.tfkeras",  # Keras 2.13 to 2.15
    "keras.engine.training": "keepstep_worker.tfkeras",  # Keras 2.12
    "keras.src.optimizers.base_optimizer": "keepstep_worker.probe",
    "tf_keras.src.optimizers.optimizer": "keepstep_worker.probe",
    "tf_keras.src.optimizers.legacy.optimizer_v2": "keepstep_worker.probe",
    "keras.src.optimizers.optimizer": "keepstep_worker.probe",  # Keras 2.13 to 2.15; in Keras 3 it has nothing to wrap
    "keras.src.optimizers.legacy.optimizer_v2": "keepstep_worker.probe",
    "keras.optimizers.optimizer": "keepstep_worker.probe",  # Keras 2.12
    "tensorflow.python.data.ops.iterator_ops": "keepstep_worker.probe",
    "tensorflow.python.distribute.input_lib": "keepstep_worker.probe",
    "tensorflow.python.eager.backprop": "keepstep_worker.probe",
    "tensorflow.python.ops.control_flow_ops": "keepstep_worker.probe",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function": "keepstep_worker.probe",
}

_MENDED = {
    "tensorflow.python.distribute.coordinator.cluster_coordinator": "keepstep_worker.coordinator",
    "tensorflow.python.eager.context": "keepstep_worker.timers",
}
"""What is no matter of taste: the same where nothing is to be instrumented."""


def main() -> None:
    """Run the script named by the command line; returns when it ends."""
    if sys.argv[1:2] == ["--reach"]:
        _reach(sys.argv[2:])
    is_rank = sys.argv[1:2] == ["--rank"]
    if is_rank:
        rank.become_child()
        del sys.argv[1]
    server: identity.Identity | None = None
    if forerunner.is_forerunner() or standby.is_standby() or identity.is_worker() or identity.is_server():
        die_with_parent(identity.parent_pid())
    if identity.is_server():
        server = identity.read_identity()
        identity.disown_servers()
    if forerunner.is_forerunner():
        forerunner.await_world()
    held = standby.wait() if standby.is_standby() else None
    if len(sys.argv) < 2:
        print("usage: python -m keepstep_worker SCRIPT | -m MODULE | --exec PROGRAM [ARGUMENT...]", file=sys.stderr)
        sys.exit(_EXIT_USAGE)
    if sys.argv[1] in _LAUNCHERS:
        _LAUNCHERS[sys.argv[1]](sys.argv[2:])
    pid = os.getpid()
    if sys.argv[1] in ("--serve", "--feed"):
        try:
            _serve() if sys.argv[1] == "--serve" else _feed(sys.argv[2], server)
        except BaseException as error:
            _report(error, server, pid)
            raise
        return
    session = _begin(held) if identity.is_worker() else None
    del sys.argv[0]
    try:
        if sys.argv[0] == "-m":
            _run_module()
        else:
            _run(sys.argv[0])
    except SystemExit as leaving:
        if is_rank and os.getpid() == pid and leaving.code not in (None, 0):
            _leave_world(leaving)
        raise
    except BaseException as error:
        if session is not None:
            _report(error, session.identity, session.pid, max(session.entered_step, session.completed_step))
        else:
            _report(error, server, pid)
        if is_rank and os.getpid() == pid:
            _leave_world(error)
        raise


def _begin(held: standby.Held | None) -> Session | None:
    """Have the agent listen from here on; None where another process does that in this one's place."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stderr without a descriptor
        faulthandler.enable()
    environment = dict(os.environ)
    if stacks := os.environ.get("KEEPSTEP_STACKS_FILE", ""):
        inquiry.write_stacks_to(stacks)
    session = Session.current()
    if session is not None:
        _instrument(session)
        if held is not None:
            held.hide(session.tell, environment)
    return session


def _leave_world(error: BaseException) -> NoReturn:
    """End a rank that has failed, without waiting for its peers as MPI's own end would; mpirun then ends those."""
    code = error.code if isinstance(error, SystemExit) else 1
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    elif not isinstance(code, int):
        print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code & 0xFF if isinstance(code, int) else 1)


def _instrument(session: Session) -> None:
    """Wait for what the script imports, to wrap its `fit` and to learn what takes long to import."""

    def install(name: str) -> hook.Callback:
        def call(module: ModuleType) -> None:
            importlib.import_module(name).install(module)

        return call

    wanted = _MENDED if session.identity.instrument == "off" else {**_INSTRUMENTED, **_MENDED}
    installers = {
        target: install(name) for target, name in wanted.items() if importlib.util.find_spec(name) is not None
    }
    hook.PostImport(installers, standby.LARGE, standby.Imports(session.tell).begin).install()


def _serve() -> None:
    """Be what TF_CONFIG says, without a script: TensorFlow's own server, until somebody ends it."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    server = tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id)
    server.join()


def _feed(role: str, server: identity.Identity | None) -> None:
    from keepstep_worker import feeding

    feeding.run(role, 0 if server is None else server.generation)


def _execute(command: list[str]) -> NoReturn:
    """Become a program that is none of Python's; a file without a first line that names its interpreter is the shell's.

    What it starts may join in its place: the descriptors and the variables that name them stay open to it.
    """
    program = command[0] if os.sep in command[0] else os.path.join(os.curdir, command[0])
    if identity.is_worker():
        os.environ["KEEPSTEP_PARENT_PID"] = "0"  # whoever joins is a child of the program, not of the agent
        for name in identity.DESCRIPTOR_VARIABLES:
            os.set_inheritable(int(os.environ[name]), True)
    with contextlib.suppress(OSError):  # on a file system that can not be written, the shell reads it
        os.chmod(program, os.stat(program).st_mode | 0o111)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and a shell could not take that back
        signal.signal(number, signal.SIG_DFL)
    runs = ["-c", 'exec "$0" "$@"', program] if os.access(program, os.X_OK) else [program]
    os.execv(_SHELL, [_SHELL, *runs, *command[1:]])


def _reach(words: list[str]) -> NoReturn:
    from keepstep_worker import launcher

    launcher.reach(words)


def _lead(words: list[str]) -> NoReturn:
    from keepstep_worker import ranks

    ranks.lead(words)


def _follow(words: list[str]) -> NoReturn:
    from keepstep_worker import ranks

    ranks.follow()


_LAUNCHERS = {"--exec": _execute, "--mpirun": _lead, "--orted": _follow}
"""What becomes something else than the script; what they need takes long to import, and a worker does without."""


def _run_module() -> None:
    """Execute the module that the command line names in `__main__`, as `python -m` does."""
    if len(sys.argv) < 2:
        print("Argument expected for the -m option", file=sys.stderr)
        sys.exit(_EXIT_USAGE)
    name = sys.argv.pop(1)
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run(script: str) -> None:
    """Execute a script in `__main__`; a folder or an archive with a `__main__.py` as runpy does."""
    path = os.path.join(os.getcwd(), script)
    if pkgutil.get_importer(path) is not None:
        if not _safe_path():
            del sys.path[0]
        runpy.run_path(path, run_name="__main__")
        return
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(_EXIT_USAGE)
    if not _safe_path():
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    namespace = _fresh_main(path)
    exec(compile(source, path, "exec", dont_inherit=True), namespace)


def _safe_path() -> bool:
    return bool(getattr(sys.flags, "safe_path", False)) or bool(sys.flags.isolated)


def _fresh_main(path: str) -> dict[str, Any]:
    """Give `__main__` the namespace that it has at the start of a script."""
    module = sys.modules["__main__"]
    namespace = module.__dict__
    builtins = namespace["__builtins__"]
    namespace.clear()
    namespace.update({
        "__name__": "__main__", "__doc__": None, "__package__": None, "__spec__": None, "__annotations__": {},
        "__builtins__": builtins, "__file__": path, "__cached__": None,
        "__loader__": importlib.machinery.SourceFileLoader("__main__", path),
    })  # fmt: skip
    return namespace


def _report(error: BaseException, who: identity.Identity | None, pid: int, step: int = 0) -> None:
    """Write the first error of the process `pid`, and have its traceback shown without the frames of this module."""
    shown = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        value.__traceback__ = _strip(value, trace)
        shown(kind, value, value.__traceback__)

    sys.excepthook = excepthook
    if who is not None and who.failure_file and os.getpid() == pid:
        error.__traceback__ = _strip(error, error.__traceback__)
        firsterror.write(who.failure_file, firsterror.describe(error, who.rank, who.generation, step))


def _strip(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames above the script's first: runpy's and ours."""
    own = {__file__, runpy.__file__, os.path.join(os.path.dirname(__file__), "__main__.py")}
    rest = trace
    while rest is not None and (
        rest.tb_frame.f_code.co_filename in own or rest.tb_frame.f_code.co_filename == "<frozen runpy>"
    ):
        rest = rest.tb_next
    if rest is None and not isinstance(error, SyntaxError):
        return trace  # a fault of ours, not of the script
    return rest
