"""A failure as it was observed, and as it is charged to a budget."""

from __future__ import annotations

from keepstep.core.causes import FailureCause
from keepstep.core.values import frozen


@frozen
class Failure:
    """One observed failure.

    Attributes:
        at: unix seconds at which it was observed, or at which the exception was raised where that is known.
        rank: rank of the worker, -1 where no worker is to blame.
        step: step the worker had entered.
        victim: the error follows from another worker's death.
        in_loop: it was raised in a step of a loop of the script's own.
        files: number of the newest checkpoint that the script had written by itself: its way of getting on.
    """

    cause: FailureCause
    host: str
    at: float
    rank: int = -1
    step: int = 0
    exit_code: int | None = None
    signal: int | None = None
    error_type: str = ""
    message: str = ""
    victim: bool = False
    in_loop: bool = False
    files: int = 0

    @property
    def signature(self) -> str:
        """Equal for two failures that are the same failure happening again."""
        what = f"{self.cause.value}:{self.error_type}:{self.exit_code}:{self.signal}:{self.message[:80]}"
        return f"{what}:{self.files}" if self.files else what


@frozen
class FirstError:
    """What a worker, or a library in it, had written down before it died.

    Attributes:
        error_type: the exception's class, or the library that ended the process; empty where neither is known.
        at: unix seconds.
        victim: it follows from another worker's death.
        rank: whose it is, of a host with several ranks, too; -1 where that was not said.
        traceback: its end, as Python prints it; empty where there is none.
    """

    error_type: str
    message: str
    at: float
    step: int
    victim: bool
    rank: int = -1
    traceback: str = ""


@frozen
class LedgerEntry:
    """A failure that was charged to a budget: unix seconds, signature, step; the rule whose own it was, if any."""

    at: float
    cause: FailureCause
    signature: str
    step: int
    rule: str = ""


@frozen
class Charges:
    """What a job was charged with in all its attempts: restarts, and the failures within the budgets' windows."""

    restarts: int = 0
    ledger: tuple[LedgerEntry, ...] = ()
