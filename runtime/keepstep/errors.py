"""What can go wrong, who must act, and whether trying again is sane; and the exit codes, one table for all."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of a container. A worker's own code, or 128+signal, is passed on as it is."""

    DONE = 0
    BUG = 70
    """A fault of keepstep itself."""
    TOO_FEW_HOSTS = 75
    """Too few hosts, or no quorum: try again."""
    HARDWARE = 76
    """Repair wanted."""
    STORE_REFUSED = 77
    CONFIGURATION = 78
    INTERRUPTED = 143
    """Interrupted; what was saved is in the log and in the failure file."""


class KeepstepError(Exception):
    """Root of the taxonomy. `hint` says who must do what; `retryable`, whether the same may work when tried again."""

    exit_code = ExitCode.BUG
    retryable = False
    hint = ""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        if hint is not None:
            self.hint = hint

    def describe(self) -> str:
        """One line, and the hint on a second one where there is one."""
        return f"{self}\n  hint: {self.hint}" if self.hint else str(self)


class ConfigError(KeepstepError):
    """What the user wrote can not be used. Names file, line and key, what was found and what is wanted."""

    exit_code = ExitCode.CONFIGURATION

    def __init__(
        self,
        found: str,
        wanted: str,
        *,
        file: str = "",
        line: int | None = None,
        key: str = "",
        hint: str | None = None,
    ) -> None:
        where = ":".join(part for part in (file, "" if line is None else str(line)) if part)
        place = ": ".join(part for part in (where, key) if part)
        super().__init__(f"{place}{': ' if place else ''}{found}; wanted {wanted}", hint)
        self.file, self.line, self.key, self.found, self.wanted = file, line, key, found, wanted


class StoreRefusedError(KeepstepError):
    """The store says no for good."""

    exit_code = ExitCode.STORE_REFUSED


class QuorumError(KeepstepError):
    """Too few hosts, or no coordinator."""

    exit_code = ExitCode.TOO_FEW_HOSTS
    retryable = True


class InterruptionError(KeepstepError):
    """The platform takes the host away before there is anything to save."""

    exit_code = ExitCode.INTERRUPTED
    retryable = True


class HardwareError(KeepstepError):
    """A machine wants repair."""

    exit_code = ExitCode.HARDWARE
