"""Guard pages in an engine: how the mode is switched on, and that answers stay equal."""

from __future__ import annotations

import pytest
import torch
from tests.engine.life import Case, Open

from aquifer.cache import KV_CACHES
from aquifer.cache.tensors import KVTensors
from aquifer.config import EngineConfig
from aquifer.errors import ConfigError
from aquifer.memory.guard import POISON
from aquifer.memory.owners import GUARD


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what is no command, such as `LLM`; an argument wins over it."""
    for text, is_on in (("1", True), ("false", False)):
        monkeypatch.setenv("AQUIFER_GUARD_PAGES", text)
        assert EngineConfig(()).guard_pages is is_on
        assert EngineConfig((), guard_pages=not is_on).guard_pages is not is_on
    monkeypatch.delenv("AQUIFER_GUARD_PAGES")
    assert EngineConfig(()).guard_pages is False
    monkeypatch.setenv("AQUIFER_GUARD_PAGES", "maybe")
    with pytest.raises(ConfigError, match="AQUIFER_GUARD_PAGES is 'maybe'"):
        EngineConfig(())


@pytest.mark.parametrize("guard_pages", [False, True])
@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_the_same_answers(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str, guard_pages: bool
) -> None:
    """`World` compares answers with Transformers, logarithms of probabilities too."""
    world = open_world(
        models={"a": "llama"}, kv_cache=kv_cache, guard_pages=guard_pages, max_num_seqs=3
    )
    pool = world.engine.pool
    assert (pool.guards is not None) == guard_pages
    assert (GUARD in pool.usage().in_use_bytes) == guard_pages
    for case in cases["llama"]:
        world.send("a", case)
    num_guards = 0
    while world.engine.has_work:
        world.step()
        world.check()
        tensors = world.engine.lanes["a"].cache.tensors
        assert isinstance(tensors, KVTensors)
        if tensors.guard is not None:
            num_guards = max(num_guards, len(tensors.guard.guards))
            for place in tensors.guard.guards:
                assert (
                    int(tensors.range.tensor((1,), torch.uint8, place * pool.page_bytes)) == POISON
                )
    assert (num_guards > 0) == guard_pages
    assert all(sent.has_ended and sent.error is None for sent in world.sent.values())
