"""The store's list of cordons as the fold sees it: read when an agent starts, kept up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from keepstep.adapters.clock import sleep
from keepstep.app.storing import Storing
from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.events import Event
from keepstep.core.gpu_events import KeptCordon

_AGAIN_S = 2.0


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
