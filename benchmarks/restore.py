"""How long it takes to have a state back: from an own slab, from another host's, from the store.

Beside each stands the same without keepstep: `tf.train.Checkpoint.read` of files in memory, the bytes through a socket
with the same TLS, a bare parallel download. The last line of the output is one JSON object. README.md says how to read
it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.upload import BUCKET, sink, write_slab
from keepstep.adapters.certificates import issue, make_authority, write_files
from keepstep.adapters.peers import PeerServer, Region, Shelf, listen
from keepstep.adapters.peers.lines import tls_context
from keepstep.adapters.uploader import UploaderClient
from keepstep.checkpoint.safetensors import read_layout
from keepstep.ports import TlsFiles

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "benchmarks" / "restore_job.py"
OWN_MAX, PEER_MAX, STORE_MAX = 0.2, 1.2, 1.2
STREAMS, PIECE = 4, 1 << 20


# --- an own slab -----------------------------------------------------------------------------------------------------


def own_slab(folder: Path, size_bytes: int, times: int, python: Path) -> dict[str, list[float]]:
    """Seconds of each restoration, with keepstep and with TensorFlow in turn, each in a process just started."""
    common = ["--bytes", str(size_bytes), "--checkpoint", str(folder / "checkpoint")]
    settings = ["checkpoint.snapshot_every=1 steps", "restart.backoff.first=1ms"]
    options = [word for each in settings for word in ("--set", each)]
    local = [sys.executable, "-m", "keepstep", "local", "--quiet", "--hosts", "1", "--store", "none", *options]
    kept, read = folder / "kept.txt", folder / "read.txt"
    plain = [str(python), str(JOB), *common, "--result", str(read), "--mode"]
    run([*plain, "write"])
    for number in range(times):
        run([*local, "--python", str(python), "--out", str(folder / f"run-{number}"), str(JOB), "--mode", "keepstep",
             "--result", str(kept), *common])  # fmt: skip
        run([*plain, "read"])
    return {path.stem: [float(line) for line in path.read_text().splitlines()] for path in (kept, read)}


def run(command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")


# --- another host's, and the store -----------------------------------------------------------------------------------


def serve(slab: Path, files: TlsFiles, digest: str) -> None:
    """The other host: gives what is in its slab, and, at another port, the same bytes with nothing around them."""
    fd = os.open(slab, os.O_RDONLY)
    layout = read_layout(fd, os.fstat(fd).st_size)
    shelf = Shelf(lambda: {0: (7, 1)})
    assert shelf.put(0, fd, 7, digest, Region(layout.head_bytes, layout.replicated_bytes))
    offered, bare = listen("127.0.0.1"), socket.create_server(("127.0.0.1", 0))
    PeerServer(offered, files, shelf).start()
    print(json.dumps([offered.getsockname()[1], bare.getsockname()[1]]), flush=True)
    while True:
        line, _ = bare.accept()
        with tls_context(ssl.PROTOCOL_TLS_SERVER, files).wrap_socket(line, server_side=True) as secured:
            at, end = layout.head_bytes, layout.head_bytes + layout.replicated_bytes
            while at < end:
                piece = os.pread(fd, min(PIECE, end - at), at)
                secured.sendall(piece)
                at += len(piece)


@contextlib.contextmanager
def other_host(slab: Path, files: TlsFiles, digest: str) -> Iterator[tuple[int, int]]:
    words = ["--serve", str(slab), "--tls", str(files.ca.parent), "--digest", digest]
    command = [sys.executable, "-m", "benchmarks.restore", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            offered, bare = json.loads(server.stdout.readline())
            yield offered, bare
        finally:
            server.terminate()


def bare_socket(port: int, files: TlsFiles, size_bytes: int) -> float:
    """Seconds for so many bytes through a socket with the same TLS, into memory that is had for them."""
    begun, at = time.perf_counter(), 0
    into = memoryview(mmap.mmap(-1, size_bytes))
    with (
        socket.create_connection(("127.0.0.1", port)) as line,
        tls_context(ssl.PROTOCOL_TLS_CLIENT, files).wrap_socket(line, server_hostname="127.0.0.1") as secured,
    ):
        while at < size_bytes:
            at += secured.recv_into(into[at : at + PIECE])
    return time.perf_counter() - begun


def bare_download(keys: list[tuple[str, int]]) -> float:
    """Seconds for these objects, in parallel ranges, into memory that is had for them."""
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(response_checksum_validation="when_required"))
    whole = sum(size for _, size in keys)
    places, at = [], 0
    for key, size in keys:
        share = -(-size // STREAMS)
        places += [(key, begin, min(share, size - begin), at + begin) for begin in range(0, size, share)]
        at += size

    def fetch(place: tuple[str, int, int, int]) -> None:
        key, begin, size, to = place
        body = client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={begin}-{begin + size - 1}")["Body"]
        while piece := body.read(PIECE):
            into[to : to + len(piece)] = piece
            to += len(piece)

    begun = time.perf_counter()
    into = memoryview(mmap.mmap(-1, whole))
    with ThreadPoolExecutor(STREAMS) as streams:
        list(streams.map(fetch, places))
    return time.perf_counter() - begun


async def moved(slab: Path, files: TlsFiles, times: int) -> dict[str, list[float]]:
    """Seconds of each fetch, from the other host and from the store, and of what stands beside them."""
    client, size_bytes = UploaderClient(), slab.stat().st_size

    async def ask(fd: int | None = None, **command: Any) -> dict[str, Any]:
        reply = await client.call(command, fd)
        assert reply["ok"], reply
        return reply

    await client.start()
    await ask(command="open", store=f"s3://{BUCKET}", job="job")
    named = {"generation": 1, "step": 7, "run": "run", "world": 1}
    with slab.open("rb") as file:
        share = await ask(file.fileno(), command="upload", slab=0, rank=0, size_bytes=size_bytes, **named)
    digest, objects = share["replicated"], share["objects"]
    manifest = (await ask(command="commit", digest=digest, objects=objects, **named))["manifest"]
    with listen("127.0.0.1") as own:
        tls = {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
        await ask(own.fileno(), command="listen", **tls)
    found: dict[str, list[float]] = {name: [] for name in ("peer", "socket", "store", "download")}

    async def fetch(peers: list[list[object]]) -> float:
        fd = os.memfd_create("slab")
        begun = time.perf_counter()
        await ask(fd, command="fetch", manifest=manifest, rank=0, world=1, peers=peers)
        seconds = time.perf_counter() - begun
        os.close(fd)
        return seconds

    whole = sum(stored["size_bytes"] for stored in objects if stored["kind"] == "replicated")
    keys = [(stored["key"], stored["size_bytes"]) for stored in objects]
    with other_host(slab, files, digest) as (offered, bare):
        for _ in range(times):
            found["peer"].append(await fetch([["other", "127.0.0.1", offered]]))
            found["socket"].append(await asyncio.to_thread(bare_socket, bare, files, whole))
            found["store"].append(await fetch([]))
            found["download"].append(await asyncio.to_thread(bare_download, keys))
    await client.stop()
    return found


def ratio(found: dict[str, list[float]], ours: str, theirs: str) -> float:
    """The median over the rounds of one by the other."""
    return statistics.median(mine / other for mine, other in zip(found[ours], found[theirs], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=800_000_000)
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--python", type=Path, help="of an environment with TensorFlow")
    parser.add_argument("--serve", type=Path)
    parser.add_argument("--tls", type=Path)
    parser.add_argument("--digest")
    options = parser.parse_args()
    if options.serve is not None:
        names = {"ca": "ca.pem", "cert": "node.pem", "key": "node.key"}
        serve(options.serve, TlsFiles(**{field: options.tls / name for field, name in names.items()}), options.digest)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        found = own_slab(folder, options.bytes, options.times, options.python)
        slab = folder / "slab"
        write_slab(slab, options.bytes)
        authority = make_authority("bench", time.time())
        files = write_files(folder / "tls", authority.certificate, *issue(authority, ["127.0.0.1"], time.time()))
        with sink(folder / "server", keep=True) as endpoint:
            os.environ.update(endpoint)
            found |= asyncio.run(moved(slab, files, options.times))
    pairs: dict[str, tuple[Callable[[], float], float]] = {
        "own": (lambda: ratio(found, "kept", "read"), OWN_MAX),
        "peer": (lambda: ratio(found, "peer", "socket"), PEER_MAX),
        "store": (lambda: ratio(found, "store", "download"), STORE_MAX),
    }
    values = {name: measure() for name, (measure, _) in pairs.items()}
    for name, value in values.items():
        print(f"{name}: {value:.2f}, goal {pairs[name][1]}")
    print(
        json.dumps(
            {
                "name": "restore",
                "value": values,
                "goal": {name: goal for name, (_, goal) in pairs.items()},
                "ok": all(value <= pairs[name][1] for name, value in values.items()),
                "bytes": options.bytes,
                "seconds": found,
                "load_average": os.getloadavg(),
            }
        )
    )


if __name__ == "__main__":
    main()
