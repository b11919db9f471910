"""The journal on a disk that fills up: lines are there whole or not at all, and what is missing is marked."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from keepstep.adapters.journal import JournalWriter, read_lines


class Disk:
    """An unbuffered file on a disk with so much room."""

    def __init__(self, path: Path, room_bytes: int) -> None:
        self._file = path.open("ab", buffering=0)
        self.room_bytes = room_bytes

    def write(self, data: memoryview) -> int:
        if not self.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._file.write(data[: self.room_bytes])
        self.room_bytes -= taken
        return taken

    def truncate(self, size_bytes: int) -> None:
        self.room_bytes += os.fstat(self._file.fileno()).st_size - size_bytes
        self._file.truncate(size_bytes)

    def close(self) -> None:
        self._file.close()


def wait_for_empty(journal: JournalWriter) -> None:
    """Until the thread has taken everything that was posted, the line in its hands included."""
    journal._lines.put(None)
    journal._thread.join(10)
    assert not journal._thread.is_alive()


def test_a_line_is_there_whole_or_not_at_all(tmp_path):
    whys: list[str] = []
    path = tmp_path / "journal.jsonl"
    journal = JournalWriter(path, on_dropped=whys.append)
    journal._file.close()
    journal._file = disk = Disk(path, 30)
    lines = [{"n": number, "text": "x" * 8} for number in range(4)]
    for line in lines:
        journal.post(line)
    wait_for_empty(journal)
    assert [line for _, line in read_lines(path)] == lines[:1]
    assert path.read_bytes().endswith(b"\n")
    assert len(whys) == 3 and all("No space left" in why for why in whys)
    assert disk.room_bytes < 30


def test_room_that_comes_back_begins_with_a_mark(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = JournalWriter(path)
    journal._file.close()
    journal._file = disk = Disk(path, 12)
    journal._write(json.dumps({"n": 1}))
    journal._write(json.dumps({"n": 2}))
    journal._write(json.dumps({"n": 3}))
    disk.room_bytes = 1000
    journal._write(json.dumps({"n": 4}))
    wait_for_empty(journal)
    assert [line for _, line in read_lines(path)] == [{"n": 1}, {"dropped": 2}, {"n": 4}]


def test_a_rotation_keeps_the_old_file_where_no_new_one_can_be_made(tmp_path):
    whys: list[str] = []
    path = tmp_path / "folder" / "journal.jsonl"
    journal = JournalWriter(path, on_dropped=whys.append)
    journal.post({"n": 1})
    path.parent.rename(tmp_path / "moved")
    journal.begin_file([{"n": 2}])
    wait_for_empty(journal)
    assert [line for _, line in read_lines(tmp_path / "moved" / "journal.jsonl")] == [{"n": 1}, {"n": 2}]
    assert len(whys) == 1
