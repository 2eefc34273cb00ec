"""Weights in host memory: what is between the device and the checkpoint on disk.

An entry is a copy of a group of parameters as it lay in pages of the pool: converted, transposed
and decoded. So one copy brings it back, at the speed of the bus. Entries are found by what the
parameters are (`aquifer.weights.fingerprint`): models with equal ones have one entry together.

The cache has an order of eviction of its own, since its bytes are not those of the device: an entry
goes for another one if its models are less likely to be needed again. All are restored from the
same disk, so for each byte nothing else differs. An entry never goes for one that is worth less, so
models that take turns in too little host memory do not push each other out in vain.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from aquifer.errors import DriverError
from aquifer.memory.host_buffer import HostBuffer, in_pieces, locked_buffer
from aquifer.weights.loader import copy_bytes

_log = logging.getLogger(__name__)

Worth = Callable[[], float]
"""Tells how likely a model is to be needed again; it stands for the model in the cache."""


@dataclass(slots=True, eq=False)
class _Entry:
    buffer: HostBuffer
    models: set[Worth]
    num_leases: int = 0
    is_dropped: bool = False  # and is closed when the last lease ends

    @property
    def worth(self) -> float:
        return sum(worth() for worth in self.models)


class HostCache:
    """A bounded part of host memory with copies of weights. All methods may be called from any
    thread.

    Args:
        num_bytes: the bound; 0 for none.
        device: device of the weights.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes = num_bytes
        self._device = device
        self._entries: dict[str, _Entry] = {}
        self._used_bytes = 0
        self.version = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """The bound; less than was asked for if the host has refused memory."""
        return self._num_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries."""
        return self._used_bytes

    def has(self, key: str) -> bool:
        """Whether there is an entry."""
        return key in self._entries

    @contextmanager
    def lease(self, key: str) -> Iterator[torch.Tensor | None]:
        """The bytes of an entry, which stays until the end of the context; None if there is none.

        Copies from them are cut by `in_pieces`.

        Pre-condition: copies from it are done at the end.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.num_leases += 1
        try:
            yield None if entry is None else entry.buffer.bytes
        finally:
            if entry is not None:
                with self._lock:
                    entry.num_leases -= 1
                    if entry.is_dropped and not entry.num_leases:
                        entry.buffer.close()

    def keep(self, key: str, contents: torch.Tensor, model: Worth) -> bool:
        """Keep a copy of a group for a model, unless what would have to go is worth more.

        Args:
            key: what the parameters are.
            contents: uint8, the bytes of the group, which stay until the copy is done: on return.
            model: the model.

        Returns: whether there is an entry now.
        """
        num_bytes = contents.numel()
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.models.add(model)
                return True
            if not self._make_room(num_bytes, model()):
                return False
            self._used_bytes += num_bytes  # before the slow part, which is without the lock
        buffer: HostBuffer | None = None
        try:
            buffer = locked_buffer(num_bytes, self._device)
            copy_bytes([(part, host) for host, part in in_pieces(buffer.bytes, contents)])
        except BaseException as error:
            with self._lock:
                self._used_bytes -= num_bytes
                if isinstance(error, DriverError) and buffer is None:
                    self._num_bytes = self._used_bytes
                    _log.warning("the host cache does not grow any more: %s", error)
                    return False
            if buffer is not None:
                buffer.close()
            raise
        with self._lock:
            self._entries[key] = _Entry(buffer, {model})
            self.version += 1
        return True

    def rename(self, key: str, new: str) -> None:
        """Let an entry, if there is one, be found by another key; equal ones become one."""
        with self._lock:
            self.version += 1
            entry = self._entries.pop(key, None)
            if entry is None:
                return
            other = self._entries.setdefault(new, entry)
            if other is not entry:
                other.models |= entry.models
                self._drop(entry)

    def forget(self, model: Worth) -> None:
        """Drop the entries of a model that no other model has."""
        with self._lock:
            for key, entry in list(self._entries.items()):
                entry.models.discard(model)
                if not entry.models:
                    del self._entries[key]
                    self._drop(entry)

    def close(self) -> None:
        """Give all memory back. Pre-condition: no copy is under way."""
        with self._lock:
            for entry in self._entries.values():
                self._drop(entry)
            self._entries.clear()

    def _make_room(self, num_bytes: int, worth: float) -> bool:
        """Evict entries that are worth less; False, and nothing has changed, if that is too little.

        The lock is held.
        """
        missing_bytes = self._used_bytes + num_bytes - self._num_bytes
        if missing_bytes <= 0:
            return True
        victims: list[str] = []
        idle = [(e.worth, key) for key, e in self._entries.items() if not e.num_leases]
        for victim_worth, key in sorted(idle, key=lambda each: each[0]):
            if victim_worth >= worth:
                return False
            victims.append(key)
            missing_bytes -= self._entries[key].buffer.num_bytes
            if missing_bytes <= 0:
                for gone in victims:
                    self._drop(self._entries.pop(gone))
                return True
        return False

    def _drop(self, entry: _Entry) -> None:
        """Free an entry that is not found any more; the lock is held."""
        self.version += 1
        self._used_bytes -= entry.buffer.num_bytes
        entry.is_dropped = True
        if not entry.num_leases:
            entry.buffer.close()
