"""What a person types: everything but `keepstep train`, which does not come through here."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from keepstep.adapters.clock import sleep
from keepstep.adapters.journal import JournalError
from keepstep.app import checkpoints, cordons, doctoring, simulating_health, submitting
from keepstep.app.faults import KINDS, parse_fault
from keepstep.app.local import Local, LocalRun
from keepstep.app.operating import Operator, describe, find_entry, open_coordinator, tell
from keepstep.app.replay import ReplayDiffers, journals_under, replay
from keepstep.app.simulating import simulate
from keepstep.errors import ConfigError, ExitCode, KeepstepError
from keepstep.intake.policy import explain, json_schema, load_sourced_policy

_WATCH_S = 1.0
_OF_A_SIGNAL = 128
"""As shells have it: with the signal's number, the exit code of who was ended by it."""


class _Parser(argparse.ArgumentParser):
    """A wrong command line is a configuration error, exit code 78."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(message, f"`{self.prog} --help` shows", file="command line")


def main(argv: list[str]) -> int:
    """Run one command and return its exit code; the one place that turns any error into one line."""
    try:
        options = _parser().parse_args(argv)
        code = int(options.command(options))
        sys.stdout.flush()
        return code
    except KeepstepError as error:
        print(f"keepstep: {error.describe()}", file=sys.stderr)
        return int(error.exit_code)
    except (JournalError, ReplayDiffers) as error:
        print(f"keepstep: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("keepstep: interrupted", file=sys.stderr)
        return _OF_A_SIGNAL + signal.SIGINT
    except BrokenPipeError:  # whoever reads it has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is not written at the exit
        return _OF_A_SIGNAL + signal.SIGPIPE
    except Exception:  # whatever it is, it is ours
        traceback.print_exc()
        return int(ExitCode.BUG)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="keepstep", description="Fault-tolerant TensorFlow training on SageMaker.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("train", help="supervise training on this host; what a container runs")

    local = commands.add_parser("local", help="run a job of several hosts on this machine")
    local.add_argument("--hosts", type=int, default=2, help="how many (default 2)")
    local.add_argument("--policy", default="default", help="a preset's name or a file (default: default)")
    local.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="KNOB=VALUE", help="set one knob"
    )
    local.add_argument(
        "--store", help="a directory, s3://bucket/prefix or none, for checkpoints (default: in the --out folder)"
    )
    local.add_argument("--python", help="the script's interpreter (default: the policy's)")
    local.add_argument("--out", type=Path, help="folder for files, logs and the summary (default: a new one)")
    local.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND:RANK@STEP",
        help=f"inflict a fault once a rank has completed a step: {', '.join(KINDS)}",
    )
    local.add_argument(
        "--wrap",
        default="",
        metavar="COMMAND",
        help="run each host as the child of this command, as 'unshare --pid --fork --mount-proc'",
    )
    local.add_argument("--quiet", action="store_true", help="show progress, not what the script prints")
    local.add_argument("script")
    local.add_argument("arguments", nargs=argparse.REMAINDER)
    local.set_defaults(command=_local)

    policy = commands.add_parser("policy", help="check or explain a policy, or print its JSON schema")
    policy.add_argument("what", choices=("check", "explain", "schema"))
    policy.add_argument("source", nargs="?", default="default", help="a preset's name or a file")
    policy.add_argument("--set", action="append", default=[], dest="overrides", metavar="KNOB=VALUE")
    policy.set_defaults(command=_policy)

    again = commands.add_parser("replay", help="fold journals again and compare every turn")
    again.add_argument("journal", nargs="+", type=Path, help="a journal, or a folder that holds some")
    again.add_argument("--show", action="store_true", help="print every turn: time, event, reasons, actions")
    again.set_defaults(command=_replay)

    _add_operating(commands)
    cordons.add_command(commands)
    checkpoints.add_commands(commands)
    submitting.add_command(commands)
    doctoring.add_command(commands)

    simulate = commands.add_parser("simulate", help="play seeded faults against a policy in virtual time")
    simulate.add_argument("policy", nargs="?", default="default")
    simulate.add_argument("--seeds", default="0:100", metavar="FROM:TO")
    simulate.add_argument("--trace", action="store_true", help="print every turn that decided something")
    simulating_health.add_options(simulate)
    simulate.set_defaults(command=_simulate)
    return parser


def _local(options: argparse.Namespace) -> int:
    if not 1 <= options.hosts <= 24:
        raise ConfigError(f"{options.hosts} hosts", "1 to 24", key="--hosts")
    script = Path(options.script)
    if not script.is_file():
        raise ConfigError(f"{options.script} is no file", "a Python script", key="SCRIPT")
    folder = (options.out or Path(tempfile.mkdtemp(prefix="keepstep-local-"))).absolute()
    overrides = list(options.overrides)
    if options.python:
        python = Path(options.python)
        overrides.append(f"launch.python={python.absolute() if python.exists() else options.python}")
    store = options.store or str(folder / "store")
    policy = Path(options.policy)
    faults = tuple(parse_fault(text, options.hosts) for text in options.fault)
    if options.wrap and any(fault.kind != "kill-host" for fault in faults):
        raise ConfigError(
            "--fault with --wrap", "kill-host; the others need process ids of this namespace", key="--fault"
        )
    plan = LocalRun(
        hosts=options.hosts,
        script=str(script.absolute()),
        arguments=tuple(options.arguments),
        policy=str(policy.absolute()) if policy.exists() else options.policy,
        overrides=tuple(overrides),
        store=store if "://" in store or store == "none" else str(Path(store).absolute()),
        folder=folder,
        faults=faults,
        quiet=options.quiet,
        wrap=tuple(shlex.split(options.wrap)),
    )
    return asyncio.run(Local(plan).run())


def _policy(options: argparse.Namespace) -> int:
    if options.what == "schema":
        print(json.dumps(json_schema(), indent=2))
        return 0
    sourced = load_sourced_policy(options.source, options.overrides)
    print(explain(sourced) if options.what == "explain" else f"{options.source}: valid")
    return 0


def _replay(options: argparse.Namespace) -> int:
    for path in options.journal:
        found = journals_under(path) if path.is_dir() else [path]
        if not found:
            raise ConfigError(f"{path} holds no journal", "a journal or a folder with some", key="JOURNAL")
        for journal in found:
            turns = 0
            for turn in replay(journal):
                turns += 1
                if options.show:
                    notes = "; ".join(f"{note.reason.value} {note.detail}".strip() for note in turn.decision.notes)
                    actions = ", ".join(type(action).__name__ for action in turn.decision.actions)
                    print(f"{turn.now:.6f} {turn.event.kind} -> {notes} => {actions}")
            print(f"{journal}: {turns} turns, every decision reproduced")
    return 0


def _add_operating(commands: Any) -> None:
    """The commands that reach a running job through its etcd."""
    texts = {
        "status": "show a running job's hosts, their ranks and steps",
        "drain": "have the job stop at one agreed step, commit it and end with 143",
        "restart": "have all workers stop at one agreed step and start anew from there",
        "cordon": "have the job go on without a host",
        "uncordon": "let a cordoned host take part again",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--at", type=Path, metavar="PATH",
            help="an agent's scratch folder, or the --out folder of `keepstep local` (default: the newest job here)",
        )  # fmt: skip
        if name == "status":
            command.add_argument("--json", action="store_true", help="one JSON object")
            command.add_argument("--watch", action="store_true", help="again every second, until the job has ended")
        if name == "drain":
            command.add_argument("--grace", type=float, default=110.0, metavar="SECONDS", help="(default 110)")
        if name.endswith("cordon"):
            command.add_argument("host")
        if name == "cordon":
            command.add_argument("--why", default="", help="for those who wonder later")
        command.set_defaults(command=lambda options, name=name: asyncio.run(_operate(name, options)))


async def _operate(name: str, options: argparse.Namespace) -> int:
    if name == "drain" and not 1 <= options.grace <= 3600:
        raise ConfigError(f"found {options.grace:g}", "1 to 3600 seconds", key="--grace")
    entry = find_entry(options.at)
    coordinator = open_coordinator(entry)
    operator = Operator(coordinator, entry.prefix)
    try:
        match name:
            case "status":
                await _show_status(operator, entry.job, options)
            case "drain":
                print(await operator.drain(options.grace))
            case "restart":
                print(await operator.restart())
            case "cordon":
                print(await operator.cordon(options.host, options.why))
            case "uncordon":
                print(await operator.uncordon(options.host))
    finally:
        await coordinator.close()
    return 0


async def _show_status(operator: Operator, job: str, options: argparse.Namespace) -> None:
    while True:
        described = describe(await operator.records())
        print(json.dumps(described) if options.json else tell(job, described), flush=True)
        if not options.watch or described["generation"].get("phase") == "ended":
            return
        await sleep(_WATCH_S)
        print(flush=True)


def _simulate(options: argparse.Namespace) -> int:
    if options.health:
        return simulating_health.health(options)
    return simulate(options.policy, options.seeds, options.trace)
