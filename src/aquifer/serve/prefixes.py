"""Prefixes pinned by clients, and the cache salts that isolate clients from each other."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from uuid import uuid4

from aquifer.serve.engines import Engines


def joined_salt(owner: str | None, cache_salt: str | None) -> str | None:
    """Return the cache salt of a request.

    Args:
        owner: the name of the client's API key, or None where clients share prefixes. Its length
            is fixed, so no `cache_salt` can make one client's salt equal another's.
        cache_salt: the additional salt in the request.
    """
    return cache_salt if owner is None else owner + (cache_salt or "")


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix with pinned KV."""

    prefix_id: str
    created_s: int  # since 1970
    owner: str | None  # the only client that sees it; None for all clients
    model: str
    token_ids: list[int]
    salt: str | None
    num_tokens: int  # tokens with pinned KV


class PinnedPrefixes:
    """The prefixes pinned in the engine, by id. Pinning the same prefix again returns the first.

    Args:
        engines: the engines.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._pinned: dict[str, PinnedPrefix] = {}
        self._lock = asyncio.Lock()  # held until the engine has answered

    def of(self, owner: str | None) -> list[PinnedPrefix]:
        """List this owner's pinned prefixes, oldest first."""
        return [prefix for prefix in self._pinned.values() if prefix.owner == owner]

    async def pin(
        self,
        owner: str | None,
        client: str,
        model: str,
        token_ids: list[int],
        cache_salt: str | None,
    ) -> PinnedPrefix:
        """Pin the KV of a prefix until `unpin`.

        Args:
            owner: the only client that will see it; None for all clients.
            client: name of the client that pins it.
            model: served name of the model.
            token_ids: the prefix.
            cache_salt: the salt in the request.

        Raises:
            RequestError: it cannot be pinned.
            EngineError: the engine has stopped.
        """
        salt = joined_salt(owner, cache_salt)
        async with self._lock:
            for prefix in self._pinned.values():
                if (prefix.model, prefix.salt, prefix.token_ids) == (model, salt, token_ids):
                    return prefix
            num_tokens = await self._engines.pin(model, token_ids, salt, client)
            prefix = PinnedPrefix(
                f"prefix-{uuid4().hex}", int(time.time()), owner, model, token_ids, salt, num_tokens
            )
            self._pinned[prefix.prefix_id] = prefix
            return prefix

    def forget(self, model: str) -> None:
        """Forget the prefixes of a model that was removed."""
        self._pinned = {key: each for key, each in self._pinned.items() if each.model != model}

    async def unpin(self, owner: str | None, prefix_id: str) -> bool:
        """Unpin a prefix; return whether this owner had one with this id.

        Raises:
            EngineError: the engine has stopped.
        """
        async with self._lock:
            prefix = self._pinned.get(prefix_id)
            if prefix is None or prefix.owner != owner:
                return False
            await self._engines.unpin(prefix.model, prefix.token_ids, prefix.salt)
            del self._pinned[prefix_id]
            return True
