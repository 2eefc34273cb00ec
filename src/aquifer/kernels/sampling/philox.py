"""Philox random numbers, which depend only on a request's seed and a token's position.

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", section 3.3) is a
function of a counter and a key. So no state is kept between steps, and a token gets the same number
whatever else is in the batch, and after a preemption.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniform(
    seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, counter), with 53 random bits."""
    first, second = philox(seeds, counters)
    bits = (first << _HALF | second) >> np.uint64(11)
    return np.asarray(bits * 2.0**-53, np.float64)


def philox(
    seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the first two of Philox's four 32-bit words, each in a uint64.

    The key is the seed; the counter's low words are `counters`, its high words are zero.
    """
    count = counters.astype(np.uint64)
    c0, c1 = count & _LOW, count >> _HALF
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    k0, k1 = seeds & _LOW, seeds >> _HALF
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1
