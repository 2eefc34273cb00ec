"""Random numbers: Philox against its definition, and the definition against known answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from aquifer.kernels.sampling.philox import philox, uniform


def philox_reference(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10, word by word from the paper's figure 5."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_reference_gives_the_known_answers_of_random123(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    assert philox_reference(counter, key) == expected


def test_philox_and_uniform() -> None:
    generator = np.random.default_rng(0)
    seeds = generator.integers(2**64, size=64, dtype=np.uint64)
    counters = generator.integers(2**63, size=64)
    seeds[:2], counters[:2] = (0, 2**64 - 1), (0, 2**63 - 1)
    first, second = philox(seeds, counters)
    assert (first[0], second[0]) == (0x6627E8D5, 0xE169C58D)
    numbers = uniform(seeds, counters)
    for i, (seed, counter) in enumerate(zip(seeds.tolist(), counters.tolist(), strict=True)):
        words = philox_reference([counter % 2**32, counter >> 32, 0, 0], [seed % 2**32, seed >> 32])
        assert [first[i], second[i]] == words[:2]
        assert numbers[i] == ((words[0] << 32 | words[1]) >> 11) / 2**53
    assert 0 <= numbers.min() <= numbers.max() < 1
