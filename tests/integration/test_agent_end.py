"""How an agent ends whose own parts fail: what somebody can mend in one line, a bug with its trace and another try."""

from __future__ import annotations

import pytest

from tests.support.init_host import Host

pytestmark = pytest.mark.integration

AGENT = """
LISTEN = "telemetry.listen=127.0.0.1:0"
from keepstep.app import agent, node
from keepstep.errors import StoreRefusedError

async def fail(error):
    await asyncio.sleep(0)
    raise error

async def run(self):
    note(f"boot-{boot}", 0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(600))
        async with asyncio.TaskGroup() as more:
            for error in (ERRORS):
                more.create_task(fail(error))

node.Agent.run = run
(here / "train.py").write_text("")
options = ["--base-dir", str(here / "ml"), "--set", f"launch.python={sys.executable}", "--set", LISTEN]
sys.exit(agent.main([*options, str(here / "train.py")]))
"""


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path)
    yield host
    left = host.left()
    host.clean_up()
    assert left == [], host.output()


def test_an_error_among_parts_that_run_side_by_side_is_one_line(host):
    host.start(AGENT.replace("ERRORS", "StoreRefusedError('the store is shut', 'open it'),"))
    assert host.exit_code() == 77
    assert host.output() == "keepstep | the store is shut\n  hint: open it\n"
    assert (host.folder / "ml" / "output" / "failure").read_text() == "the store is shut\n  hint: open it"


@pytest.mark.parametrize("errors", ["KeyError('bug'),", "StoreRefusedError('shut'), KeyError('bug')"])
def test_a_bug_shows_its_trace_and_has_another_agent_started(host, errors):
    host.start(AGENT.replace("ERRORS", errors), restarts_max=2)
    assert host.exit_code() == 70
    assert sorted(path.name for path in host.folder.glob("boot-*")) == ["boot-0", "boot-1", "boot-2"]
    assert host.output().count("KeyError: 'bug'") == 3
    assert not (host.folder / "ml" / "output" / "failure").exists()
