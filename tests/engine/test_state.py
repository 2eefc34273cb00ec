"""Hybrid models in the engine: prefixes with recurrent state, forks, beams and preemption.

The expected tokens are computed from whole sequences, without KV or state of earlier tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.architectures import HYBRIDS, save_tiny
from tests.cases import covering
from tests.engine.conftest import PLENTY_BYTES
from tests.engine.life import PAGE_BYTES, Case, Open, Sent, World, make_case
from tests.models.tiny import TINY_MODELS, TinyModel

from aquifer.cache import KV_CACHES
from aquifer.engine.lane import Lane
from aquifer.engine.lane_pages import most_pages
from aquifer.engine.params import SamplingParams
from aquifer.memory.pool import Kind, Owner

NAMES = ("recurrent", "bamba")
"""A model with a state as large as KV of a token or two, and one with a state of 48 tokens' KV."""

COMMON = (41, 40, 66, 80)
"""Tokens after which prompts leave the long one."""

LONG_TOKENS = 81


@dataclass(frozen=True)
class Prompts:
    """The requests to one model."""

    long: Case
    leaving: list[tuple[Case, Case]]  # for each of `COMMON`, two prompts that leave there
    alone: list[Case]  # prompts that have nothing in common
    samples: Case
    beams: Case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of the models, which `tinies` saves."""
    # A process that comes back to this module makes another one.
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture(scope="module")
def tinies(folder: Path) -> dict[str, TinyModel]:
    """The models; that of Transformers computes all tokens at once."""
    config = HYBRIDS["bamba"]()
    config.eos_token_id = None
    model = save_tiny(config, folder / "bamba", seed=3)

    known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(_config: Any, _weights: Any, token_ids: torch.Tensor) -> torch.Tensor:
        key = tuple(token_ids.tolist())
        if key not in known:
            known[key] = model(token_ids[None], use_cache=False).logits[0]
        return known[key]

    bamba = TinyModel({"vocab_size": config.vocab_size}, {}, logits)
    TINY_MODELS["recurrent"].save(folder / "recurrent")
    return {"recurrent": TINY_MODELS["recurrent"], "bamba": bamba}


@pytest.fixture(scope="module")
def prompts(tinies: dict[str, TinyModel]) -> dict[str, Prompts]:
    """The requests to each model, in which rounding changes no token."""
    return {name: make_prompts(tiny) for name, tiny in tinies.items()}


def make_prompts(tiny: TinyModel) -> Prompts:
    random = Random(5)

    def case(kind: str, common: Sequence[int], num_tokens: int) -> Case:
        for _ in count():
            more = [random.randrange(tiny.config["vocab_size"]) for _ in range(num_tokens)]
            found = make_case(tiny, kind, [*common, *more], random)
            # Prompts that leave the long one together go on differently.
            if found is not None and more[0] not in used:
                used.add(more[0])
                return found
        raise AssertionError("no end")

    used: set[int] = set()
    long = case("greedy", [], LONG_TOKENS)
    leaving = []
    for num_common in COMMON:
        used = {long.prompt[num_common]}
        first, second = (case("greedy", long.prompt[:num_common], 5) for _ in range(2))
        leaving.append((first, second))
    used = set()
    alone = [case("greedy", [], num_tokens) for num_tokens in (1, 33, 62)]
    sampled = SamplingParams(n=3, temperature=0, max_tokens=long.params.max_tokens)
    samples = Case(long.prompt, sampled, long.completions * 3, "length")
    return Prompts(long, leaving, alone, samples, case("beams", [], 39))


def open_one(
    open_world: Open, name: str, memory_bytes: int = PLENTY_BYTES, **options: Any
) -> World:
    return open_world(memory_bytes, models={name: name}, **options)


def lane_of(world: World) -> Lane:
    (lane,) = world.engine.lanes.values()
    assert lane.has_state
    return lane


def serve(world: World, *cases: Case) -> list[int]:
    """Serve requests side by side; returns how many tokens of each were cached.

    What they receive is compared by `World`.
    """
    (name,) = world.checkpoints
    sent: list[Sent] = [world.send(name, case) for case in cases]
    world.finish()
    assert [each.error for each in sent] == [None] * len(sent)
    check_idle(world)
    return [each.num_cached_tokens for each in sent]


def check_idle(world: World) -> None:
    """No sequence has anything; checkpoints are accounted as prefixes."""
    (name,), lane = world.checkpoints, lane_of(world)
    world.check()
    in_use = world.engine.pool.usage().in_use_bytes
    assert not in_use.get(Owner(name, Kind.STATE), 0)
    assert not in_use.get(Owner(name, Kind.KV), 0)
    held_bytes = 0 if lane.prefixes is None else lane.prefixes.stats.held_bytes
    prefix_bytes = in_use.get(Owner(name, Kind.PREFIX), 0)
    if world.engine.config.kv_cache == "paged":  # some blocks of a page may be held
        assert prefix_bytes >= held_bytes
    else:
        assert prefix_bytes == held_bytes


def clear(world: World) -> None:
    """Drop all prefixes; then the model has its weights alone."""
    prefixes = lane_of(world).prefixes
    assert prefixes is not None
    prefixes.clear()
    world.check()
    (name,) = world.checkpoints
    assert world.used_bytes(name) == world.engine.statuses[name].resident_bytes


@pytest.mark.parametrize(
    ("name", "kv_cache", "steps"),
    covering(NAMES, KV_CACHES, [(7, 1), (512, 1), (512, 0), (1, 1)], strength=1),
    ids=str,
)
def test_prefixes_are_found_with_their_state(
    open_world: Open, prompts: dict[str, Prompts], name: str, kv_cache: str, steps: tuple[int, int]
) -> None:
    """Where a sequence has stopped: after its prompt's last block, and where it left another."""
    max_num_batched_tokens, num_ahead = steps
    world = open_one(
        open_world,
        name,
        kv_cache=kv_cache,
        max_num_batched_tokens=max_num_batched_tokens,
        num_ahead=num_ahead,
    )
    lane, of = lane_of(world), prompts[name]
    grain = int(lane.cache.footprint.block_tokens)

    def whole(num_tokens: int) -> int:
        return num_tokens // grain * grain

    leaving = list(zip(COMMON, of.leaving, strict=True))
    if max_num_batched_tokens == 1:  # the others would have only more of the same steps
        leaving = leaving[:2]
    assert serve(world, of.long) == [0]
    assert serve(world, of.long) == [whole(LONG_TOKENS - 1)]
    for num_common, (first, second) in leaving:
        (num_cached,) = serve(world, first)
        assert num_cached % grain == 0
        assert num_cached <= whole(num_common)
        if name == "bamba" and num_common == COMMON[0]:
            assert num_cached == 0  # its KV is there, but no checkpoint
        assert serve(world, second) == [whole(num_common)]
        (num_cached,) = serve(world, first)
        assert whole(num_common) <= num_cached <= whole(len(first.prompt) - 1)
    serve(world, *of.alone, of.samples, of.beams, of.long, *(pair[1] for _, pair in leaving))
    cached = serve(world, of.samples, of.long, of.beams, *(pair[0] for _, pair in leaving))
    assert min(cached) > 0
    clear(world)
    assert serve(world, of.long) == [0]


@pytest.mark.parametrize(("name", "kv_cache"), covering(NAMES, KV_CACHES, strength=2))
def test_without_a_prefix_cache_the_tokens_are_the_same(
    open_world: Open, prompts: dict[str, Prompts], name: str, kv_cache: str
) -> None:
    of = prompts[name]
    world = open_one(open_world, name, kv_cache=kv_cache, enable_prefix_caching=False, num_ahead=1)
    cases = [of.long, *of.alone, of.samples, of.beams, *(pair[0] for pair in of.leaving)]
    assert serve(world, *cases, of.long) == [0] * (len(cases) + 1)


@pytest.mark.parametrize(
    ("name", "kv_cache", "max_num_batched_tokens"),
    covering(NAMES, KV_CACHES, [7, 512], strength=2),
)
def test_samples_of_a_prompt_share_it(
    monkeypatch: pytest.MonkeyPatch,
    open_world: Open,
    prompts: dict[str, Prompts],
    name: str,
    kv_cache: str,
    max_num_batched_tokens: int,
) -> None:
    """The first one stops before its last token, where the others fork from it."""
    forks: list[int] = []
    world = open_one(
        open_world,
        name,
        kv_cache=kv_cache,
        max_num_batched_tokens=max_num_batched_tokens,
        num_ahead=1,
    )
    cache = lane_of(world).cache
    fork = cache.fork

    def counted_fork(parent: int, child: int, num_tokens: int) -> bool:
        has_forked = fork(parent, child, num_tokens)
        if has_forked:
            forks.append(num_tokens)
        return has_forked

    monkeypatch.setattr(cache, "fork", counted_fork)
    serve(world, prompts[name].samples)
    assert forks == [LONG_TOKENS - 1] * 2
    serve(world, prompts[name].samples, prompts[name].alone[1])
    assert forks == [LONG_TOKENS - 1] * 4
    clear(world)


@pytest.mark.parametrize(
    ("name", "kv_cache", "preemption_mode"),
    covering(NAMES, KV_CACHES, ["swap", "recompute"], strength=2),
)
def test_preempted_sequences_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
    open_world: Open,
    prompts: dict[str, Prompts],
    name: str,
    kv_cache: str,
    preemption_mode: str,
) -> None:
    """In a pool that holds three of them, all are admitted, whether or not they have room."""
    monkeypatch.setattr("aquifer.engine.headroom.Headroom.has_room", lambda *_: True)
    of = prompts[name]
    cases = [of.long, *of.alone, *(pair[0] for pair in of.leaving), of.samples, of.beams]
    most = max(case.num_tokens for case in cases)
    options: dict[str, Any] = {
        "kv_cache": kv_cache,
        "preemption_mode": preemption_mode,
        "num_ahead": 1,
    }
    world = open_one(open_world, name, **options)
    num_pages = most_pages(lane_of(world), LONG_TOKENS, most, 3)
    memory_bytes = world.used_bytes(name) + num_pages * PAGE_BYTES
    world = open_one(open_world, name, memory_bytes, **options, max_num_batched_tokens=12)
    serve(world, *cases)
    lane = lane_of(world)
    assert lane.num_preemptions > 0
    assert (lane.num_swaps > 0) == (preemption_mode == "swap")
    clear(world)


@pytest.mark.parametrize(
    ("name", "kv_cache", "num_tokens"), covering(NAMES, KV_CACHES, [64, 65], strength=2)
)
def test_a_pinned_prefix_keeps_its_state(
    open_world: Open, prompts: dict[str, Prompts], name: str, kv_cache: str, num_tokens: int
) -> None:
    """However much is evicted; unpinned, it is evicted like any other."""
    world = open_one(open_world, name, kv_cache=kv_cache, num_ahead=1)
    prefixes = lane_of(world).prefixes
    assert prefixes is not None
    of = prompts[name]
    pinned = of.long.prompt[:num_tokens]
    num_pinned = world.engine.pin_prefix(name, pinned)
    grain = int(lane_of(world).cache.footprint.block_tokens)
    assert num_pinned == num_tokens // grain * grain
    world.finish()
    serve(world, *of.alone)
    prefixes.evict(1 << 40, 1e9)
    assert prefixes.evictable_bytes == 0
    assert prefixes.stats.held_bytes == prefixes.stats.pinned_bytes > 0
    assert serve(world, of.long) == [num_pinned]
    world.engine.unpin_prefix(name, pinned)
    prefixes.evict(1 << 40, 1e9)
    assert prefixes.stats.held_bytes == prefixes.pinned_bytes == 0
    assert serve(world, of.long) == [0]
    clear(world)
