"""State that goes from a world to one of another size, through a store: what each rank finds, and what it trains."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from keepstep.adapters.store_memory import MemoryStore
from keepstep.checkpoint.keys import ManifestName
from keepstep.checkpoint.manifest import Manifest, build_manifest
from keepstep.checkpoint.restore import fetch
from keepstep.checkpoint.upload import UploadOrder, upload
from keepstep_worker.wire import Seal
from tests.e2e.cluster import tf_configs
from tests.support.fake_agent import FakeAgent
from tests.support.stores import memory_store

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("elastic_job.py")
PYTHON = os.environ.get("KEEPSTEP_TF_PYTHON", str(ROOT / ".venv-tf" / "bin" / "python"))
DEADLINE_S = 120
SAMPLES = set(range(90))

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(400)]


class World:
    """Ranks that begin with fresh agents, from nothing or from a checkpoint in a store."""

    def __init__(self, folder: Path, size: int) -> None:
        self.agents = [FakeAgent() for _ in range(size)]
        self._folder, self._orders = folder, {"snapshot_every": 1}
        folder.mkdir()

    def restore(self, store: MemoryStore, manifest: Manifest) -> None:
        """Bring each rank what is its own in this world."""
        self._orders |= {"restore_slab": 0, "restore_step": manifest.step}
        for rank, agent in enumerate(self.agents):
            agent.slabs[0] = os.memfd_create("fetched")
            size_bytes = fetch(store, manifest, rank, agent.slabs[0]).size_bytes
            agent.wire.write_seal(Seal(0, manifest.step, 1, size_bytes, 0, 1, 1))

    def train(self, *arguments: str, full_world: int = 0, batch: str = "keep_global") -> list[Any]:
        """Run the job to its end; what its ranks wrote."""
        with self._running(arguments, {"FULL_WORLD": full_world or len(self.agents), "BATCH": batch}) as workers:
            codes = [worker.wait(DEADLINE_S) for worker in workers]
        assert codes == [0] * len(workers), self._printed()
        return [json.loads(self._out(rank).read_text()) for rank in range(len(workers))]

    def drain(self, step: int, *arguments: str) -> None:
        """Run the job until all ranks have sealed a step: of steps that just pass, a quick rank may seal only some."""
        self._orders |= {"hold": 1, "drain_step": step}
        with self._running(arguments, {}) as workers:
            give_up = time.monotonic() + DEADLINE_S
            while not all(agent.of("drained") for agent in self.agents):
                assert not any(worker.poll() for worker in workers), self._printed()
                assert time.monotonic() < give_up, self._printed()
                time.sleep(0.01)

    @contextlib.contextmanager
    def _running(self, arguments: Sequence[str], told: dict[str, Any]) -> Iterator[list[subprocess.Popen[bytes]]]:
        workers, configs = [], tf_configs(len(self.agents))
        for rank, agent in enumerate(self.agents):
            endpoint = agent.connect(**self._orders)
            own = {"RANK": rank, "WORLD_SIZE": len(self.agents), "FULL_WORLD": len(self.agents), **told}
            more = {f"KEEPSTEP_{name}": str(value) for name, value in own.items()}
            more |= {"PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
            if len(self.agents) > 1:
                more["TF_CONFIG"] = configs[rank]
            with (self._folder / f"{rank}.log").open("wb") as log:
                words = [*arguments[:2], str(self._out(rank)), *arguments[2:]]
                command = [PYTHON, "-m", "keepstep_worker", str(JOB), *words]
                environment = {**os.environ, **agent.environment(endpoint, **more)}
                fds = (agent.wire_fd, endpoint.fileno())
                workers.append(subprocess.Popen(command, env=environment, pass_fds=fds, stdout=log, stderr=log))
            endpoint.close()
        try:
            yield workers
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()

    def _out(self, rank: int) -> Path:
        return self._folder / f"{rank}.json"

    def store(self, step: int) -> tuple[MemoryStore, Manifest]:
        """Upload what the ranks have sealed for a step."""
        store, name, objects, digest = memory_store(), ManifestName(1, step, "r"), [], ""
        for rank, agent in enumerate(self.agents):
            seal = next(seal for seal in agent.wire.read_seals() if seal.step == step)
            order = UploadOrder("job", name, rank, len(self.agents), seal.size_bytes)
            done = upload(store, agent.slabs[seal.slab], order)
            objects += done.objects
            digest = done.replicated
        return store, build_manifest("job", name, len(self.agents), digest, objects, 1)

    def printed(self, rank: int) -> str:
        return (self._folder / f"{rank}.log").read_text(errors="replace")[-3000:]

    def _printed(self) -> str:
        return "".join(self.printed(rank) for rank in range(len(self.agents)))

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def make(size: int) -> World:
            return stack.enter_context(contextlib.closing(World(tmp_path / str(len(os.listdir(tmp_path))), size)))

        yield make


def test_a_loop_grows_and_shrinks_and_sees_every_sample_of_the_epoch_once(world: Any) -> None:
    first = world(2)
    began = first.train("loop", "2")
    store, manifest = first.store(2)
    assert began[0]["final"]["means"] != began[1]["final"]["means"]  # BatchNorm's statistics are each rank's own

    larger = world(3)
    larger.restore(store, manifest)
    grown = larger.train("loop", "3")
    for rank in (0, 1):  # as they were left
        assert grown[rank]["found"] == {key: began[rank]["final"][key] for key in grown[rank]["found"]}
    ends, new = [each["final"] for each in began], grown[2]["found"]
    means = [(one + two) / 2 for one, two in zip(ends[0]["means"], ends[1]["means"], strict=True)]
    assert new["means"] == pytest.approx(means, rel=1e-6)
    assert new["shared"] == ends[0]["shared"] == ends[1]["shared"]
    assert new["python"] == ends[0]["python"] == ends[1]["python"]  # seeded alike: shared
    assert new["numpy"] not in (ends[0]["numpy"], ends[1]["numpy"])  # seeded by rank: the new rank has its own
    assert new["noise"] not in (ends[0]["noise"], ends[1]["noise"])
    assert new["noise"][:2] == ends[0]["noise"][:2]
    assert grown[0]["final"]["weights"] == grown[1]["final"]["weights"] == grown[2]["final"]["weights"]

    alone = world(1)
    alone.restore(*larger.store(3))
    (shrunk,) = alone.train("loop", "5", full_world=3)
    assert shrunk["found"]["means"] == grown[0]["final"]["means"]
    assert shrunk["world"] == [0, 1, 3, 1.0, 20]
    taken = [
        place for world in (began, grown, [shrunk]) for rank in world for batch in rank["taken"] for place in batch
    ]
    assert sorted(taken) == sorted(SAMPLES)
    assert [len(rank["taken"][0]) for rank in grown] == [6, 7, 7]


def test_weights_do_not_depend_on_how_a_batch_is_spread(world: Any) -> None:
    """Parts of six and seven samples, and an epoch's last batch of ten, weigh as they do on one rank."""
    (alone,) = world(1).train("loop", "6", "plain")
    spread = world(3).train("loop", "6", "plain")
    assert sorted({len(batch) for rank in spread for batch in rank["taken"]}) == [3, 4, 6, 7]
    for one, other in zip(alone["final"]["weights"], spread[2]["final"]["weights"], strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_a_ranks_part_of_the_batch_can_be_kept(world: Any) -> None:
    kept = world(2).train("loop", "2", full_world=3, batch="keep_local")
    assert [each["world"] for each in kept] == [[rank, 2, 3, pytest.approx(2 / 3), 13] for rank in (0, 1)]
    assert [[len(batch) for batch in each["taken"]] for each in kept] == [[6, 6], [7, 7]]


@pytest.mark.parametrize(
    ("batch", "seen"),
    [
        ("12", [[0, 4], [0, 5]]),  # six batches in every world
        ("12+", [[0, batch] for batch in range(4, 6)]),  # three of 24 in the larger, six of 12 in the smaller
    ],
)
def test_a_fit_goes_on_in_a_smaller_world_after_the_same_samples(world: Any, batch: str, seen: list[Any]) -> None:
    both, step = world(2), 4 if batch == "12" else 2
    both.drain(step, "fit", "1", batch)
    alone = world(1)
    alone.restore(*both.store(step))
    (result,) = alone.train("fit", "2", batch)
    assert result["seen"] == [*seen, *([1, number] for number in range(6))], alone.printed(0)
    assert alone.agents[0].wire.read_progress().completed_step == step + 8


def test_a_fit_goes_on_in_a_larger_world_with_the_mean_of_what_is_local(world: Any) -> None:
    alone = world(1)
    alone.drain(5, "fit", "1", "12+")
    both = world(2)
    both.restore(*alone.store(5))  # in the middle of a larger batch, which is trained again
    results = both.train("fit", "2", "12+")
    assert [result["seen"] for result in results] == [[[0, 2], [1, 0], [1, 1], [1, 2]]] * 2, both.printed(1)
