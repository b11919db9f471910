"""Of tests that are marked as a sample some are left out, others for each seed; KEEPSTEP_TEST_ALL=1 has all of them."""

from __future__ import annotations

import os
import zlib

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of those that bear one and the same `sample(count)`, keep so many, by KEEPSTEP_TEST_SEED."""
    if os.environ.get("KEEPSTEP_TEST_ALL"):
        return
    samples: dict[int, list[pytest.Item]] = {}
    counts: dict[int, int] = {}
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None:
            samples.setdefault(id(mark), []).append(item)
            (counts[id(mark)],) = mark.args
    left_out: set[pytest.Item] = set()
    for mark_id, group in samples.items():
        at = zlib.crc32(f"{os.environ.get('KEEPSTEP_TEST_SEED', '')} {group[0].nodeid}".encode()) % len(group)
        left_out.update((group[at:] + group[:at])[counts[mark_id] :])
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
