"""What a script that knows nothing of keepstep writes is kept, and is found again by the next container."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.app.cli import main
from keepstep.checkpoint.filing.put_back import ASIDE
from tests.support import files_script
from tests.support.container import Container
from tests.support.local_run import LocalRun
from tests.support.proxy import TcpProxy
from tests.support.s3 import CREDENTIALS, bucket_store, s3_server
from tests.support.script_files import GOLDEN, contents, lay, tear

pytestmark = pytest.mark.integration


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    with Container(tmp_path) as container:
        container.fill()
        container.options += ["--store", str(tmp_path / "store"), "--set", "restart.backoff.first=1ms"]
        yield container


def script(container: Container, last: int, end: str = "exit", *, watched: bool = False) -> Path:
    """Give the container the script; returns the folder it writes to, which it is told to watch from the start."""
    folder = container.base / "checkpoints"
    if end == "sigterm":  # it is done long before, on a busy machine, too
        container.options += ["--set", "interruption.script_grace=30s"]
    if watched:
        container.options += ["--set", f"checkpoint.watch={folder}"]
    source = Path(files_script.__file__).read_text()
    words = json.dumps(["train.py", str(folder), str(GOLDEN / "many"), str(last), end])
    container.write("code/train.py", source.replace("import sys\n", f"import sys\nsys.argv = {words}\n", 1))
    return folder


def has_kept(container: Container, last: int) -> bool:
    """Whether the script has come to its last save, so that it waits, and something of it is kept."""
    return f"saved {last}\n" in container.output() and "files_kept" in container.reasons()


def kept(store: object, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["checkpoint", "ls", str(store), "--files", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["files"]


def test_the_next_container_goes_on_from_them(container, tmp_path, capsys):
    folder = script(container, 3)
    assert container.run() == 0, container.output()
    assert "goes on from 0" in container.output()
    before = contents(folder)
    (newest, *_) = kept(tmp_path / "store", capsys)
    assert newest["newest"] and newest["sets"] == ["ckpt-3"]
    shutil.rmtree(folder)
    script(container, 5)
    assert container.run() == 0, container.output()
    assert "goes on from 3" in container.output()
    assert kept(tmp_path / "store", capsys)[0]["sets"] == ["ckpt-5"]
    assert main(["checkpoint", "export", str(tmp_path / "store"), "--files", "--to", str(tmp_path / "out")]) == 0
    exported = contents(tmp_path / "out")
    assert exported.keys() == {"checkpoint", "ckpt-5.index", "ckpt-5.data-00000-of-00001"}
    assert exported["ckpt-5.index"] == before["ckpt-3.index"]


def test_a_worker_that_dies_loses_nothing_it_wrote(container, tmp_path, capsys):
    script(container, 9, "die:4")
    assert container.run() == 0, container.output()
    said = [line.partition("] ")[2] for line in container.said() if "goes on from" in line]
    assert said == ["goes on from 0", "goes on from 4"]
    assert kept(tmp_path / "store", capsys)[0]["sets"] == ["ckpt-9"]
    assert "files_put_back" in container.reasons()


def test_what_is_torn_is_moved_aside(container, tmp_path):
    """The container died in a save: the platform brings back what was torn, which no script may find."""
    folder = script(container, 3)
    assert container.run() == 0, container.output()
    tear(lay("many", folder, rename=("-7", "-4"), at_s=2_000_000_000)[0])
    (folder / "checkpoint").write_text('model_checkpoint_path: "ckpt-4"\n')
    assert container.run() == 0, container.output()
    assert "goes on from 3" in container.output()
    assert {Path(name).name.partition(".")[0] for name in contents(folder / ASIDE)} == {"ckpt-4"}


def test_sigterm_keeps_what_the_script_saves_then(container, tmp_path, capsys):
    script(container, 2, "sigterm", watched=True)
    container.start()
    container.wait_for(lambda: has_kept(container, 2), "checkpoint that is kept")
    container.signal()
    assert container.wait() == 143, container.output()
    assert kept(tmp_path / "store", capsys)[0]["sets"] == ["ckpt-3"]
    assert "the script's own files are saved" in container.failure()


def test_all_hosts_go_on_from_what_rank_0_has(tmp_path):
    """Host 2 has written more, and host 1 dies: in the next generation both find what host 1 had."""
    source = Path(files_script.__file__).read_text()
    folders = tmp_path / "run" / "hosts" / "%h" / "checkpoints"
    lay("many", tmp_path / "golden" / "many")
    words = ["train.py", str(folders), str(tmp_path / "golden" / "many"), "9", "die:4:algo-1"]
    path = tmp_path / "train.py"
    path.write_text(source.replace("import sys\n", f"import sys\nsys.argv = {words}\n", 1))
    options = ["--python", sys.executable, "--store", str(tmp_path / "store")]
    with LocalRun(tmp_path / "run", str(path), (), options) as run:
        assert run.wait() == 0, run.told()
        for host in run.names:
            said = [line.partition("] ")[2] for line in run.log(host).splitlines() if "goes on from" in line]
            assert said == ["goes on from 0", "goes on from 4"], run.told()
        assert "ckpt-9.index moved aside" in run.log("algo-2")
        assert "ckpt-" not in str([line for line in run.log("algo-1").splitlines() if "moved aside:" in line])


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """A bucket of this test alone, and where it is."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with contextlib.contextmanager(s3_server)() as endpoint:
        bucket = f"b{uuid.uuid4().hex[:12]}"
        bucket_store(endpoint, bucket)
        yield f"s3://{bucket}/prefix", endpoint


def test_they_are_kept_in_s3(container, s3, capsys):
    store, endpoint = s3
    container.options += ["--store", store]
    container.environment |= {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}
    folder = script(container, 2)
    assert container.run() == 0, container.output()
    shutil.rmtree(folder)
    script(container, 3)
    assert container.run() == 0, container.output()
    assert "goes on from 2" in container.output()
    assert kept(store, capsys, "--endpoint", endpoint)[0]["sets"] == ["ckpt-3"]
    assert main(["checkpoint", "verify", store, "all", "--files", "--endpoint", endpoint]) == 0


@pytest.mark.parametrize("setting", ["checkpoint.watch=off", "checkpoint.store=none"])
def test_nothing_is_kept_where_nothing_is_watched(container, tmp_path, setting):
    container.options += ["--set", setting]
    if setting.endswith("none"):
        container.options += ["--store", "none"]
    script(container, 2)
    assert container.run() == 0, container.output()
    assert "files_copied" not in container.output() and not list((tmp_path / "store").glob("*/files"))


def test_a_store_within_the_folder_is_not_taken_for_the_scripts(container, tmp_path, capsys):
    folder = script(container, 3)
    container.options += ["--store", str(folder)]
    assert container.run() == 0, container.output()
    assert container.run() == 0, container.output()
    assert kept(folder, capsys)[0]["sets"] == ["ckpt-3"]


def test_a_folder_that_can_not_be_put_right_ends_the_job(container, tmp_path):
    folder = script(container, 2)
    assert container.run() == 0, container.output()
    shutil.rmtree(folder)
    folder.write_text("a file where the folder ought to be")
    container.options += ["--set", "restart.budget=2 per 1h"]
    assert container.run() == 77, container.output()
    assert str(folder) in container.failure() and "NotPutBack" in container.failure()


def test_a_folder_to_watch_without_a_store_is_refused(container, tmp_path):
    container.options += ["--store", "none", "--set", f"checkpoint.watch={tmp_path}"]
    assert container.run() == 78, container.output()
    assert "checkpoint.watch" in container.failure()


def test_relative_folders_are_refused(container):
    container.options += ["--set", "checkpoint.watch=checkpoints"]
    assert container.run() == 78, container.output()
    assert "auto, off, or the absolute path" in container.failure()


def test_a_store_that_is_away_holds_up_nobody(container, s3, capsys):
    """The worker dies while the store is away: it goes on from its own folder, and all is made up for."""
    store, endpoint = s3
    with TcpProxy("127.0.0.1", int(endpoint.rpartition(":")[2])) as proxy:
        container.environment |= {**CREDENTIALS, "AWS_ENDPOINT_URL": proxy.endpoint}
        container.options += ["--store", store]
        script(container, 6, "sigterm", watched=True)
        container.start()
        container.wait_for(lambda: has_kept(container, 6), "checkpoint that is kept")
        proxy.cut()
        container.kill_worker()
        container.wait_for(lambda: "goes on from 6" in container.output(), "the next attempt")
        proxy.restore()
        container.signal()
        assert container.wait() == 143, container.output()
    assert kept(store, capsys, "--endpoint", endpoint)[0]["sets"] == ["ckpt-7"]
