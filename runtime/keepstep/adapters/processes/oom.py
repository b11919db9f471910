"""Whom the kernel killed for want of memory, by its own count: an exit by signal 9 alone does not tell."""

from __future__ import annotations

from pathlib import Path

_READINGS = 3


class OomKills:
    """Counts whom the kernel has killed for want of memory, in each control group that a worker was seen in."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._followed: dict[int, set[Path]] = {}
        self._known: dict[Path, tuple[int, ...]] = {}

    def follow(self, pid: int) -> None:
        """Know the count before anything happens to a process."""
        for file in self._files(pid):
            self._known.setdefault(file, (_kills(file),) * _READINGS)
            self._followed.setdefault(pid, set()).add(file)

    def age(self) -> None:
        """Look again where the processes are, and forget the oldest counts: nobody dies of those any more.

        What was counted in between stays: a large process takes a while to be gone.
        """
        for pid in self._followed:
            self.follow(pid)
        self._known = {file: (*counts[1:], _kills(file)) for file, counts in self._known.items()}

    def strike(self, pid: int) -> bool:
        """Whether the kernel has of late killed somebody in a group of a process that has just died, told once.

        Where that process was is known from before: version 1 has none of the dead in a group any more.
        """
        grown = False
        for file in {*self._followed.pop(pid, ()), *self._files(pid)}:
            before, now = self._known.get(file, (0,))[0], _kills(file)
            self._known[file] = (now,) * _READINGS
            grown = grown or now > before
        return grown

    def _files(self, pid: int) -> list[Path]:
        """Where the count stands for a process, dead but not reaped ones included.

        In a container its own group may be mounted at the root, under whatever name it goes outside. Source:
        cgroups(7), proc(5), and the kernel's documents of memory.events (version 2) and memory.oom_control (1).
        """
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                root, name = self._cgroup / "memory", "memory.oom_control"
            elif not controllers:
                root, name = self._cgroup, "memory.events"
            else:
                continue
            places = (root / path.lstrip("/") / name, root / name)
            found += [file for file in places if file.exists()][:1]
        return found


def _kills(file: Path) -> int:
    try:
        return sum(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill "))
    except (OSError, ValueError, IndexError):
        return 0
