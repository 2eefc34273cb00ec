"""Which program of a launch of prefill attention takes which queries and keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aquifer.kernels.prefill_work import (
    Tiling,
    WorkPlan,
    choose_band,
    choose_num_splits,
    plan_work,
)

TILING = Tiling(block_tokens=32, num_running=33, num_groups=1, least_keys=256)
ON_HOPPER = TILING._replace(num_running=132, num_groups=8, has_bands=True)


def plan(chunks: list[tuple[int, int]], tiling: Tiling) -> WorkPlan:
    starts, counts = np.array(chunks, np.int64).reshape(-1, 2).T
    return plan_work(starts, counts, tiling)


@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 700)), max_size=12),
    st.sampled_from([1, 16, 64]),
    st.sampled_from([None, 1, 100, 5000]),
    st.sampled_from([None, 1, 3]),
)
def test_each_token_is_of_one_block_and_each_block_has_all_its_splits(
    chunks, block_tokens, window_tokens, num_splits
):
    tiling = Tiling(block_tokens, 67, 2, 256, window_tokens, num_splits=num_splits)
    programs, merges, _ = plan(chunks, tiling)
    blocks: dict[tuple[int, int], list[int]] = {}
    for span, token, split, splits in programs.tolist():
        splits_of = blocks.setdefault((span, token), [])
        assert split == len(splits_of)
        assert splits >= 1
        splits_of.append(splits)
    assert all(splits == [len(splits)] * len(splits) for splits in blocks.values())
    assert sorted(blocks) == [
        (span, token)
        for span, (_, count) in enumerate(chunks)
        for token in range(0, count, block_tokens)
    ]
    # Those with several splits are merged, once each, from where the first of these is.
    assert sorted(merges.tolist()) == [
        place
        for place, (_, _, split, splits) in enumerate(programs.tolist())
        if split == 0 and splits > 1
    ]
    num_tokens = sum(count for _, count in chunks)
    assert len(programs) <= tiling.most_programs(num_tokens, len(chunks))
    if num_splits is None:
        assert len(merges) <= tiling.most_merges
        assert not len(merges) or len(programs) <= tiling.room


def test_a_short_chunk_after_a_long_prefix_is_split_over_the_device():
    programs, merges, _ = plan([(8192, 20)], TILING)
    assert programs.tolist() == [[0, 0, split, 32] for split in range(32)]
    assert merges.tolist() == [0]


def test_few_keys_are_not_split():
    assert choose_num_splits(np.array([1000]), TILING).tolist() == [3]
    assert choose_num_splits(np.array([300, 200, 10]), TILING).tolist() == [1, 1, 1]


def test_longer_prefixes_have_more_splits():
    num_splits = choose_num_splits(np.array([8000, 2000, 100]), TILING)
    assert num_splits.tolist() == [25, 7, 1]


def test_blocks_of_about_one_length_are_cut_alike():
    num_keys = np.arange(16_000, 16_512, 64)
    assert choose_num_splits(num_keys, TILING._replace(num_running=16)).tolist() == [2] * 8
    assert choose_num_splits(num_keys, TILING._replace(num_running=15)).tolist() == [1] * 8


def test_nothing_is_split_where_there_are_programs_enough():
    assert choose_num_splits(np.full(33, 8000), TILING).tolist() == [1] * 33


def test_programs_with_the_most_keys_come_first():
    programs, _, num_keys = plan([(0, 96), (1000, 40)], TILING._replace(num_running=0))
    assert num_keys.tolist() == [1040, 1032, 96, 64, 32]
    assert programs[:, :2].tolist() == [[1, 32], [1, 0], [0, 64], [0, 32], [0, 0]]


def test_no_chunks_are_no_work():
    programs, merges, _ = plan([], TILING)
    assert programs.shape == (0, 4)
    assert merges.shape == (0,)


@pytest.mark.parametrize(
    ("chunks", "band"),
    [
        ([(6000, 500)], 1),  # all run at once
        ([(0, 2048)], 1),  # of very different lengths
        ([(0, 8192)], 33),
        ([(16_384, 8192)], 66),
        ([(114_688, 8192)], 256),  # all
    ],
    ids=str,
)
def test_blocks_of_about_one_length_are_taken_head_by_head(chunks, band):
    num_keys = plan(chunks, ON_HOPPER).num_keys
    assert choose_band(num_keys, ON_HOPPER) == band
    assert choose_band(num_keys, ON_HOPPER._replace(has_bands=False)) == 1


@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 3000)), min_size=1, max_size=8),
    st.sampled_from([1, 2, 8, 12, 64]),
    st.sampled_from([14, 132]),
)
def test_bands_give_each_program_about_as_many_keys(chunks, num_groups, num_running):
    tiling = ON_HOPPER._replace(num_groups=num_groups, num_running=num_running)
    num_keys = plan(chunks, tiling).num_keys.tolist()

    def most(band: int) -> int:
        """Keys of the program that has the most; they take turns forth and back."""
        keys = [0] * tiling.num_running
        bands = [num_keys[first : first + band] for first in range(0, len(num_keys), band)]
        items = [each for some in bands for _ in range(num_groups) for each in some]
        for index, each in enumerate(items):
            turn, place = divmod(index, tiling.num_running)
            keys[place if turn % 2 == 0 else -1 - place] += each
        return max(keys)

    band = choose_band(np.array(num_keys), tiling)
    assert most(band) <= 1.01 * most(1)
