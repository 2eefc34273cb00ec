"""Keys of paths: the same however the blocks are cut into nodes, and others for other tokens."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aquifer.cache.prefix.paths import path_keys

sizes = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def keys_in_parts(tokens: np.ndarray, ends: list[int], cuts: list[int], above: int) -> list[int]:
    """The keys of all blocks, node by node."""
    keys: list[int] = []
    for begin, end in pairwise([0, *cuts, len(ends)]):
        if begin < end:
            first = ends[begin - 1] if begin else 0
            part = tokens[first : ends[end - 1]]
            keys += path_keys(part, first, ends[begin:end], keys[-1] if keys else above)
    return keys


@given(sizes, st.data())
def test_they_do_not_depend_on_where_nodes_end(
    block_tokens: list[int], data: st.DataObject
) -> None:
    ends = list(accumulate(block_tokens))
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=ends[-1], max_size=ends[-1])
    tokens = np.array(data.draw(ids), np.int32)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ends)), max_size=4)))
    above = data.draw(st.integers(-(2**63), 2**64))
    whole = keys_in_parts(tokens, ends, [], above)
    assert whole == keys_in_parts(tokens, ends, cuts, above)
    assert len(set(whole)) == len(ends)  # also where a block adds no token
    assert all(0 <= key < 2**64 for key in whole)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=64), st.data())
def test_other_tokens_have_other_keys_from_there_on(ids: list[int], data: st.DataObject) -> None:
    tokens, ends = np.array(ids, np.int32), list(range(1, len(ids) + 1))
    at = data.draw(st.integers(0, len(ids) - 1))
    changed = tokens.copy()
    changed[at] += data.draw(st.sampled_from([-1, 1, 1000]) if ids[at] else st.just(1))
    keys, others = (path_keys(each, 0, ends, 5) for each in (tokens, changed))
    assert keys[:at] == others[:at]
    assert not set(keys[at:]) & set(others[at:])
    assert not set(keys) & set(path_keys(tokens, 0, ends, 6))


def test_tokens_in_another_order_have_another_key() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    swapped = tokens.copy()
    swapped[[3, 900]] = swapped[[900, 3]]
    assert path_keys(tokens, 0, [1000], 0) != path_keys(swapped, 0, [1000], 0)
