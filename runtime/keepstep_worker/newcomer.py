"""What a rank that the saved world did not have makes of the local state that it is given.

That state is an aggregate over the ranks of the saved world: means, and rank 0's where there is none. Of random
generators it holds rank 0's states, and to go on from there as they are would be to repeat rank 0's numbers. So the
rank is folded into them, and a stream of its own begins. Where all ranks of the saved world were in the same state,
they share their stream on purpose (equal seeds draw an equal order of the data, an equal mask): then the new rank
takes part in it. Of a world of a single rank that can not be told: there the generators of TensorFlow and Keras, which
make noise, get a stream of their own, and those of the process (`random`, `numpy.random`, the seeds of eager
operations), which scripts draw the data's order from, go on as they are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping

from keepstep_worker.slab import LOCAL, Place
from keepstep_worker.slab_view import SlabView

AGGREGATED, DIFFERS = "aggregated", "differs"
"""Keys of a slab's metadata, set by the agent: over how many ranks; in what has no mean, where those differed."""

_GENERATOR = re.compile(r"(.*/)?(seed_generator_state|StateVar)(#\d+)?(@\d+)?")
"""What the state variables of Keras's SeedGenerator and of tf.random.Generator are called."""
_RANDOM = LOCAL + "random/"


def to_split(view: SlabView, keys: Mapping[str, str]) -> list[str]:
    """Return the process's own generators whose streams must be split, since this rank is new and they were apart.

    Args:
        view: the state as it was handed over.
        keys: by the generators' names, the keys of what tells whether they were.
    """
    return [name for name, key in keys.items() if _differed(view, key)]


def split_streams(view: SlabView, rank: int, generators: Iterable[str] = ()) -> SlabView:
    """Return the state with streams of the rank's own in the generators of TensorFlow and Keras, where it is new.

    Args:
        view: the state as it was handed over.
        rank: this rank.
        generators: keys of generators' states beside those that are known by their names.
    """
    if AGGREGATED not in view.metadata:
        return view
    named = set(generators)
    alone = view.metadata[AGGREGATED] == "1"
    found = {
        key: folded
        for key, place in view.places.items()
        if key.startswith(LOCAL)
        and (key.startswith(_RANDOM) or key.split("@")[0] in named or _GENERATOR.fullmatch(key))
        and (alone or _differed(view, key))
        and (folded := _folded(place, bytes(view.raw(key)), rank)) is not None
    }
    return view.with_bytes(found)


def fold(state: bytes, rank: int, size_bytes: int) -> bytes:
    """Return up to 64 bytes that depend on all of a generator's state and on a rank, and on nothing else."""
    return hashlib.blake2b(state + b"keepstep" + rank.to_bytes(8, "little"), digest_size=size_bytes).digest()


def _differed(view: SlabView, key: str) -> bool:
    return key in json.loads(view.metadata.get(DIFFERS, "[]"))


def _folded(place: Place, state: bytes, rank: int) -> bytes | None:
    """Return a generator's state with another key and the same counter; None for a kind that is not known.

    Source: Keras's SeedGenerator keeps (seed, counter); tf.random.Generator a counter of one or two words, and the key.
    """
    if place.dtype == "U32" and place.shape == (2,):
        seed = int.from_bytes(fold(state, rank, 4), "little") & 0x7FFFFFFF  # as positive as those that Keras draws
        return seed.to_bytes(4, "little") + state[4:]
    if place.dtype in ("I64", "U64") and place.shape in ((2,), (3,)):
        return state[:-8] + fold(state, rank, 8)
    return None
