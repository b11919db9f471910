"""The agent's beginning: read what is to be done, begin the worker's process, and only then load all the rest."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from keepstep.adapters.init_link import InitLink
from keepstep.adapters.processes import LineQueue, standard_sinks
from keepstep.app.forerunner import Forerunner, begin
from keepstep.app.options import find_base_dir, parse_train_options
from keepstep.app.places import write_failure
from keepstep.app.setting_up import Setup, set_up
from keepstep.errors import ExitCode, KeepstepError
from keepstep.intake.contract import read_environment

_LAST_WORDS_S = 2.0


def run(words: list[str]) -> int:
    """Run this host's agent under init, and return the host's exit code."""
    sys.excepthook = end_of_a_bug
    environ = read_environment()
    lines = LineQueue(standard_sinks()[1])
    base_dir = find_base_dir(words)
    try:
        options = parse_train_options(words)
        base_dir = options.base_dir
        init = InitLink.from_environment(environ)
        setup = set_up(options, environ, init.state)
        forerunner = begin(setup.job, setup.environment, setup.places)
        return run_agent(setup, init, lines, forerunner)
    except KeepstepError as error:
        return report(error, base_dir, lines)
    except ExceptionGroup as group:  # of what ran side by side
        ours, bugs = group.split(KeepstepError)
        if ours is None or bugs is not None:
            raise
        return report(first_of(ours), base_dir, lines)
    finally:
        lines.close(_LAST_WORDS_S)


def run_agent(setup: Setup, init: InitLink, lines: LineQueue, forerunner: Forerunner | None) -> int:
    """Load the loop and all its parts, beside the forerunner's own start, and run it."""
    from keepstep.app.node import Agent

    gc.freeze()  # what is loaded stays, so that looking through it for garbage again and again is in vain
    gc.enable()
    return asyncio.run(Agent(setup, init, lines, forerunner).run())


def report(error: KeepstepError, base_dir: Path, lines: LineQueue) -> int:
    """Say what is wrong, to people and in the failure file; return the exit code."""
    text = error.describe()
    lines.post(f"keepstep | {text}".encode())
    try:
        write_failure(base_dir / "output" / "failure", text)
    except OSError as second:
        lines.post(f"keepstep | the failure file can not be written: {second}".encode())
    return int(error.exit_code)


def first_of(group: ExceptionGroup[KeepstepError]) -> KeepstepError:
    """The error that ended the group: the others were under way when it came."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, ExceptionGroup) else first


def end_of_a_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End with the code by which init knows that another agent may do better; Python's own would be 1."""
    traceback.print_exception(kind, error, trace)
    sys.stderr.flush()
    os._exit(ExitCode.BUG)
