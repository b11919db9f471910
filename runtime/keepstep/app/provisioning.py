"""What a job brings along is got before anything else: its code, its packages, what a shell makes of its arguments.

Code and packages are got once per host, by a process of its own (`app/provisioner.py`); an agent that is started anew
finds it done.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep import init, kernel
from keepstep.errors import ConfigError, InterruptionError, StoreRefusedError
from keepstep.intake.contract import CodeSource, Contract

MARK = ".keepstep-unfinished"
"""In a code folder that is being filled."""
_INSTALLED = "installed"
_REQUIREMENTS = "requirements.txt"
_ARN = "CA_REPOSITORY_ARN"
_SHELL_S = 30.0


def provide_code(source: CodeSource | None, earlier: tuple[int, ...]) -> None:
    """Fill the code folder, which is wanting, from where the job says its code is.

    Args:
        earlier: signals that asked an earlier agent of this container to stop.

    Raises:
        ConfigError: it is not to be had, or not to be unpacked.
        StoreRefusedError: S3 does not answer.
        InterruptionError: the job is to stop.
    """
    if source is None:
        return
    task = {
        "task": "fetch", "source": source.source, "into": str(source.into), "mark": MARK, "region": source.region,
        "endpoint": source.endpoint,
    }  # fmt: skip
    _carry_out(task, earlier, source.file, source.key)


def is_wanting(folder: Path) -> bool:
    """Whether a code folder holds nothing, or a part of what it should; one that holds anything else is the user's."""
    try:
        return not any(folder.iterdir()) or (folder / MARK).exists()
    except FileNotFoundError:
        return True
    except OSError as error:
        raise ConfigError(str(error), "a folder that can be read", key=str(folder)) from None


def provide_packages(
    contract: Contract, python: str, environment: Mapping[str, str], scratch: Path, earlier: tuple[int, ...]
) -> None:
    """Install what the code that the platform brought asks for, as AWS's toolkit does; not for programs.

    Raises:
        ConfigError: it can not be installed.
        InterruptionError: the job is to stop.
    """
    words = _wanted(contract)
    if not words:
        return
    done, listed = scratch / _INSTALLED, contract.code_dir / _REQUIREMENTS
    try:
        token = _token(contract.code_dir, python, words, listed.read_bytes() if listed.is_file() else b"")
        if done.exists() and done.read_text(encoding="utf-8", errors="replace") == token:
            return
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(str(error), "files that can be read, and a scratch folder to write to") from None
    task = {
        "task": "install", "python": python, "words": words, "folder": str(contract.code_dir),
        "environment": dict(environment), "arn": environment.get(_ARN),
    }  # fmt: skip
    _carry_out(task, earlier, str(contract.code_dir / words[-1]), "")
    with contextlib.suppress(OSError):  # a later agent asks pip again, which finds it all there
        done.write_text(token, encoding="utf-8")


def split_by_shell(arguments: tuple[str, ...], environment: Mapping[str, str], folder: Path) -> tuple[str, ...]:
    """What a shell makes of arguments that are put into its command line as they are, as older toolkits did.

    Raises:
        ConfigError: the shell does not understand them.
    """
    script = f'set -- {" ".join(arguments)}\nfor word in "$@"; do printf "%s\\0" "$word"; done'
    wanted, key = "arguments that a shell understands", "launch.arguments"
    try:
        found = subprocess.run(
            ["/bin/sh", "-c", script], cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL,
            capture_output=True, timeout=_SHELL_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the shell is not done with them after {_SHELL_S:.0f} s", wanted, key=key) from None
    if found.returncode:
        raise ConfigError(f"the shell says {found.stderr.decode(errors='replace').strip()}", wanted, key=key)
    return tuple(word.decode(errors="surrogateescape") for word in found.stdout.split(b"\0")[:-1])


def _wanted(contract: Contract) -> list[str]:
    """The words after `pip install`; none where nothing is asked for."""
    if not contract.is_submitted or contract.kind == "command":
        return []
    listed = ["-r", _REQUIREMENTS] if (contract.code_dir / _REQUIREMENTS).exists() else []
    return [*listed, "."] if contract.kind == "module" else listed


def _token(folder: Path, python: str, words: list[str], listed: bytes) -> str:
    """What the packages depend on, as one word."""
    return hashlib.sha256(json.dumps([str(folder), python, words]).encode() + listed).hexdigest()


def _carry_out(task: Mapping[str, Any], earlier: tuple[int, ...], file: str, key: str) -> None:
    answer = asyncio.run(_ask(task, earlier))
    if answer.get("error") == "store":
        raise StoreRefusedError(f"{file}: {key}: {answer['found']}", answer["hint"])
    if answer.get("error"):
        raise ConfigError(
            answer["found"], answer["wanted"], file=file, key=answer.get("key") or key, hint=answer.get("hint") or None
        )


async def _ask(task: Mapping[str, Any], earlier: tuple[int, ...]) -> dict[str, str]:
    """Have a process carry out a task; it ends at once where the job is to stop."""
    asked = [number for number in earlier if number in init.STOPPING]
    if asked:
        raise _interruption(asked[0])
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def note(number: int, _: object) -> None:
        asked.append(number)
        loop.call_soon_threadsafe(stopped.set)

    before = {number: signal.signal(number, note) for number in init.STOPPING}
    process = await asyncio.create_subprocess_exec(
        *(*kernel.interpreter(), "-m", "keepstep.app.provisioner"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    signal.pthread_sigmask(signal.SIG_UNBLOCK, init.STOPPING)
    working = loop.create_task(process.communicate(json.dumps(task).encode()))
    asking = loop.create_task(stopped.wait())
    try:
        await asyncio.wait([working, asking], return_when=asyncio.FIRST_COMPLETED)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, init.STOPPING)  # until the agent listens; what came has been noted
        for number, handler in before.items():
            signal.signal(number, handler)
        asking.cancel()
    if asked:
        if process.returncode is None:
            process.kill()
        await working
        raise _interruption(asked[0])
    said, _ = await working
    if process.returncode:
        raise ConfigError(
            f"the process that provides it ended with {process.returncode}", "memory and disk for it",
            hint="what it printed is in the log",
        )  # fmt: skip
    answer: dict[str, str] = json.loads(said)
    return answer


def _interruption(number: int) -> InterruptionError:
    return InterruptionError(f"interrupted by {signal.Signals(number).name} before anything was trained")
