"""A coordinator with revisions, leases and watches, and a store with one HEAD: strict as the real ones, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from keepstep.core.events import Head
from keepstep.core.failures import Charges
from keepstep.core.records import LEASED, GenerationRecord, Record
from keepstep.simulation.clockwork import Clockwork


@dataclass
class _Kept:
    record: Record
    revision: int
    lease: int


class FakeCoordinator:
    """etcd as one sees it through the port. `down` refuses everything; `wipe` is a member that lost its data."""

    def __init__(self, clock: Clockwork) -> None:
        self._clock = clock
        self.revision = 0
        self.kept: dict[str, _Kept] = {}
        self.leases: dict[int, float] = {}
        self.incarnation = 0
        self.down = False
        self._next_lease = 1
        self.watchers: list[Callable[[str, Record | None, int], None]] = []
        self.on_expiry: list[Callable[[int], None]] = []
        self.history: list[GenerationRecord] = []

    def wipe(self) -> None:
        """Lose everything, as a lone member does whose host went away."""
        self.kept.clear()
        self.leases.clear()
        self.revision = 0
        self.incarnation += 1

    def grant(self, ttl_s: float) -> int:
        lease = self._next_lease
        self._next_lease += 1
        self.leases[lease] = self._clock.now + ttl_s
        self._clock.after(ttl_s + 0.001, lambda: self._expire(lease))
        return lease

    def keep_alive(self, lease: int, ttl_s: float) -> bool:
        """Renew; False where the lease is gone."""
        if lease not in self.leases:
            return False
        self.leases[lease] = self._clock.now + ttl_s
        self._clock.after(ttl_s + 0.001, lambda: self._expire(lease))
        return True

    def hears(self, host: str, endpoints: tuple[str, ...]) -> bool:
        """Whether a request of this host arrives, if it asks the etcd on these hosts."""
        return not self.down

    def answers(self, host: str, endpoints: tuple[str, ...]) -> bool:
        """Whether this host hears what it is answered, and what the watch tells."""
        return True

    def join(self, host: str, hosts: tuple[str, ...]) -> bool:
        """Make this host a member; there is but one here, which is never replaced."""
        return False

    def delete(self, key: str) -> None:
        """Delete one record, if it is there."""
        if self.kept.pop(key, None) is not None:
            self.revision += 1
            self._tell(key, None)

    def forget(self, prefix: str) -> None:
        """Delete every record whose key begins so."""
        for key in [key for key in self.kept if key.startswith(prefix)]:
            self.delete(key)

    def revoke(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            self._drop_bound_to(lease)

    def takes(self, record: Record, expect: int, lease: int, guard: int) -> bool:
        """Whether this could be put now: all comparisons hold, and the lease lives."""
        known = self.kept.get(record.key)
        if (known.revision if known else 0) != expect and expect >= 0:
            return False
        if guard and (self.kept.get("leader") is None or self.kept["leader"].revision != guard):
            return False
        return not (lease and isinstance(record, LEASED)) or lease in self.leases

    def put(self, record: Record, expect: int, lease: int, guard: int) -> int | None:
        """The new revision, or None where a comparison failed or the lease is gone."""
        if not self.takes(record, expect, lease, guard):
            return None
        bound = lease if isinstance(record, LEASED) else 0
        self.revision += 1
        self.kept[record.key] = _Kept(record, self.revision, bound)
        if isinstance(record, GenerationRecord):
            self.history.append(record)
        self._tell(record.key, record)
        return self.revision

    def read(self) -> tuple[tuple[Record, int], ...]:
        return tuple((kept.record, kept.revision) for kept in self.kept.values())

    def _expire(self, lease: int) -> None:
        at = self.leases.get(lease)
        if at is not None and at <= self._clock.now:
            for callback in self.on_expiry:
                callback(lease)
            del self.leases[lease]
            self._drop_bound_to(lease)

    def _drop_bound_to(self, lease: int) -> None:
        for key in [key for key, kept in self.kept.items() if kept.lease == lease]:
            del self.kept[key]
            self.revision += 1
            self._tell(key, None)

    def _tell(self, key: str, record: Record | None) -> None:
        for watcher in self.watchers:
            watcher(key, record, self.revision)


@dataclass
class FakeStore:
    """Objects are not modelled; HEAD is, with its fence. `committed` is every checkpoint that was ever committed.

    `rotten` manifests do not read back; `loses_answers` where half of the commits land and nobody is told.
    """

    head: Head | None = None
    down: bool = False
    refuses: bool = False
    loses_answers: bool = False
    committed: list[Head] = field(default_factory=list)
    rotten: set[str] = field(default_factory=set)

    files: list[int] = field(default_factory=list)
    """What was committed of silent scripts' files: the numbers written, in the order of the commits."""
    files_generation: int = 0
    charges: Charges = field(default_factory=Charges)

    @property
    def newest_files(self) -> str:
        return f"files/{len(self.files)}" if self.files else ""

    def file_of(self, manifest: str) -> int:
        """The number that a manifest stands for."""
        return self.files[int(manifest.rpartition("/")[2]) - 1]

    def keep_files(self, generation: int, number: int) -> int | None:
        """Commit what a script wrote; the commit's number, or None where a newer generation has claimed HEAD."""
        if self.files_generation > generation:
            return None
        self.files_generation = generation
        if not self.files or self.files[-1] != number:
            self.files.append(number)
        return len(self.files)

    def heal(self) -> None:
        """Whatever was wrong with answering is over; what is rotten stays so."""
        self.down = self.refuses = self.loses_answers = False

    def head_without(self, without: Collection[str]) -> Head | None:
        """HEAD; where its checkpoint is among `without`, HEAD as if the next older one were the newest."""
        head = self.head
        if head is None or head.manifest not in without:
            return head
        older = [each for each in self.committed if each.manifest not in without]
        newest = max(older, key=lambda each: (each.generation, each.step), default=None)
        if newest is None:
            return replace(head, step=0, manifest="", digest="")
        return replace(newest, generation=head.generation)

    def claim(self, generation: int) -> None:
        """Have HEAD carry this generation, unless it carries a newer one; and the HEAD of the files."""
        self.files_generation = max(self.files_generation, generation)
        if self.head is None or self.head.generation < generation:
            self.head = replace(self.head or Head(0, 0, "", ""), generation=generation)

    def commit(self, generation: int, step: int, digest: str) -> Head | None:
        """Claim and swap HEAD in one; None where a newer generation has claimed it."""
        if self.head is not None and self.head.generation > generation:
            return None
        head = self.head
        if head is not None and head.manifest.startswith(f"manifests/{generation}-") and head.step > step:
            return None
        self.head = Head(generation, step, digest, f"manifests/{generation}-{step}")
        if self.head not in self.committed:
            self.committed.append(self.head)
        return self.head
