"""The standby: a worker's process that has its large imports behind it and waits to be told which worker it is.

Importing TensorFlow is the largest part of a restart. A standby has done it with the interpreter, the flags and the
environment of a worker, or is a copy of a process that has (`forkserver`); then it takes over a worker's environment,
arguments and descriptors, and runs the script as a fresh process would. What the script sets in its environment before
its own import has to be known by then: it is learnt from the first worker (`Imports`), and where it turns out to be
otherwise, the process starts afresh in its own place.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from keepstep_worker import forkserver, hook, identity
from keepstep_worker.channel import Channel, ChannelClosed

LARGE = ("tensorflow", "keras", "tf_keras")
"""What takes long to import, and what the script's own import of is looked at."""

_STANDBY_FD = "KEEPSTEP_STANDBY_FD"
_ENDED = 0
_PREFIXES = (
    "ABSL_", "AUTOGRAPH_", "CUDA_", "CUDNN_", "DNNL_", "GLOG_", "GRPC_", "HDF5_USE_FILE_LOCKING", "HOROVOD_", "KERAS_",
    "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_", "NUMEXPR_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PJRT_",
    "PROTOCOL_BUFFERS_", "ROCM_", "TF_", "XLA_",
)  # fmt: skip
"""What an import sets itself is no setting of the script's: h5py's own sets other HDF5_ variables."""
_NOT_READ_ON_IMPORT = frozenset({"TF_CONFIG"})

Tell = Callable[[dict[str, Any]], None]


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the large imports may go by."""
    return {
        name: value for name, value in environ.items() if name.startswith(_PREFIXES) and name not in _NOT_READ_ON_IMPORT
    }


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


class Imports:
    """Watches which large modules a script imports, and what it has set by then."""

    def __init__(self, tell: Tell) -> None:
        """Compare with the environment as it is now; `tell` takes a message for the agent."""
        self._before, self._tell = settings(os.environ), tell

    def begin(self, name: str) -> Callable[[ModuleType], None]:
        """A large module is about to be executed; what is returned is called when that was done."""
        now = settings(os.environ)
        changed = {key: now.get(key) for key in _differing(now, self._before)}

        def done(module: ModuleType) -> None:
            where = str(getattr(module, "__file__", None) or "")
            self._tell({"kind": "imported", "module": name, "file": where, "changes": changed})

        return done


class Held:
    """Keeps what a standby has imported out of sight until the script asks for it, and looks at how it asks."""

    def __init__(
        self,
        modules: Mapping[str, ModuleType],
        imported_with: Mapping[str, str],
        command: Sequence[str],
        set_by: Mapping[str, Mapping[str, str]],
    ) -> None:
        """Hold modules.

        Args:
            modules: by name, those that are no part of another one.
            imported_with: the settings of that moment.
            command: what would start the worker afresh.
            set_by: what the import of each has put into the environment.
        """
        self._modules, self._imported_with, self._command = dict(modules), dict(imported_with), list(command)
        self._set_by, self._parts = set_by, dict[str, dict[str, ModuleType]]()
        self._tell: Tell = _nothing
        self._environment: dict[str, str] = {}

    def hide(self, tell: Tell, environment: Mapping[str, str]) -> None:
        """Take the modules away, with all that is part of them: it could be asked for first.

        Args:
            tell: takes a message for the agent.
            environment: of the worker as it began.
        """
        self._tell, self._environment = tell, dict(environment)
        for name in self._modules:
            parts = [each for each in sys.modules if each.startswith(f"{name}.")]
            self._parts[name] = {each: sys.modules.pop(each) for each in parts}
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec like the module's own, whose loader gives the module that is there already."""
        module = self._modules.get(fullname)
        own = None if module is None else module.__spec__
        if own is None:
            return None
        spec = importlib.machinery.ModuleSpec(
            fullname,
            _HeldLoader(self, fullname),  # type: ignore[arg-type]
            origin=own.origin,
            is_package=own.submodule_search_locations is not None,
        )
        if own.submodule_search_locations is not None:
            spec.submodule_search_locations = list(own.submodule_search_locations)
        spec.has_location = own.has_location
        return spec

    def give(self, name: str) -> ModuleType:
        """Return a module to whoever imports it. Does not return where it was imported under other settings."""
        other = _differing(settings(os.environ), self._imported_with)
        if other:
            self._tell({"kind": "unfit", "variables": other})
            _start_afresh(self._command, self._environment)
        sys.modules.update(self._parts.pop(name, {}))
        for variable, value in self._set_by.get(name, {}).items():
            os.environ.setdefault(variable, value)
        return self._modules[name]

    def forget(self, name: str) -> None:
        """The module was given, and is where it belongs."""
        self._modules.pop(name, None)
        if not self._modules:
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)


class _HeldLoader:
    def __init__(self, held: Held, name: str) -> None:
        self._held, self._name = held, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = self._held.give(self._name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own
        self._held.forget(self._name)


def is_standby(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether this process was started to wait."""
    return _STANDBY_FD in environ


def wait() -> Held:
    """Import the modules that the command line names, then wait until this process, or a copy of it, is to be a worker.

    When this returns, the command line, the environment and the descriptors are that worker's. The process ends where
    the agent hangs up.
    """
    channel = Channel.from_fd(int(os.environ.pop(_STANDBY_FD)))
    imported_with = settings(os.environ)
    wake = _rest()
    names, set_by = sys.argv[1:], {}
    for name in names:
        before = set(os.environ)
        with hook.collector_at_rest():
            importlib.import_module(name)
        set_by[name] = {each: value for each, value in os.environ.items() if each not in before}
    wake()
    _flush()  # else each copy would print it again
    ready = {"kind": "ready", "files": {name: str(sys.modules[name].__file__ or "") for name in names}}
    _tell_or_end(channel, ready | {"can_fork": forkserver.can_fork()})
    channel, descriptors = _multiply(channel, ready)
    channel.close()
    command = _become(*descriptors)
    held = {name: sys.modules[name] for name in LARGE if name in sys.modules}
    return Held(held, imported_with, command, set_by)


def _multiply(channel: Channel, ready: dict[str, Any]) -> tuple[Channel, list[int]]:
    """Make copies of this process until it, or the copy in which this returns, is told which worker it is."""
    while True:
        message, descriptors = _received(channel)
        if message.get("kind") != "fork":
            return channel, descriptors
        endpoint, *outputs = descriptors
        is_copy = False
        with contextlib.suppress(OSError):  # the agent sees that nobody is at the other end
            is_copy = forkserver.fork(*outputs)
        if is_copy:
            channel.close()
            channel = Channel.from_fd(endpoint)
            _tell_or_end(channel, ready | {"pid": os.getpid()})
        else:
            os.close(endpoint)


def awaited(channel: Channel) -> list[int]:
    """Wait for the descriptors that make a worker of this process: of its wire, of its socket, of what else it is told.

    The process ends where the agent hangs up.
    """
    return _received(channel)[1]


def _tell_or_end(channel: Channel, message: dict[str, Any]) -> None:
    try:
        channel.send(message)
    except ChannelClosed:
        os._exit(_ENDED)


def _received(channel: Channel) -> tuple[dict[str, Any], list[int]]:
    while True:
        try:
            received = channel.receive(None)
        except ChannelClosed:
            os._exit(_ENDED)
        if received is not None:
            return received


def _become(wire_fd: int, socket_fd: int, worker_fd: int) -> list[str]:
    """Take over a worker's command line, environment, and the descriptors of its wire and socket."""
    with os.fdopen(worker_fd, "rb") as file:
        worker = json.load(file)
    command: list[str] = worker["command"]
    os.environ.clear()
    os.environ.update({**worker["environment"], **identity.descriptor_variables(wire_fd, socket_fd)})
    sys.argv[1:] = command[command.index("keepstep_worker") + 1 :]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = command
    return command


def _start_afresh(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the worker's command in this process's place, from the beginning. Does not return."""
    _flush()
    for name in identity.DESCRIPTOR_VARIABLES:
        os.set_inheritable(int(environment[name]), True)
    os.execvpe(command[0], list(command), dict(environment))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _nothing(_: dict[str, Any]) -> None:
    """Stand in until `hide` is called."""


# --- priority ------------------------------------------------------------------------------------------------------


def _rest() -> Callable[[], None]:
    """Run on what others leave of the processors; what is returned takes that back, for all threads.

    The lowest class is not left again without a privilege, so a thread tries it out first.
    """
    lowest = _policy_that_can_be_left()
    os.sched_setscheduler(0, lowest, os.sched_param(0))

    def wake() -> None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))

    return wake


def _policy_that_can_be_left() -> int:
    found = [os.SCHED_BATCH]

    def attempt() -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            found.append(os.SCHED_IDLE)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return found[-1]
