"""How long a sealed snapshot takes to be committed to S3, beside what carries the same bytes with nothing around it.

Server and client have one core each. Each measurement in a process of its own, all in turn. The last line of the output
is one JSON object. README.md beside this file says how to read it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SINK = ROOT / "benchmarks" / "s3_sink.py"
MODES = ("boto3", "awscrt", "keepstep")
BUCKET, TENSORS, RATIO_MAX, SHARE_ERROR_MAX, UPLOADER_BYTES_MAX = "bench", 256, 1.15, 0.01, 100 << 20
AGENT_GROWTH_BYTES_MAX = 1 << 20
"""The agent hands a descriptor on: what it has in memory does not depend on what is uploaded."""
SERVER_CORE, CLIENT_CORE = 0, 1
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1"}


def write_slab(path: Path, size_bytes: int) -> None:
    """A slab of replicated tensors of that many bytes, and a small local one."""
    each, at, header = size_bytes // TENSORS, 0, dict[str, Any]()
    for name, length in [*((f"replicated/{n:04}", each) for n in range(TENSORS)), ("local/seed", 4096)]:
        header[name] = {"dtype": "U8", "shape": [length], "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(header).encode()
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = at
        while left:
            left -= file.write(block[: min(left, len(block))])


@contextlib.contextmanager
def sink(folder: Path, keep: bool = False) -> Iterator[dict[str, str]]:
    """A server on its core, which keeps large objects where it is told to; what a client needs in its environment."""
    from keepstep.adapters.certificates import issue, make_authority, write_files

    authority = make_authority("bench", time.time())
    files = write_files(folder, authority.certificate, *issue(authority, ["127.0.0.1"], time.time()))
    with subprocess.Popen(
        [sys.executable, str(SINK), str(files.cert), str(files.key), *(["keep"] if keep else [])],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: os.sched_setaffinity(0, {SERVER_CORE}),
    ) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline())
            endpoint = {"AWS_ENDPOINT_URL": f"https://127.0.0.1:{port}", "AWS_CA_BUNDLE": str(files.ca)}
            yield {**CREDENTIALS, **endpoint, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        finally:
            server.terminate()


def play(mode: str, slab: Path, hosts: int = 1) -> dict[str, Any]:
    """One process that uploads once, on the client's core, to a server of its own."""
    with tempfile.TemporaryDirectory() as folder, sink(Path(folder)) as endpoint:
        environment = {**os.environ, **endpoint, "PYTHONPATH": str(ROOT / "runtime")}
        done = subprocess.run(
            [sys.executable, __file__, "--mode", mode, "--slab", str(slab), "--hosts", str(hosts)],
            env=environment, capture_output=True, text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {CLIENT_CORE}),
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{mode}: {done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


# --- the modes, each in its own process ------------------------------------------------------------------------------


def with_boto3(slab: Path) -> dict[str, Any]:
    import boto3

    client = boto3.client("s3")
    begun = time.perf_counter()
    client.upload_file(str(slab), BUCKET, "object", ExtraArgs={"ChecksumAlgorithm": "CRC32C"})
    return {"seconds": time.perf_counter() - begun}


def with_awscrt(slab: Path) -> dict[str, Any]:
    import botocore.session
    from awscrt.auth import AwsCredentialsProvider
    from s3transfer.crt import BotocoreCRTRequestSerializer, CRTTransferManager, create_s3_crt_client

    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    credentials = AwsCredentialsProvider.new_static(*(os.environ[name] for name in names))
    region, ca = os.environ["AWS_DEFAULT_REGION"], os.environ["AWS_CA_BUNDLE"]
    client = create_s3_crt_client(region, crt_credentials_provider=credentials, verify=ca)
    where = {"region_name": region, "endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    serializer = BotocoreCRTRequestSerializer(botocore.session.Session(), where)
    begun = time.perf_counter()
    with CRTTransferManager(client, serializer) as manager:
        manager.upload(str(slab), BUCKET, "object", extra_args={"ChecksumAlgorithm": "CRC32C"}).result()
    return {"seconds": time.perf_counter() - begun}


async def with_keepstep(slab: Path, hosts: int) -> dict[str, Any]:
    from keepstep.adapters.uploader import UploaderClient

    async def ask(fd: int | None = None, **command: Any) -> dict[str, Any]:
        reply = await client.call(command, fd)
        assert reply["ok"], reply
        return reply

    client, size_bytes = UploaderClient(), slab.stat().st_size
    await client.start()
    await ask(command="open", store=f"s3://{BUCKET}", job="job")
    await ask(command="head")  # as every agent does at its start; the store is opened and probed by it
    with slab.open("rb") as file:
        before_bytes = memory_bytes("self", "VmRSS")
        begun, shares = time.perf_counter(), []
        named = {"generation": 1, "step": 7, "run": "run", "world": hosts}
        for rank in range(hosts):
            shares.append(await ask(file.fileno(), command="upload", slab=0, rank=rank, size_bytes=size_bytes, **named))
        objects = [stored for share in shares for stored in share["objects"]]
        await ask(command="commit", digest=shares[0]["replicated"], objects=objects, **named)
        seconds = time.perf_counter() - begun
    growth_bytes = memory_bytes("self", "VmHWM") - before_bytes
    peak_bytes = memory_bytes(client.pid, "VmHWM")
    await client.stop()
    replicated = [stored["size_bytes"] for stored in objects if stored["kind"] == "replicated"]
    return {"seconds": seconds, "peak_bytes": peak_bytes, "growth_bytes": growth_bytes, "replicated": replicated}


def memory_bytes(pid: int | str, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--slab", type=Path)
    parser.add_argument("--hosts", type=int, default=1)
    options = parser.parse_args()
    if options.mode is not None:
        modes = {"boto3": with_boto3, "awscrt": with_awscrt}
        keepstep = options.mode == "keepstep"
        found = (
            asyncio.run(with_keepstep(options.slab, options.hosts)) if keepstep else modes[options.mode](options.slab)
        )
        print(json.dumps(found))
        return
    sys.path.insert(0, str(ROOT / "runtime"))
    from keepstep.adapters.s3 import PART_BYTES_MIN, S3Options

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        slab = Path(folder) / "slab"
        write_slab(slab, options.bytes)
        rounds = []
        for number in range(options.rounds):
            rounds.append({mode: play(mode, slab) for mode in MODES})
            told = ", ".join(f"{mode} {found['seconds']:.2f} s" for mode, found in rounds[-1].items())
            print(f"round {number + 1}: {told}", flush=True)
        shares = {hosts: play("keepstep", slab, hosts)["replicated"] for hosts in (2, 4)}
    ratios = [r["keepstep"]["seconds"] / min(r["boto3"]["seconds"], r["awscrt"]["seconds"]) for r in rounds]
    whole = TENSORS * (options.bytes // TENSORS)
    share_error = max(abs(share * hosts / whole - 1) for hosts, each in shares.items() for share in each)
    peak = max(r["keepstep"]["peak_bytes"] for r in rounds)
    growth = max(r["keepstep"]["growth_bytes"] for r in rounds)
    allowed = UPLOADER_BYTES_MAX + (S3Options().parts_in_flight + 1) * PART_BYTES_MIN
    value = statistics.median(ratios)
    print(f"sealed to committed: {value:.2f} of the faster of boto3 and awscrt")
    print(f"uploader {peak / 1e6:.0f} MB at the most; who has it upload grew by {growth / 1e6:.1f} MB at the most")
    print(f"shares of 2 and 4 hosts: off by {share_error:.2%} at the most")
    reached = value <= RATIO_MAX and share_error <= SHARE_ERROR_MAX
    print(json.dumps({
        "name": "upload", "value": value, "goal": RATIO_MAX,
        "ok": reached and peak <= allowed and growth <= AGENT_GROWTH_BYTES_MAX,
        "server": "benchmarks/s3_sink.py over TLS, one core; the client has the other",
        "bytes": options.bytes, "ratios": ratios, "rounds": rounds, "share_error": share_error, "shares": shares,
        "uploader_peak_bytes": peak, "uploader_allowed_bytes": allowed, "agent_growth_bytes": growth,
        "load_average": os.getloadavg(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
