"""A small network on this machine: hosts in network namespaces of their own, one address each, joined by a switch.

The switch is a namespace, too, so nothing of this is seen outside, and every network can have the same addresses.
Nothing is left behind: what a killed run has left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from keepstep.kernel import is_alive

PREFIX = "keepstep-test"
SUBNET = "10.77.0"
TOOLS = {"ip": "iproute2", "tc": "iproute2", "iptables-restore": "iptables"}
"""The programs that are needed, and the Debian packages they are in."""

_RUN, _ETC = Path("/run/netns"), Path("/etc/netns")
_DELAY = Path(__file__).with_name("delay_proxy.py")
_CLONE_NEWNET = 0x40000000
_SIOCETHTOOL, _ETHTOOL_STXCSUM, _ETHTOOL_SGRO = 0x8946, 0x17, 0x2C
_GONE_S = 30.0
_T = TypeVar("_T")


def missing() -> str:
    """What keeps this machine from having such networks; empty where nothing does."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"{tool} is not on PATH: apt-get install {package}"
    if os.geteuid() != 0:
        return "network namespaces are made by root alone"
    name = f"{PREFIX}-{_owner()}-try-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return ""


class Network:
    """Hosts `algo-1` to `algo-N` and others by name, plugged into one switch, and what can happen between them.

    A fault holds until `heal`, or until the same method is called with 0. Packets vanish on their way in, as on a wire:
    no sender is told of it.

    Attributes:
        names: of the hosts.
    """

    def __init__(self, hosts: int, *others: str) -> None:
        self.names = [*(f"algo-{number}" for number in range(1, hosts + 1)), *others]
        self._id = f"{PREFIX}-{_owner()}-{uuid.uuid4().hex[:6]}"
        self._switch = f"{self._id}-switch"
        self._loss: dict[tuple[str, str], float] = {}
        self._unplugged: set[str] = set()
        self._delays: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Network:
        remove_leftovers()
        try:
            _ip(f"netns add {self._switch}")
            _ip("link set lo up", "link add br0 type bridge", "link set br0 up", inside=self._switch)
            for host in self.names:
                self.add(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.names:
            self.remove(host)
        _remove(self._switch)

    # --- machines ----------------------------------------------------------------------------------------------------

    def namespace(self, host: str) -> str:
        return f"{self._id}-{host}"

    def address(self, host: str) -> str:
        return f"{SUBNET}.{self.names.index(host) + 1}"

    def add(self, host: str) -> None:
        """A machine of that name, with nothing running on it, plugged in."""
        name, port = self.namespace(host), self._port(host)
        mac = f"02:00:0a:4d:00:{self.names.index(host) + 1:02x}"
        hosts = _ETC / name / "hosts"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        table = [f"{self.address(each)} {each}" for each in self.names]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *table, ""]))
        _ip(f"netns add {name}")
        _ip(f"link add {port} type veth peer name eth0 address {mac} netns {name}", inside=self._switch)
        _ip(f"link set {port} up", f"link set {port} master br0", inside=self._switch)
        _ip("link set lo up", f"address add {self.address(host)}/24 dev eth0", "link set eth0 up", inside=name)
        self.inside(host, _no_offloads)
        self._unplugged.discard(host)
        self._filter(host)

    def remove(self, host: str) -> None:
        """End all that runs on a machine, and take it away; the others hear nothing of it."""
        self._stop_delay(host)
        if (_RUN / self.namespace(host)).exists():
            _ip(f"link delete {self._port(host)}", inside=self._switch)  # first: a machine that is off says no farewell
        _remove(self.namespace(host))

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """The command that runs `words` on a host; it becomes `words`, so its pid is theirs.

        Files in /dev/shm are theirs alone and go with them, as with a machine.
        """
        memory = 'mount -t tmpfs -o size=1g memory /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.namespace(host), "sh", "-c", memory, "sh", *words]

    def inside(self, host: str, function: Callable[[], _T]) -> _T:
        """Call a function where a host's network is seen; a socket that it makes stays there."""
        return _inside(self.namespace(host), function)

    def pids(self, host: str) -> list[int]:
        """All that runs on a host, zombies left out."""
        return _pids(self.namespace(host))

    # --- faults ------------------------------------------------------------------------------------------------------

    def cut(self, host: str) -> None:
        """Nothing comes in or goes out any more."""
        self.unplug(host)

    def cut_one_way(self, source: str, target: str) -> None:
        """What `source` sends does not come to `target`; the other way all is well."""
        self._lose({(source, target): 1.0})

    def cut_pair(self, one: str, other: str) -> None:
        """Two hosts do not hear each other; everybody else hears both."""
        self._lose({(one, other): 1.0, (other, one): 1.0})

    def loss(self, host: str, ratio: float) -> None:
        """Packets to and from a host are lost at random."""
        pairs = [(host, other) for other in self.names if other != host]
        self._lose({pair: ratio for one, other in pairs for pair in ((one, other), (other, one))})

    def rate(self, host: str, kbit_per_s: int) -> None:
        """Nothing comes in or goes out faster."""
        for namespace, device in ((self.namespace(host), "eth0"), (self._switch, self._port(host))):
            verb = f"replace dev {device} root tbf rate {kbit_per_s}kbit burst 16kb latency 200ms"
            _tc(namespace, verb if kbit_per_s else f"delete dev {device} root")

    def delay(self, host: str, seconds: float) -> None:
        """Each packet takes longer, in and out alike."""
        self._stop_delay(host)
        if not seconds:
            return
        port, near, far = self._port(host), f"{self._port(host)}d", f"{self._port(host)}b"
        _ip(
            f"link add {near} type veth peer name {far}", f"link set {near} up", f"link set {far} up",
            f"link set {port} nomaster", f"link set {far} master br0", inside=self._switch,
        )  # fmt: skip
        command = ["ip", "netns", "exec", self._switch, sys.executable, str(_DELAY), port, near, str(seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._delays[host] = process
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"

    def heal(self) -> None:
        """The network is as it was; machines that were removed are not."""
        self._loss.clear()
        for host in self.names:
            if (_RUN / self.namespace(host)).exists():
                self._stop_delay(host)
                self._filter(host)
                self.plug(host)
                with contextlib.suppress(subprocess.CalledProcessError):
                    self.rate(host, 0)

    def unplug(self, host: str) -> None:
        """Pull the cable at the switch: the host's own end looks as before."""
        self._stop_delay(host)
        self._unplugged.add(host)
        _ip(f"link set {self._port(host)} nomaster", inside=self._switch)

    def plug(self, host: str) -> None:
        if host in self._unplugged:
            _ip(f"link set {self._port(host)} master br0", inside=self._switch)
            self._unplugged.discard(host)

    def _port(self, host: str) -> str:
        return f"p{self.names.index(host) + 1}"

    def _lose(self, ratios: dict[tuple[str, str], float]) -> None:
        self._loss |= ratios
        for target in sorted({target for _, target in ratios}):
            self._filter(target)

    def _filter(self, host: str) -> None:
        """Have a host drop on their way in what is lost on the way to it; all of it at once."""
        rules = []
        for (source, target), ratio in self._loss.items():
            if target == host and ratio:
                some = f"-m statistic --mode random --probability {ratio} " if ratio < 1 else ""
                rules.append(f"-A INPUT -s {self.address(source)} {some}-j DROP")
        table = ["*filter", ":INPUT ACCEPT", ":FORWARD ACCEPT", ":OUTPUT ACCEPT", *rules, "COMMIT", ""]
        command = self.command(host, ["iptables-restore", "--wait"])
        subprocess.run(command, input="\n".join(table), text=True, capture_output=True, check=True)

    def _stop_delay(self, host: str) -> None:
        process = self._delays.pop(host, None)
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            port = self._port(host)
            _ip(f"link delete {port}d", f"link set {port} master br0", inside=self._switch)


# --- processes -------------------------------------------------------------------------------------------------------


def power_off(pids: Callable[[], list[int]]) -> None:
    """SIGKILL each process, until none is left: one may have been started meanwhile."""
    give_up = time.monotonic() + _GONE_S
    while left := pids():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < give_up, f"processes {left} do not end"
        time.sleep(0.01)


def _pids(namespace: str) -> list[int]:
    try:
        wanted = (_RUN / namespace).stat().st_ino
    except FileNotFoundError:
        return []
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "ns" / "net").stat().st_ino == wanted:
                found.append(int(path.name))
    return [pid for pid in found if is_alive(pid) and pid != os.getpid()]


def _inside(namespace: str, function: Callable[[], _T]) -> _T:
    """Call a function in a thread that has moved into a namespace."""
    answers: list[_T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            with (_RUN / namespace).open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"setns to {namespace}")
            answers.append(function())
        except Exception as error:  # raised again below, in the caller's thread
            failures.append(error)

    thread = threading.Thread(target=run, name=f"inside {namespace}")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return answers[0]


def _no_offloads() -> None:
    """Have each packet leave as it would on a wire, cut and with its checksum: the delay proxy sends it on as it is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for what in (_ETHTOOL_STXCSUM, _ETHTOOL_SGRO):
            value = ctypes.create_string_buffer(struct.pack("II", what, 0))
            try:
                fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16sP", b"eth0", ctypes.addressof(value)))
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise


# --- namespaces ------------------------------------------------------------------------------------------------------


def _owner() -> str:
    """This process, told from a later one with the same pid by its start."""
    return f"{os.getpid()}.{_started(os.getpid())}"


def _started(pid: int) -> str:
    """When a process was started, in clock ticks since boot; empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def remove_leftovers() -> None:
    """Remove the networks of processes that are gone, with all that still runs in them."""
    with _locked():
        found = {path.name for folder in (_RUN, _ETC) if folder.is_dir() for path in folder.glob(f"{PREFIX}-*")}
        for name in found:
            pid, _, started = name.removeprefix(f"{PREFIX}-").split("-")[0].partition(".")
            if not pid.isdigit() or _started(int(pid)) != started:
                _remove(name)


def _remove(name: str) -> None:
    power_off(lambda: _pids(name))
    if (_RUN / name).exists():
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    shutil.rmtree(_ETC / name, ignore_errors=True)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """One at a time, over all processes of this machine."""
    with (Path(tempfile.gettempdir()) / f"{PREFIX}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ip(*commands: str, inside: str = "") -> None:
    words = ["ip", *(["-n", inside] if inside else []), "-batch", "-"]
    done = subprocess.run(words, input="\n".join(commands) + "\n", text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{inside}: {'; '.join(commands)}: {done.stderr}"


def _tc(namespace: str, command: str) -> None:
    subprocess.run(["tc", "-n", namespace, "qdisc", *command.split()], capture_output=True, text=True, check=True)
