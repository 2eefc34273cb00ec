"""Pinning: which prefixes may be pinned, and how much each client has pinned."""

from __future__ import annotations

import math

import numpy as np

from aquifer.cache.prefix import PrefixCache
from aquifer.engine import checks
from aquifer.engine.model_host import ModelHost
from aquifer.engine.model_set import ModelSet
from aquifer.engine.params import Request
from aquifer.errors import CapacityError, RequestError
from aquifer.memory.room import Room
from aquifer.sizes import format_size


class Pinning:
    """Pins prefixes, up to half of the memory that KV can have.

    Of that half, a client with a name may have a share. Each of its prefixes counts in full, also
    if it begins like another one: what they have in common stays pinned when one of them goes.

    Args:
        models: the models.
        room: room of the pool.
        share: of what may be pinned, that one client may have.
    """

    def __init__(self, models: ModelSet[ModelHost], room: Room, share: float) -> None:
        self._models = models
        self._room = room
        self._share = share
        # Bytes of the prefixes of clients with a name, by client, model, salt and tokens.
        self._held: dict[tuple[str, str, str | None, bytes], int] = {}

    def check(self, request: Request) -> bool:
        """Check that a prefix may be pinned.

        Args:
            request: a request with the prefix as its prompt, which computes its KV.

        Returns: whether its KV has to be computed; otherwise it is retained already.

        Raises:
            UnknownModelError: no such model.
            RequestError: prefixes are not kept by this server, or the model has no KV, or this
                prefix is shorter than a block.
            CapacityError: pinned prefixes would take too much memory.
        """
        host, prefixes = self._find(request.model)
        tokens = checks.check_token_ids(request, host.info.vocab_size)
        footprint = host.lane.cache.footprint
        if not footprint.has_kv:
            raise RequestError(
                f"model {host.info.name!r} has no KV, so there are no prefixes of it to pin",
                param="model",
            )
        num_blocks = footprint.whole_blocks(len(tokens))
        if num_blocks == 0:
            raise RequestError(
                f"the prefix has {len(tokens)} tokens; it must have at least "
                f"{math.ceil(footprint.block_tokens)}, since blocks of KV are kept whole",
                param="prompt",
            )
        models = self._models
        kv_bytes = self._room.size(models.least_kv_pages) + models.pinned_bytes
        held = [size for key, size in self._held.items() if key[0] == request.client]
        keys = host.lane.prefix_keys(request.cache_salt, len(tokens))
        held_bytes = sum(held) + len(keys) * prefixes.prefix_bytes(len(tokens))
        limit_bytes = int(self._share * kv_bytes / 2)
        if request.client and held_bytes > limit_bytes:
            raise CapacityError(
                f"this API key's pinned prefixes would take {format_size(held_bytes)}, more than "
                f"the {format_size(limit_bytes)} that one key may pin; unpin others first",
                param="prompt",
            )
        more_bytes = sum(prefixes.pin_bytes(tokens, key) for key in keys)
        pinned_bytes = models.promised_bytes + more_bytes
        if more_bytes and 2 * pinned_bytes > kv_bytes:
            raise CapacityError(
                f"pinned prefixes would take {format_size(pinned_bytes)}, more than half of the "
                f"{format_size(kv_bytes)} that this server has for KV",
                param="prompt",
            )
        num_kept = prefixes.match(tokens, keys[0]).num_tokens
        return num_kept < host.lane.cache.tokens_in(num_blocks) - 1

    def pin(self, request: Request) -> int:
        """Pin the prefix of a request that was checked; returns how many tokens are kept."""
        host, prefixes = self._find(request.model)
        tokens = np.array(request.prompt_token_ids, np.int32)
        cache = host.lane.cache
        num_blocks = cache.footprint.whole_blocks(len(tokens))
        keys = host.lane.prefix_keys(request.cache_salt, len(tokens))
        for key in keys:
            prefixes.pin(tokens, key)
        if request.client:
            pinned = (request.client, request.model, request.cache_salt, tokens.tobytes())
            self._held[pinned] = len(keys) * prefixes.prefix_bytes(len(tokens))
        return cache.tokens_in(num_blocks)

    def unpin(self, model: str, token_ids: list[int], salt: str | None) -> None:
        """The opposite of `pin` of the same tokens; unknown prefixes are ignored.

        Raises:
            UnknownModelError: no such model.
            RequestError: prefixes are not kept by this server.
        """
        host, prefixes = self._find(model)
        tokens = np.array(token_ids, np.int32)
        for key in host.lane.prefix_keys(salt, len(tokens)):
            prefixes.unpin(tokens, key)
        prefix = (model, salt, tokens.tobytes())
        self._held = {key: size for key, size in self._held.items() if key[1:] != prefix}

    def remove_model(self, model: str) -> None:
        """The prefixes of a model are gone."""
        self._held = {key: size for key, size in self._held.items() if key[1] != model}

    def _find(self, model: str) -> tuple[ModelHost, PrefixCache]:
        host = self._models.find(model)
        if host.lane.prefixes is None:
            raise RequestError("this server was started with --no-enable-prefix-caching")
        return host, host.lane.prefixes
