"""The store's list of cordons: kept for the fold, read when an agent starts, shown and edited by `keepstep cordons`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from keepstep.adapters.clock import sleep
from keepstep.app.picking import open_store
from keepstep.app.showing import date, table
from keepstep.app.storing import Storing
from keepstep.checkpoint.cordons import cordoned_jobs, lift_cordons, read_cordons
from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.events import Event
from keepstep.core.gpu_events import KeptCordon
from keepstep.errors import ConfigError, StoreRefusedError
from keepstep.ports.store import ObjectStore, StoreError

_AGAIN_S = 2.0
_COLUMNS = ("what", "host", "by", "since", "why")


async def recall_cordons(storing: Storing, post: Callable[[Event], None]) -> None:
    """Tell the fold what the list holds, once the store says it; nothing where it is empty, or there is no store."""
    while storing.has_store:
        reply = await storing.ask_store({"command": "cordons"})
        if reply.get("ok"):
            found = tuple(KeptCordon(**entry) for entry in reply["cordons"])
            if found:
                post(e.CordonsRead(found))
        if reply.get("error") != "unavailable":
            return
        await sleep(_AGAIN_S)


async def keep_cordons(storing: Storing, post: Callable[[Event], None], action: a.KeepCordons) -> None:
    """Have the list say what the fold wants."""
    entries = [asdict(entry) for entry in action.cordons]
    command = {"command": "cordon", "cordons": entries, "lifted": list(action.lifted)}
    reply = await storing.attempt(action.operation, command)
    if reply is not None and reply.get("ok"):
        post(e.CordonsKept(action.operation))
    elif reply is not None and reply.get("error") not in ("refused", "unavailable"):
        post(e.OperationFailed(action.operation, str(reply.get("detail")), _AGAIN_S))


# --- the command -----------------------------------------------------------------------------------------------------


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
