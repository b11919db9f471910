"""A simulated job, written down as an agent writes it: text and back changes nothing, and the same turns are taken."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from keepstep.core import codec
from keepstep.core.decide import decide
from keepstep.simulation.run import run_seed
from tests.simulation.seeds import patient


@pytest.mark.parametrize("seed", [3, 4])
def test_turns_replay_from_text_to_the_same_digest(seed):
    """One turn in seven: state, event and time go through JSON before the turn is taken again."""
    before, taken, digests = {}, [], defaultdict(codec.Digests)

    def seen(host, event, decision):
        state = before.get(host.state.job.node_id)
        before[host.state.job.node_id] = decision.state
        if state is not None and len(taken) % 7 == 0:
            text = codec.encode_event(event)
            plain = json.loads(text)
            again = codec.decode_state(codec.encode_state(state))
            assert again == state
            decided = decide(again, codec.decode_event(plain), host.now())
            kept = digests[host.state.job.node_id].of(text, host.now(), decision)
            assert codec.digest_of(codec.encode_event(codec.decode_event(plain)), host.now(), decided) == kept
            assert decided.notes == decision.notes
        taken.append(event.kind)

    assert run_seed(seed, patient(), seen).violations == []
    assert len(taken) > 100


def test_a_seed_plays_the_same_each_time():
    def history(seed):
        turns = []
        run_seed(seed, patient(), lambda host, event, decision: turns.append((host.name, event, decision.actions)))
        return turns

    assert history(5) == history(5)
    assert history(5) != history(6)
