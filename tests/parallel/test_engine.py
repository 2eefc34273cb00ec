"""Engines of two and four ranks, over gloo, make the tokens of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.architectures import HYBRIDS, OUR_DECODER, save_tiny
from tests.cases import EVERY_CASE
from tests.checkpoints import llama_config, tiny_llama
from tests.engine.mixed import Results, note, requests

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.lane_pages import most_pages
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import ConfigError
from aquifer.memory.pool import Kind
from aquifer.parallel.ranks import Ranks

RanksOf = Callable[[int], Ranks]

PAGE_BYTES = 4096
STEP_TOKENS = 20
PLENTY_BYTES = 32 << 20
OUTPUT_TOKENS = 16
CASES = [
    ("llama", 2, "virtual", "swap", 0),
    ("gpt2", 2, "paged", "swap", 0),
    ("gemma2", 4, "virtual", "recompute", 0),
    ("qwen2_moe", 2, "paged", "recompute", 0),
    ("bamba", 2, "virtual", "swap", 1),
    ("deepseek_v2", 4, "paged", "swap", 1),
    ("falcon", 2, "virtual", "recompute", 1),
    ("bloom", 2, "paged", "recompute", 1),
    ("gpt_oss", 4, "virtual", "swap", 0),
]
"""(architecture, ranks, KV cache, preemption, steps planned ahead): two architectures have experts,
two have windows, one has recurrent state and one latent KV."""
HARDLY_GROW = ("gemma2", "gpt_oss")
"""Those with windows: the memory that one request needs does for several."""
EVERY = [
    (name, *case)
    for name, *_ in CASES
    for case in product((2, 4), ("virtual", "paged"), ("swap", "recompute"), (0, 1))
]


def config_of(folder: Path, size: int, memory_bytes: int, **options: Any) -> EngineConfig:
    return EngineConfig(
        (ModelSpec("m", folder),),
        device="cpu",
        tensor_parallel_size=size,
        memory_bytes=memory_bytes,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=96,
        max_num_seqs=9,
        page_bytes=PAGE_BYTES,
        block_size=4,
        swap_space_bytes=1 << 20,
        **options,
    )


def some_requests() -> list[Request]:
    return requests(7, OUTPUT_TOKENS)


def long_request() -> Request:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    return Request("long", "m", [number * 7 % 190 for number in range(80)], params, 0.0)


@contextmanager
def opened(config: EngineConfig, ranks: Ranks | None) -> Iterator[Engine]:
    with closing(Engine.open(config, ranks=ranks)) as engine:
        yield engine
        engine.pool.check()


def run(engine: Engine, some: list[Request]) -> Results:
    results: Results = {}
    for request in some:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            note(results, output)
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Results]]:
    """Returns a model and what one device makes of the requests, in plenty of memory."""
    found: dict[str, tuple[Path, Results]] = {}

    def model(name: str) -> tuple[Path, Results]:
        if name not in found:
            folder = tmp_path_factory.mktemp("model") / name
            save_tiny((OUR_DECODER | HYBRIDS)[name](), folder, 2)
            with opened(config_of(folder, 1, PLENTY_BYTES), None) as engine:
                found[name] = folder, run(engine, [*some_requests(), long_request()])
        return found[name]

    return model


@pytest.mark.parametrize(
    ("name", "size", "cache", "mode", "num_ahead"), EVERY if EVERY_CASE else CASES
)
def test_tokens_equal_those_of_one_device(
    models: Callable[[str], tuple[Path, Results]],
    ranks_of: RanksOf,
    name: str,
    size: int,
    cache: str,
    mode: Any,
    num_ahead: int,
) -> None:
    """Sampling, beams, penalties and log probabilities; with hardly more memory than one request
    takes, so that requests are preempted; with prefixes that are retained. Where steps are planned
    ahead, pages are mapped in the background."""
    folder, expected = models(name)
    options = {"kv_cache": cache, "preemption_mode": mode}
    if num_ahead:  # as on a GPU
        options["map_ahead"] = "background"
    with opened(config_of(folder, size, PLENTY_BYTES, **options), ranks_of(size)) as engine:
        (info,), (lane,) = engine.models.values(), engine.lanes.values()
        num_pages = max(
            most_pages(
                lane,
                len(each.prompt_token_ids),
                len(each.prompt_token_ids) + OUTPUT_TOKENS,
                each.params.num_sequences,
            )
            for each in some_requests()
        )
        # What is retained of a prompt is found.
        for _ in range(2):
            assert run(engine, [long_request()]) == {("long", 0): expected["long", 0]}
        assert engine.stats().num_prefix_hit_tokens["m"] > 0
    memory_bytes = info.weight_bytes + num_pages * PAGE_BYTES
    with opened(config_of(folder, size, memory_bytes, **options), ranks_of(size)) as engine:
        engine.num_ahead = num_ahead

        results = run(engine, some_requests())
        (lane,) = engine.lanes.values()
        assert results == {key: value for key, value in expected.items() if key[0] != "long"}
        # With more ranks, a page has room for more tokens, and not all cases fill theirs.
        if name not in HARDLY_GROW and (name, size, cache, mode, num_ahead) in CASES:
            assert lane.num_preemptions > 0
            assert (lane.num_swaps > 0) == (mode == "swap")
        (memory,) = engine.memory().models.values()
        assert memory.bytes_by_kind[Kind.KV] == 0


def test_a_rank_has_its_part_of_weights_and_kv(ranks_of: RanksOf, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m", num_attention_heads=8, num_key_value_heads=4)
    infos = {}
    for size in (1, 2, 4):
        group = ranks_of(size) if size > 1 else None
        with opened(config_of(folder, size, PLENTY_BYTES), group) as engine:
            infos[size] = engine.models["m"]
    for size in (2, 4):
        assert infos[size].kv_bytes_per_token * size == infos[1].kv_bytes_per_token
        assert infos[size].weight_bytes * size < infos[1].weight_bytes * 1.2
        assert infos[size].num_parameters == infos[1].num_parameters


def test_dummy_weights_are_the_same_model_at_any_size(ranks_of: RanksOf, tmp_path: Path) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(llama_config(vocab_size=319)))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found = []
    for size in (1, 2, 4):
        config = config_of(tmp_path, size, PLENTY_BYTES, load_format="dummy", seed=5)
        with opened(config, ranks_of(size) if size > 1 else None) as engine:
            found.append(run(engine, [Request("r", "m", [5, 3, 8], params, 0.0)]))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0]["r", 0][0])) > 3


def test_models_take_turns(ranks_of: RanksOf, tmp_path: Path) -> None:
    """Two models that do not fit together, one of which is there twice: weights are evicted on all
    ranks, loaded again, and shared."""
    first = tiny_llama(tmp_path / "first", num_hidden_layers=4)
    second = tiny_llama(tmp_path / "second", seed=1, num_hidden_layers=4)
    specs = [ModelSpec("a", first), ModelSpec("again", first), ModelSpec("b", second)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def served(size: int, memory_bytes: int, group: Ranks | None) -> tuple[Results, Engine]:
        config = EngineConfig(
            tuple(specs),
            device="cpu",
            tensor_parallel_size=size,
            memory_bytes=memory_bytes,
            max_model_len=64,
            page_bytes=PAGE_BYTES,
        )
        results: Results = {}
        with opened(config, group) as engine:
            for turn in range(3):
                some = [
                    Request(f"{spec.name} {turn}", spec.name, [7, 8, 9 + turn], params, 0.0)
                    for spec in specs
                ]
                results |= run(engine, some)
            assert engine.statuses["again"].shared_bytes or engine.statuses["a"].shared_bytes
        return results, engine

    expected, _ = served(1, PLENTY_BYTES, None)
    whole_bytes = engine_bytes(ranks_of(2), first)
    results, _ = served(2, int(1.5 * whole_bytes), ranks_of(2))
    assert results == expected


def engine_bytes(group: Ranks, folder: Path) -> int:
    """Bytes of a rank's weights of a model."""
    with opened(config_of(folder, 2, PLENTY_BYTES), group) as engine:
        return engine.models["m"].weight_bytes


def test_a_damaged_checkpoint_is_refused_on_all_ranks(ranks_of: RanksOf, tmp_path: Path) -> None:
    """The group serves the next engine."""
    folder = tiny_llama(tmp_path / "m", num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(ConfigError, match="attention heads: 3"):
        Engine.open(config_of(folder, 2, PLENTY_BYTES), ranks=ranks_of(2))
    good = tiny_llama(tmp_path / "good")
    with opened(config_of(good, 2, PLENTY_BYTES), ranks_of(2)) as engine:
        file = good / "model.safetensors"
        engine.unload_model("m")
        file.write_bytes(file.read_bytes()[:9000])
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            engine.load_model("m")
    with opened(config_of(tiny_llama(tmp_path / "next"), 2, PLENTY_BYTES), ranks_of(2)) as engine:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        assert len(run(engine, [Request("r", "m", [5], params, 0.0)])["r", 0][0]) == 3
