"""Express steps: the clients that run in a step of their own, without the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_SMALL_SHARE = 1 / 8
"""The largest share of a model's sequences that the clients of an express step may have together.
Above it, a step of all takes not much longer than theirs."""

Express = Callable[[Mapping[int, int]], frozenset[int]]
"""Gives the clients that run in the next step of a model, or none if all run in it.

It is asked when there is time for an express step (`aquifer.engine.express_time`), and given the
number of sequences of each client that has any: those that run, and if none does, those of its
first waiting request.
"""


def smallest_clients(num_sequences: Mapping[int, int]) -> frozenset[int]:
    """The clients with the fewest sequences, together up to an eighth of all.

    A step takes the longer, the more sequences run in it. So a client with one request beside
    another's hundreds would wait for these at each of its tokens.
    """
    most = _SMALL_SHARE * sum(num_sequences.values())
    chosen: list[int] = []
    for client in sorted(num_sequences, key=lambda client: (num_sequences[client], client)):
        most -= num_sequences[client]
        if most < 0:
            break
        chosen.append(client)
    return frozenset(chosen)
