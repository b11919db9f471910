"""`keepstep doctor`: what a job would find here, in the container or on a laptop, and what to do about it."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keepstep.app.checkup import Finding, Subject, examine
from keepstep.app.launching import forget_own_source
from keepstep.app.showing import table
from keepstep.errors import ConfigError
from keepstep.intake.contract import BASE, ContractOptions, load_contract, read_environment, user_environment
from keepstep.intake.policy import load_policy

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
    parser.set_defaults(command=doctor)


def doctor(options: argparse.Namespace) -> int:
    """Show a table with a row for each finding; 1 where something is bad."""
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
