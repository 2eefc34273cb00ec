"""Which devices have read the beginning of a prompt before, and may have retained its KV."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

_FIRST_TOKENS = 64
_MOST_TOKENS = 1 << 17
_MOST_PREFIXES = 1 << 16
"""Prefixes that are remembered, the ones that were used last: some 10 MiB."""


class PrefixPlaces:
    """The devices on which prompts were read, by their prefixes of 64, 128, 256 ... tokens.

    A device may have evicted what is remembered here: that costs a request the time to compute it,
    and nothing else. Devices are small numbers; one that is free again may be given to another
    device once `forget` was called.
    """

    def __init__(self) -> None:
        self._devices: OrderedDict[bytes, int] = OrderedDict()  # a bit for each device

    def num_found(
        self, model: str, salt: str | None, token_ids: Sequence[int], devices: Sequence[int]
    ) -> list[int]:
        """How many tokens of a prompt each of these devices has read before."""
        found = dict.fromkeys(devices, 0)
        for num_tokens, key in _prefixes(model, salt, token_ids):
            readers = self._devices.get(key, 0)
            if not readers:
                break
            self._devices.move_to_end(key)
            for device in devices:
                if readers >> device & 1:
                    found[device] = num_tokens
        return [found[device] for device in devices]

    def note(self, device: int, model: str, salt: str | None, token_ids: Sequence[int]) -> None:
        """A device is to read a prompt."""
        for _, key in _prefixes(model, salt, token_ids):
            self._devices[key] = self._devices.get(key, 0) | 1 << device
            self._devices.move_to_end(key)
        while len(self._devices) > _MOST_PREFIXES:
            self._devices.popitem(last=False)

    def forget(self, device: int) -> None:
        """A device has lost all KV."""
        kept = OrderedDict[bytes, int]()
        for key, devices in self._devices.items():
            if left := devices & ~(1 << device):
                kept[key] = left
        self._devices = kept


def _prefixes(
    model: str, salt: str | None, token_ids: Sequence[int]
) -> Iterator[tuple[int, bytes]]:
    """Yield the prefixes of a prompt, shortest first: the number of tokens, and a key."""
    digest = hashlib.blake2b(repr((model, salt)).encode(), digest_size=16)
    begin, end = 0, _FIRST_TOKENS
    while end <= min(len(token_ids), _MOST_TOKENS):
        digest.update(array("q", token_ids[begin:end]).tobytes())
        yield end, digest.digest()
        begin, end = end, 2 * end
