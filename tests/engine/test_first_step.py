"""The step that a model runs before it is resident: it shows what fails, and leaves nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.conftest import PLENTY_BYTES
from tests.engine.life import PAGE_BYTES, BehindDriver, Case, LoopDriver
from tests.models.tiny import TINY_MODELS, plan_tiny

from aquifer.cache.base import KVView
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request
from aquifer.errors import ConfigError, DriverError, InvariantError
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.owners import GUARD
from aquifer.memory.pool import Kind
from aquifer.models import Model, ModelInput, ModelPlan
from aquifer.weights.checkpoint import Checkpoint

Happen = Callable[[str], None]
"""Called with what a model is asked for: "build", "forward" or "logits"."""

DRIVERS = pytest.mark.parametrize("is_behind", [False, True])
KV_CACHES = pytest.mark.parametrize("kv_cache", ["virtual", "paged"])


class WatchedModel:
    """A model of which each call is reported before it is made."""

    def __init__(self, model: Model, happen: Happen) -> None:
        self._model = model
        self._happen = happen
        self.kv_layout = model.kv_layout
        self.vocab_size = model.vocab_size
        self.is_capturable = model.is_capturable

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        hidden = self._model.forward(batch, kv)
        self._happen("forward")
        return hidden

    def rehearsal(self) -> WatchedModel:
        return self

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._happen("logits")
        return self._model.logits(hidden)


class WatchedPlan:
    """The plan of a tiny model, of which what is built is watched."""

    def __init__(self, plan: ModelPlan, happen: Happen) -> None:
        self._plan = plan
        self._happen = happen
        self.parameters = plan.parameters
        self.num_parameters = plan.num_parameters
        self.vocab_size = plan.vocab_size
        self.kv_limits = plan.kv_limits
        self.has_reusable_kv = plan.has_reusable_kv
        self.max_model_len = plan.max_model_len
        self.kv_layout = plan.kv_layout
        self.state_layout = plan.state_layout

    def build(self, tensors: Mapping[str, torch.Tensor]) -> Model:
        self._happen("build")
        return WatchedModel(self._plan.build(tensors), self._happen)


@contextmanager
def opened(
    happen: Happen, *specs: ModelSpec, is_behind: bool = False, **options: Any
) -> Iterator[Engine]:
    """An engine of watched models; afterwards the driver must have everything back."""

    def planner(checkpoint: Checkpoint, dtype: torch.dtype | None) -> ModelPlan:
        return WatchedPlan(plan_tiny(checkpoint, dtype), happen)

    driver = LoopDriver(BehindDriver() if is_behind else HostDriver())
    values = {"memory_bytes": PLENTY_BYTES, "max_num_seqs": 4, "seed": 0, **options}
    config = EngineConfig(specs, device="cpu", page_bytes=PAGE_BYTES, **values)
    try:
        engine = Engine.open(config, driver=driver, planner=planner)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        assert driver.is_unused
        driver.close()


def finish(engine: Engine) -> list[TokenOutput]:
    """The outputs of all steps until none is left."""
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def raise_at(call: str, error: Exception) -> Happen:
    def happen(found: str) -> None:
        if found == call:
            raise error

    return happen


@DRIVERS
@KV_CACHES
@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_step_is_run_and_its_pages_come_back(
    folder: Path, name: str, kv_cache: str, is_behind: bool
) -> None:
    calls: list[str] = []
    spec = ModelSpec("a", folder / name)
    with opened(calls.append, spec, is_behind=is_behind, kv_cache=kv_cache) as engine:
        assert calls[0] == "build"
        assert calls[-2:] == ["forward", "logits"]
        if not is_behind:
            assert calls[1:] == ["forward", "logits"]
        engine.pool.check()
        in_use = engine.pool.usage().in_use_bytes
        assert {owner.kind for owner in in_use.keys() - {GUARD}} == {Kind.WEIGHTS}
        lane = engine.lanes["a"]
        assert lane.slots.num_taken == 0
        assert lane.cache.stats(0).mapped_bytes == 0
        # Weights that come back run in the model that was built and checked.
        num_calls = len(calls)
        engine.unload_model("a")
        engine.load_model("a")
        assert len(calls) == num_calls


@DRIVERS
@pytest.mark.parametrize("call", ["build", "forward", "logits"])
def test_a_model_that_raises_is_refused_by_name(folder: Path, call: str, is_behind: bool) -> None:
    error = ZeroDivisionError("division\nby zero")
    happen = raise_at(call, error)
    spec = ModelSpec("tiny", folder / "llama")
    with (
        pytest.raises(ConfigError) as caught,
        opened(happen, spec, is_behind=is_behind),
    ):
        pass
    cause = "ZeroDivisionError: division by zero"
    assert str(caught.value) == f"tiny cannot run; check {spec.path / 'config.json'}: {cause}"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [InvariantError("a bug"), DriverError("NAME", "no"), ConfigError("a field")]
)
def test_own_exceptions_pass_unchanged(folder: Path, error: Exception) -> None:
    with (
        pytest.raises(type(error)) as caught,
        opened(raise_at("forward", error), ModelSpec("tiny", folder / "llama")),
    ):
        pass
    assert caught.value is error


def test_others_are_served_when_a_model_fails(folder: Path, cases: dict[str, list[Case]]) -> None:
    """It is added, or wanted by a request; and it may be loaded again once the cause is gone."""
    failing: set[str] = set()

    def happen(call: str) -> None:
        if call in failing:
            raise RuntimeError("shapes do not match")

    with opened(happen, ModelSpec("a", folder / "llama")) as engine:
        failing.add("build")
        with pytest.raises(ConfigError, match=r"^b cannot run; .*RuntimeError: shapes"):
            engine.add_model(ModelSpec("b", folder / "sparse-kv"))
        assert list(engine.models) == ["a"]
        engine.add_model(ModelSpec("b", folder / "sparse-kv"), load=False)
        for model, name in (("a", "llama"), ("b", "sparse-kv")):
            case = cases[name][0]
            engine.add(Request(model, model, case.prompt, case.params, 0.0))
        ended = {out.request_id: out for out in finish(engine) if out.finish_reason is not None}
        assert ended["a"].error is None
        assert "b cannot run" in (ended["b"].error or "")
        failing.clear()
        engine.load_model("b")
        case = cases["sparse-kv"][0]
        engine.add(Request("again", "b", case.prompt, case.params, 0.0))
        tokens = [token for out in finish(engine) if out.index == 0 for token in out.token_ids]
        assert tokens == case.completions[0]


def test_without_room_for_kv_a_model_is_loaded_all_the_same(
    folder: Path, sizes: dict[str, tuple[int, int]], cases: dict[str, list[Case]]
) -> None:
    """Running requests have all pages that weights leave; they give them back in the end."""
    calls: list[str] = []
    large = cases["llama"][3]
    num_pages = -(-(len(large.prompt) + 14) * sizes["llama"][1] // PAGE_BYTES)
    memory_bytes = sizes["llama"][0] + sizes["sparse-kv"][0] + num_pages * PAGE_BYTES
    with opened(
        calls.append,
        ModelSpec("a", folder / "llama"),
        memory_bytes=memory_bytes,
        enable_prefix_caching=False,
        preemption_mode="recompute",
        max_num_batched_tokens=256,
    ) as engine:
        engine.add(Request("a", "a", large.prompt, large.params, 0.0))
        engine.step()
        for _ in range(100):
            free_pages = engine.pool.usage().free_bytes // PAGE_BYTES
            if free_pages == sizes["sparse-kv"][0] // PAGE_BYTES or not engine.has_work:
                break
            engine.step()
        assert engine.has_work
        calls.clear()
        engine.add_model(ModelSpec("b", folder / "sparse-kv"))
        assert calls == ["build"]
        case = cases["sparse-kv"][0]
        engine.add(Request("b", "b", case.prompt, case.params, 0.0))
        ended = [out for out in finish(engine) if out.finish_reason is not None]
        assert {out.request_id for out in ended} == {"a", "b"}
        assert all(out.error is None for out in ended)


# --- logits that are not finite ------------------------------------------------------------------


def damaged(folder: Path, target: Path, value: float) -> ModelSpec:
    """A checkpoint with a norm of that value."""
    spec = ModelSpec("tiny", TINY_MODELS["llama"].save(target / "llama"))
    file = spec.path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(value)
    save_file(tensors, file)
    return spec


def ignore(_: str) -> None:
    pass


@DRIVERS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float, is_behind: bool
) -> None:
    with opened(ignore, damaged(folder, tmp_path, value), is_behind=is_behind) as engine:
        assert "the first logits of tiny are not finite" in caplog.text
        assert engine.lanes["tiny"].is_resident


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_whole_and_random_weights_pass(
    folder: Path, name: str, load_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "aquifer"),
        opened(ignore, ModelSpec("tiny", folder / name), load_format=load_format),
    ):
        assert "finite" not in caplog.text
