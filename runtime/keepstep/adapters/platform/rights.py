"""What a process may do here, and what the kernel lets it: signals, capabilities, filters, calls.

Source: proc(5), capabilities(7), seccomp(2), the kernel's Yama document.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
from collections.abc import Iterable
from pathlib import Path

SENSITIVE = re.compile(r"key|token|secret|passw|cred|auth|signature|cookie|private", re.IGNORECASE)
"""A name that says that what it names is nobody else's business."""
HIDDEN = "***"
_WORDS_MAX = 64
_MASKS = {"SigIgn": "ignores", "SigCgt": "catches", "SigBlk": "blocks"}
_CAPABILITIES = (
    "chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap",
    "linux_immutable", "net_bind_service", "net_broadcast", "net_admin", "net_raw", "ipc_lock", "ipc_owner",
    "sys_module", "sys_rawio", "sys_chroot", "sys_ptrace", "sys_pacct", "sys_admin", "sys_boot", "sys_nice",
    "sys_resource", "sys_time", "sys_tty_config", "mknod", "lease", "audit_write", "audit_control", "setfcap",
    "mac_override", "mac_admin", "syslog", "wake_alarm", "block_suspend", "audit_read", "perfmon", "bpf",
    "checkpoint_restore",
)  # fmt: skip
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def signal_name(number: int) -> str:
    """SIGTERM for 15; those without a name of their own are counted from the first real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"signal {number}"


def signals_of(mask: str) -> list[str]:
    """The signals of a mask as /proc/PID/status has it."""
    bits = int(mask, 16)
    return [signal_name(number) for number in range(1, 65) if bits >> (number - 1) & 1]


def process(pid: int | str) -> dict[str, object]:
    """A process's command, and what it does with signals.

    Raises:
        OSError: it may not be looked at, or there is none.
    """
    folder = Path("/proc") / str(pid)
    words = os.fsdecode((folder / "cmdline").read_bytes()).split("\0")[:-1]
    status = _status(folder)
    masks = {does: signals_of(status[name]) for name, does in _MASKS.items() if name in status}
    return {"pid": pid, "own_pid": os.getpid(), "command": hide(words), "parent": status.get("PPid"), **masks}


def hide(words: Iterable[str]) -> list[str]:
    """A command's words without what follows a name such as --token: nobody knows what a user may write there."""
    shown, expected = [], False
    for word in list(words)[:_WORDS_MAX]:
        name, equals, _ = word.partition("=")
        sensitive = SENSITIVE.search(name) is not None
        if expected and not word.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{name}={HIDDEN}" if equals and sensitive else word)
        expected = sensitive and not equals and word.startswith("-")
    return shown


def identity() -> dict[str, object]:
    """Who this process is, which capabilities it has, and who may trace whom.

    Raises:
        OSError: the kernel does not tell.
    """
    status = _status(Path("/proc/self"))
    found: dict[str, object] = {"uid": os.getuid(), "gid": os.getgid(), "groups": os.getgroups()}
    for name, key in (("CapEff", "capabilities"), ("CapBnd", "capabilities_bound")):
        found[key] = capabilities_of(status[name])
    found |= {"seccomp": status.get("Seccomp"), "seccomp_filters": status.get("Seccomp_filters")}
    found["no_new_privileges"] = status.get("NoNewPrivs")
    with contextlib.suppress(OSError):
        found["ptrace_scope"] = int(_YAMA.read_text())
    with contextlib.suppress(OSError):
        found["uid_map"] = Path("/proc/self/uid_map").read_text().split()
    return found


def capabilities_of(mask: str) -> list[str]:
    """The capabilities of a mask; those that are newer than this list by number."""
    bits = int(mask, 16)
    named = [name for number, name in enumerate(_CAPABILITIES) if bits >> number & 1]
    return named + [str(number) for number in range(len(_CAPABILITIES), 64) if bits >> number & 1]


def calls() -> dict[str, object]:
    """Whether what keepstep rests on works: each call made once, "works" or its error."""
    found: dict[str, object] = {}
    for name, attempt in (("pidfd_open", _pidfd), ("memfd_create", _memfd), ("abstract_socket", _abstract_socket)):
        try:
            attempt()
            found[name] = "works"
        except (OSError, AttributeError) as error:
            found[name] = str(error)
    return found


def sender(pid: int) -> str | None:
    """The name of a process that may be gone; None where it is, and for the kernel and what is out of sight."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() if pid else None
    except OSError:
        return None


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _memfd() -> None:
    fd = os.memfd_create("keepstep-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        os.close(fd)


def _abstract_socket() -> None:
    name = f"\0keepstep-doctor-{os.getpid()}"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller,
    ):
        listener.bind(name)
        listener.listen()
        caller.connect(name)


def _status(folder: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in (folder / "status").read_text(errors="replace").splitlines())
    return {name: value.strip() for name, _, value in lines}
