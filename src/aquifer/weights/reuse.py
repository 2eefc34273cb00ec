"""Reuse store: which weights are on the device and in host memory, of all models together.

It is Tangram's (section 3.1), on pages: a map from what a group of parameters is
(`aquifer.weights.fingerprint`) to the models that have it on the device. A group that one model has
there is mapped for another one too, so that fine-tunes take the memory of what they differ in. The
pages are accounted to one of them, the first. Behind it are the devices of other engine processes
of the machine, the host cache and the checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aquifer.weights.fingerprint import GroupOrigin, keys_of_equals
from aquifer.weights.host_cache import HostCache
from aquifer.weights.loans import LoanBook, Offered
from aquifer.weights.neighbours import Neighbours
from aquifer.weights.parameters import ParameterGroup
from aquifer.weights.store import Filling, GroupPlace, WeightStore


class WeightUse(Protocol):
    """How the weights of one model are used."""

    @property
    def is_idle(self) -> bool:
        """Whether they are neither in use nor being loaded or copied, and may be evicted."""

    def probability(self, now_s: float) -> float:
        """p(the model is needed again)."""

    @property
    def costs_version(self) -> object:
        """Differs whenever what it takes to load a byte of any group may differ."""

    @property
    def sensitivity(self) -> float:
        """Weight of a second of delay of this model, compared with others (Tangram's alpha)."""

    def on_evict(self) -> None:
        """Some of them have been evicted."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """The weights of one registered model.

    Attributes:
        store: the weights.
        use: how they are used.
        origins: how each group is made; of groups without one, only the key is known.
        keys: what each group is; equal ones may be shared.
    """

    store: WeightStore
    use: WeightUse
    origins: Mapping[ParameterGroup, GroupOrigin]
    keys: dict[ParameterGroup, str]

    def bytes_of(self, group: ParameterGroup) -> int:
        """Bytes of the pages of a group."""
        return group.num_pages * self.store.placement.page_bytes


@dataclass(frozen=True, slots=True)
class _Comparison:
    groups: dict[GroupOrigin, tuple[Member, ParameterGroup]]
    found: Future[dict[GroupOrigin, str]]


_Holder = tuple[Member, ParameterGroup]
"""A model that has a group on the device with its contents, and that group of the model."""


class ReuseStore:
    """Weights of all models on the device, by what they are.

    All methods are for the engine's loop.

    Args:
        host: copies of them in host memory.
        hashes: folder in which hashes of checkpoints are kept.
        loans: is told what is here, for neighbours to read; None where there are none.
        neighbours: the other engine processes of this machine; likewise.

    Attributes:
        host: as given.
        neighbours: as given.
        loaded_bytes: bytes of pages that were filled so far, by model and source.
        version: changes whenever a model gets or loses a group that others have.
    """

    def __init__(
        self,
        host: HostCache,
        hashes: Path,
        loans: LoanBook | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.host = host
        self.neighbours = neighbours
        self.loaded_bytes: Counter[tuple[str, str]] = Counter()
        self._loans = loans
        self.version = 0
        self._hashes = hashes
        self._members: list[Member] = []
        self._holders: dict[str, list[_Holder]] = {}  # the pages are the first one's
        self._num_shared = 0  # groups that several models have
        self._is_stale = False  # models were registered since the last comparison
        self._comparison: _Comparison | None = None  # under way

    # --- members -----------------------------------------------------------------------------

    def register(
        self,
        store: WeightStore,
        use: WeightUse,
        origins: Mapping[ParameterGroup, GroupOrigin],
        keys: Mapping[ParameterGroup, str],
    ) -> Member:
        """Add a model.

        Args:
            store: its weights, none of which are resident.
            use: how they are used.
            origins: how its groups are made from a checkpoint.
            keys: what groups are that are not made from one.
        """
        member = Member(store, use, origins, {})
        for group in store.groups:
            key = keys.get(group)
            with suppress(OSError):  # the load will say what is wrong with the file
                if group in origins:
                    key = origins[group].key_by_file()
            if key is not None and key not in member.keys.values():
                member.keys[group] = key
        self._members.append(member)
        self._want(member, [group for group in member.keys if not self._found(member, group)])
        self._is_stale = sum(1 for each in self._members if each.origins) > 1
        return member

    def unregister(self, member: Member) -> None:
        """The opposite of `register`. Pre-condition: none of its groups is resident."""
        self._members.remove(member)
        if self.neighbours is not None:
            others = {key for each in self._members for key in each.keys.values()}
            self.neighbours.forget(set(member.keys.values()) - others)

    # --- equal groups of several checkpoints ---------------------------------------------------

    def compare(self, threads: Executor, timeout_s: float | None = 0.0) -> bool:
        """Let groups that are equal in several checkpoints have equal keys.

        To be called until it is done, before anything is loaded.

        Args:
            threads: where the checkpoints are read.
            timeout_s: how long to wait for that; None for any time.

        Returns: whether it is done for all models.
        """
        if self._comparison is None:
            if not self._is_stale:
                return True
            self._is_stale = False
            groups = {
                origin: (member, group)
                for member in self._members
                for group, origin in member.origins.items()
            }
            found = threads.submit(keys_of_equals, list(groups), self._hashes)
            self._comparison = _Comparison(groups, found)
        if not wait([self._comparison.found], timeout_s).done:
            return False
        comparison, self._comparison = self._comparison, None
        for origin, key in comparison.found.result().items():
            self._rename(*comparison.groups[origin], key)
        return self.compare(threads, timeout_s)

    def _rename(self, member: Member, group: ParameterGroup, key: str) -> None:
        """Let a group have another key, and those of other models that had the same one.

        Where both keys have pages already, or a model has a group of either, they stay different.
        """
        old = member.keys.get(group)
        if old in (None, key) or (old in self._holders and key in self._holders):
            return
        same = [
            (other, theirs)
            for other in self._members
            for theirs, known in other.keys.items()
            if known == old
        ]
        if any(key in other.keys.values() for other, _ in same):
            return
        for other, theirs in same:
            other.keys[theirs] = key
        if old in self._holders:
            self._holders[key] = self._holders.pop(old)
            if self._loans is not None:
                self._loans.rename(old, key)
        self.host.rename(old, key)
        if self.neighbours is not None:
            self.neighbours.forget((old, key))
        if key not in self._holders:
            self._want(member, [group])

    # --- residency ---------------------------------------------------------------------------

    def holders(self, member: Member, group: ParameterGroup) -> Sequence[Member]:
        """The models that have the pages of a group that a model has.

        The first one is the one that they are accounted to.
        """
        found = self._found(member, group)
        return [holder for holder, _ in found] if (member, group) in found else [member]

    def holders_of_like(self, member: Member, group: ParameterGroup) -> Sequence[Member]:
        """The models that have the contents of a group on the device; the model itself if it has
        pages of its own."""
        found = self._found(member, group)
        if group in member.store.resident and (member, group) not in found:
            return [member]
        return [holder for holder, _ in found]

    @property
    def has_shared(self) -> bool:
        """Whether any group is shared."""
        return self._num_shared > 0

    def is_lent(self, member: Member) -> bool:
        """Whether a neighbour reads any group of a model."""
        return self._loans is not None and self._loans.is_lent(member.keys.values())

    @property
    def num_loan_changes(self) -> int:
        """How often a neighbour has begun or ended to read something."""
        return 0 if self._loans is None else self._loans.num_changes

    @property
    def has_loans(self) -> bool:
        """Whether a neighbour reads anything."""
        return self._loans is not None and self._loans.has_loans

    def lending_paused(self) -> AbstractContextManager[None]:
        """Wait until no neighbour reads anything; none does until the end of the context."""
        return nullcontext() if self._loans is None else self._loans.paused()

    def idle(self) -> tuple[bool, ...]:
        """Whether each model is idle."""
        return tuple(member.use.is_idle for member in self._members)

    def missing(self, member: Member) -> tuple[ParameterGroup, ...]:
        """Groups of a model that `populate` takes pages for: nobody has them on the device."""
        if not member.keys:  # no other model can have any of them
            return member.store.missing
        return tuple(g for g in member.store.missing if not self._found(member, g))

    def populate(
        self, member: Member, filling: Filling | None = None
    ) -> tuple[ParameterGroup, ...] | None:
        """Take pages for all missing groups of a model, or share those of other models.

        Args:
            member: the model.
            filling: begins to fill each group that has pages while the next ones get theirs.

        Returns: those that are to be filled; then `filled` is to be called. None if the pool is
            short, and nothing has changed.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        missing = member.store.missing
        same_as = {
            group: GroupPlace(holder.store, theirs)
            for group in missing
            for holder, theirs in self._found(member, group)[:1]
        }
        for group in same_as:  # before pages are acquired, or the others might lose these for it
            self._join(member, group)
        is_done = False
        try:
            is_done = member.store.populate(missing, same_as, filling)
        finally:
            if not is_done:
                self._leave(member, same_as)
        if not is_done:
            return None
        return tuple(group for group in missing if group not in same_as)

    def filled(self, member: Member, groups: Iterable[ParameterGroup]) -> None:
        """Note that groups of a model have their contents: others may share them from now on."""
        new = [g for g in groups if g in member.keys and not self._found(member, g)]
        for group in new:
            self._join(member, group)
        if self._loans is not None and new:
            store = member.store
            self._loans.offer(
                [Offered(member.keys[g], store.num_bytes_of(g), store.parts(g)) for g in new]
            )
        if self.neighbours is not None:
            self.neighbours.forget(member.keys[group] for group in new)

    def evict(self, member: Member, groups: Iterable[ParameterGroup] | None = None) -> None:
        """Take pages from groups of a model, or from all; other models keep theirs."""
        wanted = member.store.groups if groups is None else tuple(groups)
        held = [group for group in wanted if (member, group) in self._found(member, group)]
        self._leave(member, held)
        member.store.evict(wanted)

    def evict_from_all(self, member: Member, groups: Iterable[ParameterGroup]) -> list[Member]:
        """Take pages from groups of a model, and from all models that share these; returns the
        models."""
        losers: dict[Member, list[ParameterGroup]] = {}
        for group in groups:
            found = self._found(member, group)
            for holder, theirs in found if (member, group) in found else [(member, group)]:
                losers.setdefault(holder, []).append(theirs)
        for loser, lost in losers.items():
            self.evict(loser, lost)
        return list(losers)

    def distinct_bytes(self, members: Iterable[Member]) -> int:
        """Bytes of pages of the weights of several models, equal groups counted once."""
        seen: set[str] = set()
        num_bytes = 0
        for member in members:
            for group in member.store.groups:
                key = member.keys.get(group)
                if key is None or key not in seen:
                    num_bytes += member.bytes_of(group)
                if key is not None:
                    seen.add(key)
        return num_bytes

    def _found(self, member: Member, group: ParameterGroup) -> Sequence[_Holder]:
        """Who has a group like one of a model on the device."""
        key = member.keys.get(group)
        return self._holders.get(key, ()) if key is not None else ()

    def _join(self, member: Member, group: ParameterGroup) -> None:
        """A model has a group with its contents."""
        holders = self._holders.setdefault(member.keys[group], [])
        holders.append((member, group))
        if len(holders) > 1:
            self.version += 1
            self._num_shared += len(holders) == 2

    def _leave(self, member: Member, groups: Iterable[ParameterGroup]) -> None:
        """A model is about to lose groups."""
        lost: list[ParameterGroup] = []  # from the device
        for group in groups:
            holders = self._holders[member.keys[group]]
            if len(holders) > 1:
                self.version += 1
                self._num_shared -= len(holders) == 2
                if holders[0] == (member, group):
                    heir, theirs = holders[1]
                    heir.store.own(theirs)
            holders.remove((member, group))
            if not holders:
                del self._holders[member.keys[group]]
                lost.append(group)
        if self._loans is not None and lost:
            self._loans.withdraw([member.keys[group] for group in lost])
        self._want(member, lost)

    def _want(self, member: Member, groups: Iterable[ParameterGroup]) -> None:
        """No model has these groups on the device."""
        if self.neighbours is not None:
            self.neighbours.want({member.keys[g]: member.store.num_bytes_of(g) for g in groups})
