"""`keepstep cordons`: the store's list of cordons, shown and edited."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from keepstep.app.picking import open_store
from keepstep.app.showing import date, table
from keepstep.checkpoint.cordons import cordoned_jobs, lift_cordons, read_cordons
from keepstep.errors import ConfigError, StoreRefusedError
from keepstep.ports.store import ObjectStore, StoreError

_COLUMNS = ("what", "host", "by", "since", "why")


def add_command(commands: Any) -> None:
    """Add `cordons` to the parser's commands."""
    text = "show which GPUs and machines a job's store has as cordoned, or lift that"
    command = commands.add_parser("cordons", help=text, description=text)
    command.add_argument("store", metavar="STORE", help="s3://bucket/prefix or a directory")
    command.add_argument("--job", help="whose (default: the only one in the store that has any)")
    command.add_argument("--endpoint", help="of an S3 that is not Amazon's")
    command.add_argument(
        "--lift", action="append", default=[], metavar="WHAT", help="let it take part again: as shown, or all"
    )
    command.add_argument("--json", action="store_true")
    command.set_defaults(command=_cordons)


def _cordons(options: argparse.Namespace) -> int:
    try:
        store = open_store(options.store, options.endpoint, "STORE")
        job = options.job or _only(store, options.store)
        found = read_cordons(store, job) if job else []
        if options.lift:
            known = {entry.what for entry in found}
            unknown = sorted(set(options.lift) - known - {"all"})
            if unknown:
                wanted = ", ".join(sorted(known)) or "nothing is cordoned"
                raise ConfigError(f"found {', '.join(unknown)}", f"all, or some of: {wanted}", key="--lift")
            lifted = known if "all" in options.lift else set(options.lift)
            lift_cordons(store, job, sorted(lifted))
            found = [entry for entry in found if entry.what not in lifted]
    except StoreError as error:
        raise StoreRefusedError(f"{options.store}: {error}") from error
    if options.json:
        print(json.dumps({"job": job, "cordons": [asdict(entry) for entry in found]}))
    elif found:
        print(table(_COLUMNS, ([each.what, each.host, each.by, date(int(each.at)), each.why] for each in found)))
    else:
        print(f"{options.store}: nothing is cordoned")
    return 0


def _only(store: ObjectStore, name: str) -> str:
    """The one job that has such a list; empty where none has.

    Raises:
        ConfigError: there are several.
    """
    jobs = cordoned_jobs(store)
    if len(jobs) > 1:
        raise ConfigError(f"{name} holds the jobs {', '.join(jobs)}", "the name of one", key="--job")
    return jobs[0] if jobs else ""
