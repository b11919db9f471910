from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.shares import assign_share


@given(st.integers(1, 600), st.integers(0, 2**50))
def test_shares_make_up_the_region_and_are_equal(world_size, size_bytes):
    shares = [assign_share(rank, world_size, size_bytes) for rank in range(world_size)]
    end = 0
    for share in shares:
        assert share.offset == end
        end += share.size_bytes
    assert end == size_bytes
    sizes = {share.size_bytes for share in shares}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("rank", "world_size", "size"), [(-1, 2, 5), (2, 2, 5), (0, 0, 5), (0, 1, -1)])
def test_a_rank_that_is_not_there_has_no_share(rank, world_size, size):
    with pytest.raises(ValueError):
        assign_share(rank, world_size, size)
