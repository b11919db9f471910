"""What can be looked at before a job starts: a finding says what is there, whether that will do, and what would help.

Nothing here decides or is kept; a check that can not be made is a finding, too.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from keepstep import kernel
from keepstep.adapters.etcd_member import EtcdMissing, find_etcd
from keepstep.adapters.memory import available_bytes
from keepstep.adapters.nvml import parse_line
from keepstep.app.connecting import connect_store
from keepstep.app.launch_checks import SMDDPRUN, check_launcher, has_program
from keepstep.app.measuring import Finding, copy_rate, hash_rate, look_at_disk, look_at_gpus, processors
from keepstep.app.setting_up import check_use, deaf_process, demand_trust_off, has_trust
from keepstep.app.showing import size
from keepstep.checkpoint.probe import probe_store
from keepstep.core.job import PORT_SPAN, JobSpec
from keepstep.core.policy import Policy
from keepstep.core.values import frozen
from keepstep.errors import ConfigError
from keepstep.intake.contract import Contract, choose_strategy, count_gpus, parts_of, read_mpi
from keepstep.ports import GpuSample
from keepstep.ports.store import StoreError

SLABS_BYTES_MIN = 3 << 30
"""Three slabs of a state of a gigabyte."""
_PYTHON_S = 60.0
_TESTED = ("2.13", "2.16", "2.19", "2.21")
"""Minor versions of TensorFlow that the tests are run with."""
_LOOK = """
import importlib.metadata as m, json, os, platform, sys
def of(*names):
    for name in names:
        try: return m.version(name)
        except m.PackageNotFoundError: pass
found = {name: of(*names) for name, names in {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "intel-tensorflow"), "keras": ("keras",),
    "tf_keras": ("tf_keras", "tf-keras"), "horovod": ("horovod",), "smdistributed": ("smdistributed-dataparallel",),
}.items()}
print(json.dumps(dict(found, python=platform.python_version(), executable=sys.executable)))
"""


def ask_driver() -> list[GpuSample]:
    """One poll of the GPU probe, in a process that can be killed; nothing where it does not answer."""
    command = [*kernel.interpreter(), "-m", "keepstep.adapters.nvml", "--once"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return parse_line(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return []


@frozen
class Subject:
    """What is looked at.

    Attributes:
        store: where checkpoints would go; None for nowhere.
        environment: that of the script.
        scratch: where the agent keeps what need not outlive the container.
        port_base: first of the workers' ports.
        devices: where GPUs are seen.
        ask_gpus: what the driver says of them.
        speed: whether processors and memory are measured, which takes two seconds.
    """

    contract: Contract
    policy: Policy
    store: str | None
    environment: Mapping[str, str]
    scratch: Path
    port_base: int
    devices: Path = Path("/dev")
    ask_gpus: Callable[[], list[GpuSample]] = ask_driver
    speed: bool = True


def examine(subject: Subject) -> Iterator[Finding]:
    """All checks, the quick ones first; one that fails in a way of its own says so and stops no other."""
    checks: tuple[tuple[str, Callable[[Subject], Iterator[Finding]]], ...] = (
        ("process", _process), ("hosts", _hosts), ("memory", _memory), ("disk", _disk), ("ports", _ports),
        ("speed", _speed),
        ("etcd", _etcd), ("GPU", _gpu), ("Python", _python), ("launch", _launch), ("store", _store),
    )  # fmt: skip
    for name, check in checks:
        try:
            yield from check(subject)
        except (OSError, ValueError) as error:
            yield Finding(name, "bad", str(error), "see what the system says of it")


def _process(subject: Subject) -> Iterator[Finding]:
    """Who hears SIGTERM."""
    deaf = deaf_process(subject.contract.paths)
    if deaf:
        found = f"process 1 is {deaf}, which passes no SIGTERM on: a stop would save nothing"
        fix = "start it by `exec keepstep ...`, or make it the image's ENTRYPOINT in exec form"
        yield Finding("process", "bad", found, fix)
    else:
        heard = "process 1 hears SIGTERM" if deaf == "" else "who gets SIGTERM can be seen in a training container only"
        yield Finding("process", "ok", heard)


def _hosts(subject: Subject) -> Iterator[Finding]:
    contract = subject.contract
    for host in contract.hosts:
        if host in ("localhost", contract.current_host) and len(contract.hosts) == 1:
            yield Finding("hosts", "ok", f"one host, {host}; runs {contract.entry} as {contract.kind}")
            return
        try:
            address = socket.gethostbyname(host)
        except OSError as error:
            fix = "names come late in a new cluster, and keepstep waits for them; see to DNS where they never come"
            yield Finding("hosts", "warn", f"{host}: {error}", fix)
            continue
        yield Finding("hosts", "ok", f"{host} is {address}")
    if subject.store is None and subject.policy.coordination.endpoints == "embedded":
        try:
            demand_trust_off(subject.policy)
        except ConfigError as error:
            yield Finding("hosts", "bad", error.found, f"give {error.wanted}")


def _memory(subject: Subject) -> Iterator[Finding]:
    free = available_bytes()
    found = f"{size(free)} free: a state of {size(free // 4)} has room for its three slabs beside the training"
    if free < SLABS_BYTES_MIN:
        yield Finding("memory", "warn", found, "take an instance with more memory, or a smaller model")
    else:
        yield Finding("memory", "ok", found)


def _disk(subject: Subject) -> Iterator[Finding]:
    paths = subject.contract.paths
    for what, folder in (("scratch", subject.scratch), ("output", paths.output_data), ("model", paths.model)):
        yield look_at_disk(what, folder)


def _speed(subject: Subject) -> Iterator[Finding]:
    """What a preflight compares with other hosts; of one alone it can only be told."""
    if not subject.speed:
        return
    threads = processors()
    hashed, copied = hash_rate(threads) / 1e6, copy_rate() / 1e6
    yield Finding("speed", "ok", f"{threads} processors hash {hashed:.0f} MB/s; one copies {copied:.0f} MB/s in memory")


def _ports(subject: Subject) -> Iterator[Finding]:
    policy, wanted = subject.policy, []
    if len(subject.contract.hosts) > 1:
        wanted = [subject.port_base, subject.port_base + PORT_SPAN - 1]
        if policy.coordination.endpoints == "embedded":
            wanted += [policy.coordination.port, policy.coordination.port + 1]
    wanted.append(int(policy.telemetry.listen.rpartition(":")[2]))
    taken = [port for port in wanted if port and not _is_free(port)]
    if taken:
        fix = "free them, or choose others: coordination.port, telemetry.listen, --port-base"
        yield Finding("ports", "bad", f"taken: {', '.join(map(str, taken))}", fix)
    else:
        yield Finding("ports", "ok", f"free: {', '.join(str(port or 'any') for port in wanted)}")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def _etcd(subject: Subject) -> Iterator[Finding]:
    if len(subject.contract.hosts) < 2 or subject.policy.coordination.endpoints != "embedded":
        yield Finding("etcd", "ok", "none is needed here")
        return
    try:
        yield Finding("etcd", "ok", str(find_etcd(subject.environment.get("PATH"))))
    except EtcdMissing as error:
        yield Finding("etcd", "bad", str(error).removesuffix(f": {error.hint}"), error.hint)


def _gpu(subject: Subject) -> Iterator[Finding]:
    devices = sorted(path.name for path in subject.devices.glob("nvidia[0-9]*"))
    if not devices:
        yield Finding("GPU", "ok", "none: training goes on the processors")
        return
    yield from look_at_gpus(subject.ask_gpus(), len(devices))
    program = shutil.which("nvidia-smi", path=subject.environment.get("PATH"))
    if program is None:
        yield Finding("GPU", "warn", f"{len(devices)}, and no nvidia-smi to ask", "use an image with NVIDIA's tools")
        return
    query = [program, "--query-gpu=name,driver_version,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("GPU", "bad", "nvidia-smi hangs", "start the job again: this host wants repair")
        return
    for line in done.stdout.splitlines():
        *what, errors = [part.strip() for part in line.split(",")]
        sick = errors.isdigit() and int(errors) > 0
        found = f"{', '.join(what)}; uncorrectable errors: {errors}"
        yield Finding("GPU", "bad" if sick else "ok", found, "start the job again on another host" if sick else "")
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        yield Finding("GPU", "bad", f"nvidia-smi ended with {done.returncode}: {said[:200]}", "see to the driver")


def _python(subject: Subject) -> Iterator[Finding]:
    """The user's interpreter and what it would import, asked without importing it."""
    python = subject.policy.launch.python
    try:
        done = subprocess.run(
            [python, "-c", _LOOK], capture_output=True, text=True, errors="replace", timeout=_PYTHON_S, check=False,
            cwd=subject.contract.code_dir, env=dict(subject.environment),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("Python", "bad", f"{python}: {error}", "name the script's interpreter by launch.python")
        return
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Finding("Python", "bad", f"{python}: {said}", "see to the interpreter, or name another by launch.python")
        return
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        found["python"], found["tensorflow"]
    except (ValueError, IndexError, KeyError, TypeError):
        yield Finding("Python", "bad", f"{python} is no Python", "name the script's interpreter by launch.python")
        return
    if tuple(map(int, re.findall(r"\d+", found["python"])[:2])) < (3, 9):
        yield Finding("Python", "bad", f"{found['python']} ({found['executable']})", "3.9 or later is wanted")
    else:
        yield Finding("Python", "ok", f"{found['python']} ({found['executable']})")
    yield from _tensorflow(found, len(subject.contract.hosts))


def _tensorflow(found: Mapping[str, Any], hosts: int) -> Iterator[Finding]:
    version, keras = found["tensorflow"], found["keras"]
    if version is None:
        yield Finding(
            "TensorFlow", "warn", "not installed for this interpreter", "install it there, or set launch.python"
        )
        return
    minor = ".".join(version.split(".")[:2])
    if minor in _TESTED:
        yield Finding("TensorFlow", "ok", version)
    else:
        yield Finding("TensorFlow", "warn", version, f"keepstep is tested with {', '.join(_TESTED)}")
    legacy = "" if found["tf_keras"] is None else f", tf_keras {found['tf_keras']}"
    if keras is not None and keras.startswith("3.") and hosts > 1:
        told = f"{keras}{legacy}: its fit fails on several hosts; keepstep repairs what a probe finds broken"
        yield Finding("Keras", "ok", told)
    else:
        yield Finding("Keras", "ok", f"{keras}{legacy}")


def _launch(subject: Subject) -> Iterator[Finding]:
    """What the job's processes are started as, by the very steps that a job's own start takes."""
    contract, launch = subject.contract, subject.policy.launch
    gpus = count_gpus(subject.devices)
    try:
        parts = parts_of(contract, launch.data_service)
        strategy = choose_strategy(contract, launch.strategy, gpus, len(parts.trainers))
        check_use(subject.policy, strategy)
        has_smddprun = has_program(SMDDPRUN, subject.environment)
        mpi = read_mpi(contract, strategy, launch.ranks, gpus, len(parts.trainers), has_smddprun)
        job = JobSpec(
            name=contract.job_name, host=contract.current_host, hosts=tuple(host for part in parts for host in part),
            node_id="doctor", boot=0, address=contract.current_host, port_base=subject.port_base, run="doctor",
            strategy=strategy, python=launch.python, script=contract.program, arguments=contract.arguments,
            has_store=subject.store is not None, kind=contract.kind, mpi=mpi,
        )  # fmt: skip
        trust = has_trust(subject.policy, len(contract.hosts), subject.store)
        check_launcher(job, subject.environment, trust, contract.code_dir)
    except ConfigError as error:
        yield Finding("launch", "bad", f"{error.key}: {error.found}" if error.key else error.found, error.wanted)
        return
    counts = zip(parts, ("train", "feed", "idle"), strict=True)
    told = ", ".join(f"{what} {len(hosts)}" for hosts, what in counts if hosts)
    yield Finding("launch", "ok", f"{strategy}; hosts that {told}")


def _store(subject: Subject) -> Iterator[Finding]:
    """The very probe that a job begins with."""
    if subject.store is None:
        fix = "give one, as KEEPSTEP_STORE=s3://bucket/prefix"
        yield Finding("store", "warn", "none: what is in memory is lost with the host", fix)
        return
    try:
        probe_store(connect_store(subject.store), subject.contract.job_name, f"doctor-{uuid.uuid4().hex[:8]}")
    except StoreError as error:
        fix = "the role wants s3:GetObject, PutObject, DeleteObject, ListBucket, AbortMultipartUpload there; the store "
        yield Finding("store", "bad", f"{subject.store}: {error}", fix + "must honour If-Match and If-None-Match")
        return
    yield Finding("store", "ok", f"{subject.store}: written, compared and swapped, read back, deleted")
