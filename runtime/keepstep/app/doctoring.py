"""`keepstep doctor`: what a job would find here, in the container or on a laptop, and what to do about it."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keepstep.app.checkup import Subject, examine
from keepstep.app.measuring import Finding
from keepstep.app.places import forget_own_source
from keepstep.app.platform_look import Look, look
from keepstep.app.showing import table
from keepstep.core.quantities import parse_seconds
from keepstep.errors import ConfigError
from keepstep.intake.contract import BASE, ContractOptions, load_contract, read_environment, user_environment
from keepstep.intake.policy import load_policy

_LINGER_S_MAX = 86_400.0
_APPENDED = "train"
"""SageMaker gives it to every container that is not told otherwise."""
_ORDER = {"bad": 0, "warn": 1, "ok": 2}


def add_command(commands: Any) -> None:
    """Add `doctor` to the parser's commands."""
    text = "look at what a job would find here, and say what to do about it"
    parser = commands.add_parser("doctor", help=text, description=text)
    parser.add_argument("--base-dir", type=Path, default=BASE, help="(default /opt/ml)")
    parser.add_argument("--policy", help="a preset's name or a file")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KNOB=VALUE")
    parser.add_argument("--store", help="for checkpoints")
    parser.add_argument("--port-base", type=int, default=20000)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("script", nargs="?", help="what would be run (default: what the platform names)")
    platform = parser.add_argument_group("in a container of a job", "what the platform does, told while it lasts")
    platform.add_argument(
        "--aws", action="store_true", help="tell what the platform is and does, one JSON object a line"
    )
    platform.add_argument("--linger", default="10min", metavar="DURATION", help="for how long (default 10min)")
    platform.add_argument("--leave", metavar="HOST", help="have this host exit after half of that time")
    platform.add_argument("--exit-code", type=int, default=1, metavar="N", help="with this code (default 1)")
    platform.add_argument("--address", default="0.0.0.0", help="listen there alone (default: everywhere)")
    parser.set_defaults(command=doctor)


def doctor(options: argparse.Namespace) -> int:
    """Show a table with a row for each finding; 1 where something is bad. With --aws, tell what the platform does."""
    if options.aws:
        return look(_look(options), read_environment())
    try:
        findings = list(examine(_subject(options)))
    except ConfigError as error:
        findings = [Finding("contract", "bad", str(error), error.hint or f"wanted {error.wanted}")]
    findings.sort(key=lambda finding: _ORDER[finding.level])
    if options.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        print(table(("", "check", "found", "what to do"), [(f.level, f.check, f.found, f.fix) for f in findings]))
    return int(any(finding.level == "bad" for finding in findings))


def _look(options: argparse.Namespace) -> Look:
    """What was asked for.

    Raises:
        ConfigError: it can not be done.
    """
    if options.script not in (None, _APPENDED):
        raise ConfigError(f"found {options.script}", "no script with --aws: nothing is run", key="SCRIPT")
    try:
        linger_s = parse_seconds(options.linger)
    except ValueError as error:
        raise ConfigError(f"found {options.linger}", str(error), key="--linger") from None
    if linger_s > _LINGER_S_MAX:
        raise ConfigError(f"found {options.linger}", "a day at most", key="--linger")
    for key, number, most in (("--exit-code", options.exit_code, 255), ("--port-base", options.port_base, 65_535)):
        if not 0 <= number <= most:
            raise ConfigError(f"found {number}", f"0 to {most}", key=key)
    return Look(options.base_dir, linger_s, options.leave, options.exit_code, options.address, options.port_base)


def _subject(options: argparse.Namespace) -> Subject:
    """What is here, as a job would read it.

    Raises:
        ConfigError: it can not be used.
    """
    environ = read_environment()
    wanted = ContractOptions(options.script, (), options.policy, options.store)
    contract = load_contract(options.base_dir, environ, wanted)
    policy = load_policy(contract.policy_source, options.overrides)
    named = contract.store or policy.checkpoint.store
    environment = user_environment(contract, environ)
    forget_own_source(environment)
    return Subject(
        contract,
        policy,
        None if named == "none" else named,
        environment,
        Path(tempfile.gettempdir()),
        options.port_base,
    )
