"""The network that tests of many hosts stand on: each fault does what its name says, and nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keepstep.kernel import is_alive
from tests.support.namespaces import Network, missing, remove_leftovers
from tests.support.worlds import Worlds

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(missing()), reason=missing())]

PORT = 5000
WAIT_S = 30.0
LONG = "import time; print('ready', flush=True); time.sleep(600)"
"""Once it has said so, the programs that have brought it into its namespace are no more."""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


@pytest.fixture
def ears(network: Network) -> Iterator[dict[str, socket.socket]]:
    """A socket for datagrams on each host; each has heard from each other one, so all addresses are known."""
    with contextlib.ExitStack() as stack:
        found = {host: stack.enter_context(network.inside(host, datagrams)) for host in network.names}
        for source in network.names:
            for target in network.names:
                if source != target:
                    send(found, source, target, "hello")
                    assert heard(found[target]) == f"hello from {source}"
        yield found


def datagrams() -> socket.socket:
    ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ear.bind(("0.0.0.0", PORT))
    ear.settimeout(WAIT_S)
    return ear


def send(ears: dict[str, socket.socket], source: str, target: str, word: str) -> None:
    address = f"10.77.0.{target.removeprefix('algo-')}"
    ears[source].sendto(f"{word} from {source}".encode(), (address, PORT))


def heard(ear: socket.socket) -> str:
    return ear.recv(1000).decode()


ALL = {("algo-1", "algo-2"), ("algo-2", "algo-1"), ("algo-1", "algo-3"), ("algo-3", "algo-1"), ("algo-2", "algo-3"),
       ("algo-3", "algo-2")}  # fmt: skip
CUTS: dict[str, tuple[Callable[[Network], None], set[tuple[str, str]]]] = {
    "one host": (lambda n: n.cut("algo-1"), {pair for pair in ALL if "algo-1" in pair}),
    "one way": (lambda n: n.cut_one_way("algo-1", "algo-2"), {("algo-1", "algo-2")}),
    "a pair": (lambda n: n.cut_pair("algo-2", "algo-3"), {("algo-2", "algo-3"), ("algo-3", "algo-2")}),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_stops_what_it_says_and_nothing_else(name, network, ears):
    cut, lost = CUTS[name]
    cut(network)
    for source, target in sorted(ALL):
        send(ears, source, target, "while cut")
    network.heal()
    for source, target in sorted(ALL):
        send(ears, source, target, "healed")
    arrived = {host: {heard(ears[host]) for _ in range(4 - sum(1 for _, to in lost if to == host))} for host in ears}
    for source, target in ALL:
        assert f"healed from {source}" in arrived[target]
        assert (f"while cut from {source}" in arrived[target]) == ((source, target) not in lost)


def test_some_packets_are_lost_and_others_are_not(network, ears):
    network.loss("algo-2", 0.5)
    for _ in range(200):
        send(ears, "algo-1", "algo-2", "perhaps")
        send(ears, "algo-2", "algo-3", "perhaps")
    network.heal()
    for source, target in (("algo-1", "algo-2"), ("algo-2", "algo-3")):
        send(ears, source, target, "end")
        words = iter(lambda target=target: heard(ears[target]).split()[0], "end")
        assert 0 < sum(1 for _ in words) < 200


def test_what_is_delayed_comes_after_what_is_not(network, ears):
    ears_of = ("algo-2", "algo-3")
    for seconds in (4.0, 0.0):  # longer than a busy machine stands still between two packets or two listeners
        network.delay("algo-3", seconds)
        send(ears, "algo-1", "algo-3", "slow")
        send(ears, "algo-1", "algo-2", "fast")
        with ThreadPoolExecutor() as listeners:
            arrived = dict(listeners.map(lambda host: (host, (heard(ears[host]), time.monotonic())), ears_of))
        assert {word for word, _ in arrived.values()} == {"slow from algo-1", "fast from algo-1"}
        if seconds:
            assert arrived["algo-2"][1] < arrived["algo-3"][1]


def test_streams_go_through_a_delay_whole(network):
    content = os.urandom(1 << 20)
    network.delay("algo-1", 0.02)
    assert download(network, content, "algo-1", "algo-2") == content


def test_a_narrow_line_lets_what_took_another_way_overtake(network):
    content = bytes(60_000)
    network.rate("algo-3", 40)  # ten seconds of it
    with serving(network, content, "algo-1") as address:
        narrow = network.inside("algo-3", lambda: socket.create_connection(address, WAIT_S))
        wide = network.inside("algo-2", lambda: socket.create_connection(address, WAIT_S))
        with narrow, wide:
            some = narrow.recv(1)
            assert received(wide, len(content)) == content
            narrow.setblocking(False)
            some += narrow.recv(len(content))
            narrow.settimeout(WAIT_S)
            assert len(some) < len(content)
            network.rate("algo-3", 0)
            assert some + received(narrow, len(content) - len(some)) == content


@contextlib.contextmanager
def serving(network: Network, content: bytes, host: str) -> Iterator[tuple[str, int]]:
    """A host that sends `content` to whoever connects."""
    code = (
        "import socket, sys, threading\n"
        "content = sys.stdin.buffer.read()\n"
        f"with socket.create_server(('', {PORT})) as server:\n"
        "    print('ready', flush=True)\n"
        "    while True:\n"
        "        threading.Thread(target=server.accept()[0].sendall, args=(content,)).start()\n"
    )
    process = subprocess.Popen(
        network.command(host, [sys.executable, "-c", code]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    with process, process.stdin, process.stdout:
        process.stdin.write(content)
        process.stdin.close()
        assert process.stdout.readline() == b"ready\n"
        yield network.address(host), PORT
        process.kill()


def download(network: Network, content: bytes, source: str, target: str) -> bytes:
    with serving(network, content, source) as address:
        with network.inside(target, lambda: socket.create_connection(address, WAIT_S)) as connection:
            return received(connection, len(content))


def received(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (some := connection.recv(1 << 16)):
        found += some
    return found


def is_open(connection: socket.socket) -> bool:
    """Whether the other end has neither ended nor reset the connection, as far as it is known here."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 20):
            continue
    except BlockingIOError:
        return True
    return False


# --- machines --------------------------------------------------------------------------------------------------------


def test_hosts_find_each_other_by_name(network):
    code = f"import socket; print(*[socket.gethostbyname(name) for name in {network.names}])"
    for host in network.names:
        done = subprocess.run(network.command(host, [sys.executable, "-c", code]), capture_output=True, check=True)
        assert done.stdout.split() == [network.address(name).encode() for name in network.names]


def test_a_machine_that_is_switched_off_says_no_farewell_and_comes_back_empty(network):
    with serving(network, b"x" * 5_000_000, "algo-1") as address:
        connection = network.inside("algo-2", lambda: socket.create_connection(address, WAIT_S))
        with connection:
            assert connection.recv(1) == b"x"
            running = network.pids("algo-1")
            network.remove("algo-1")
            assert running and not [pid for pid in running if is_alive(pid)]
            assert is_open(connection)
    network.add("algo-1")
    assert network.pids("algo-1") == []
    assert download(network, b"back", "algo-1", "algo-2") == b"back"


def test_networks_side_by_side_do_not_hear_each_other(network):
    with Network(3) as other:
        with serving(network, b"this one", "algo-1"), serving(other, b"the other", "algo-1") as address:
            for each, content in ((network, b"this one"), (other, b"the other")):
                with each.inside("algo-2", lambda: socket.create_connection(address, WAIT_S)) as connection:
                    assert received(connection, 100) == content


ABANDON = f"""
import os, signal, subprocess, sys
from tests.support.namespaces import Network
with Network(2) as network:
    process = subprocess.Popen(network.command("algo-1", [sys.executable, "-c", {LONG!r}]), stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\\n"
    print(network.namespace("algo-1"), process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_has_left_is_removed_by_the_next(network):
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, f"{root}/runtime"])}
    done = subprocess.run(
        [sys.executable, "-c", ABANDON], env=environment, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    name, pid = done.stdout.split()
    assert is_alive(int(pid)) and Path("/run/netns", name).exists()
    remove_leftovers()
    assert not is_alive(int(pid))
    assert not Path("/run/netns", name).exists() and not Path("/etc/netns", name).exists()
    assert download(network, b"still here", "algo-1", "algo-2") == b"still here"


def test_nothing_is_left_of_a_network():
    mark = Path("/dev/shm", f"keepstep-test-{os.getpid()}")
    with Network(2) as network:
        code = f"open({str(mark)!r}, 'w').close(); {LONG}"
        process = subprocess.Popen(network.command("algo-2", [sys.executable, "-c", code]), stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.stdout.close()
        assert not mark.exists()
        names = [network.namespace(host) for host in network.names]
        assert all(Path("/run/netns", name).exists() for name in names)
    assert process.wait(WAIT_S) == -signal.SIGKILL
    assert not any(Path(folder, name).exists() for name in names for folder in ("/run/netns", "/etc/netns"))


# --- workers, seen from outside --------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlapping", [False, True], ids=["one after the other", "at the same time"])
def test_two_worlds_that_train_at_once_are_told(overlapping, network):
    with contextlib.closing(Worlds()) as worlds:

        def look() -> None:
            worlds.look({host: network.pids(host) for host in network.names})

        def start(host: str, generation: int) -> subprocess.Popen[bytes]:
            variables = {**os.environ, "KEEPSTEP_GENERATION": str(generation), "KEEPSTEP_RANK": "0"}
            command = network.command(host, [sys.executable, "-c", LONG])
            process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE)
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            process.stdout.close()
            deadline = time.monotonic() + WAIT_S
            while process.pid not in [worker.pid for worker in worlds.workers]:
                look()
                assert time.monotonic() < deadline
            return process

        def end(process: subprocess.Popen[bytes]) -> None:
            process.kill()
            while any(worker.pid == process.pid and worker.gone_at is None for worker in worlds.workers):
                worlds.wait(0.01)
            process.wait(WAIT_S)

        first = start("algo-1", 1)
        if not overlapping:
            end(first)
            worlds.wait(0.05)  # a process's start is known to a hundredth of a second
        second = start("algo-2", 2)
        give_up = time.monotonic() + WAIT_S
        while overlapping and not worlds.overlaps() and time.monotonic() < give_up:
            worlds.wait(0.01)  # until the first one was seen once more
        end(second)
        if overlapping:
            end(first)
        assert [(w.host, w.generation, w.gone_at is not None) for w in worlds.workers] == [
            ("algo-1", 1, True),
            ("algo-2", 2, True),
        ]
        assert bool(worlds.overlaps()) == overlapping
