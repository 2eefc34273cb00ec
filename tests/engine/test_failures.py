"""Steps that fail: their requests end with an error, others go on, and nothing false is retained.

A step that fails in these tests leaves none of its KV behind. If it was retained all the same, a
request that begins with it gets other tokens than those expected.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.cases import covering
from tests.engine.life import PAGE_BYTES, BehindDriver, Case, Open, World
from tests.memory.late_driver import LateFence
from tests.models.wrapped import WrappedModel, plan_wrapped

from aquifer.cache import KV_CACHES
from aquifer.cache.base import KVView
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import DriverError, InvariantError, RequestError
from aquifer.memory.driver.base import Handle
from aquifer.models import Model, ModelInput, Planner


@pytest.fixture(autouse=True)
def without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors come at chosen waits, and guards would wait too where they are moved."""
    monkeypatch.setenv("AQUIFER_GUARD_PAGES", "false")


EACH_CACHE = pytest.mark.parametrize("kv_cache", KV_CACHES)
AHEAD = pytest.mark.parametrize("num_ahead", [0, 1])
ERRORS = (RuntimeError("torn\nto pieces"), torch.OutOfMemoryError("no room for activations"))


@dataclass
class Fault:
    """A forward pass that leaves no KV behind; a planner whose models have this fault.

    Attributes:
        error: what the pass raises; None if it is found only later that it has failed.
        in_calls: forward passes until then; None for never.
    """

    error: BaseException | None = None
    in_calls: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether that pass has been."""
        return self.in_calls is None

    def is_due(self) -> bool:
        """Whether this forward pass is the one; counts it."""
        if self.in_calls is not None:
            self.in_calls -= 1
            if self.in_calls < 0:
                self.in_calls = None
                return True
        return False

    @property
    def planner(self) -> Planner:
        return plan_wrapped(lambda model: _Model(model, self))


class _Model(WrappedModel):
    """A model that has a fault."""

    def __init__(self, model: Model, fault: Fault) -> None:
        super().__init__(model)
        self._fault = fault

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        is_due = self._fault.is_due()
        if is_due and self._fault.error is not None:
            raise self._fault.error
        hidden = super().forward(batch, kv)
        for index, layer in enumerate(self.kv_layout.layers if is_due else ()):
            nothing = torch.zeros(len(batch.token_ids), layer.num_kv_heads, layer.key_dim)
            kv.write(index, nothing, nothing)
        return hidden


class _Fence(LateFence):
    """A fence that fails, if its device is to."""

    def __init__(self, device: FailingDriver, count: int) -> None:
        super().__init__(device, count)
        self._failing = device

    def wait(self) -> None:
        error = self._failing.error
        if error is not None:
            if not self._failing.is_lost:
                self._failing.error = None
            raise error
        super().wait()


class FailingDriver(BehindDriver):
    """A device that runs behind, and of which a wait may fail: once, or always if it is lost.

    A device that is lost refuses to map pages too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.is_lost = False

    @property
    def is_over(self) -> bool:
        """Whether the wait that fails has been."""
        return self.error is None

    def map(self, address: int, handles: Sequence[Handle]) -> None:
        if self.is_lost:
            raise DriverError("LOST", "the device does not answer")
        super().map(address, handles)

    def fence(self) -> LateFence:  # type: ignore[override]
        super().fence()
        return _Fence(self, len(self.work))


def send_all(world: World, cases: Mapping[str, list[Case]]) -> None:
    """Requests of all kinds, to both models."""
    for index in range(0, len(cases["llama"]), 2):
        for name, model in (("a", "llama"), ("b", "sparse-kv")):
            world.send(name, cases[model][index])


def check_failures(world: World, error: str) -> int:
    """Finish all requests, of which some have failed; then send the same again.

    Returns: how many failed.
    """
    world.finish()
    sent = list(world.sent.values())
    failed = [one for one in sent if one.error is not None]
    assert {one.error for one in failed} <= {f"the step that ran this request failed: {error}"}
    again = [world.send(one.model, one.case) for one in sent]
    world.finish()
    assert all(one.error is None for one in again)
    return len(failed)


@pytest.mark.parametrize(
    ("kv_cache", "num_ahead", "error", "num_steps"),
    covering(KV_CACHES, (0, 1), ERRORS, (0, 1, 2, 5), strength=2),
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_a_launch_fails(
    open_world: Open,
    cases: dict[str, list[Case]],
    caplog: pytest.LogCaptureFixture,
    kv_cache: str,
    num_ahead: int,
    error: Exception,
    num_steps: int,
) -> None:
    """With prompts in chunks, some requests waiting, and another model."""
    fault = Fault(error)
    world = open_world(
        models={"a": "llama", "b": "sparse-kv"},
        planner=fault.planner,
        kv_cache=kv_cache,
        num_ahead=num_ahead,
        is_behind=num_ahead > 0,
        max_num_seqs=5,
        max_num_batched_tokens=40,
    )
    send_all(world, cases)
    for _ in range(num_steps):
        world.step()
    fault.in_calls = 0
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        world.step()
        world.step()
    assert fault.is_over
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    num_failed = check_failures(
        world, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    )
    assert 0 < num_failed < len(world.sent) / 2 - 1  # half of all were sent again


@AHEAD
@EACH_CACHE
def test_each_step_fails_in_turn(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str, num_ahead: int
) -> None:
    """The same prompt, whose KV is retained by each request, as far as it was written."""
    fault = Fault(RuntimeError("torn"))
    world = open_world(
        models={"a": "llama"},
        planner=fault.planner,
        kv_cache=kv_cache,
        num_ahead=num_ahead,
        is_behind=num_ahead > 0,
        max_num_batched_tokens=16,
    )
    case = max(cases["llama"], key=lambda case: len(case.prompt))
    num_failed = 0
    while True:
        fault.in_calls = num_failed
        sent = world.send("a", case)
        world.finish()
        if sent.error is None:
            break
        num_failed += 1
    assert num_failed > len(case.prompt) // 16
    fault.in_calls = None
    assert world.finished(world.send("a", case)).num_cached_tokens > 0


@pytest.mark.parametrize(("kv_cache", "num_steps"), covering(KV_CACHES, range(6), strength=1))
def test_a_wait_fails(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str, num_steps: int
) -> None:
    """The next step is in flight by then; it fails too."""
    device, fault = FailingDriver(), Fault()
    world = open_world(
        models={"a": "llama", "b": "sparse-kv"},
        planner=fault.planner,
        device=device,
        kv_cache=kv_cache,
        num_ahead=1,
        max_num_seqs=5,
        max_num_batched_tokens=40,
        prompt_page_bytes=PAGE_BYTES,  # to replace pages of other sizes is another wait
    )
    send_all(world, cases)
    fault.in_calls = num_steps
    for _ in range(num_steps + 1):
        world.step()
    assert fault.is_over
    device.error = RuntimeError("torn")
    world.step()
    assert device.is_over
    num_failed = check_failures(world, "RuntimeError: torn")
    assert 0 < num_failed < len(world.sent) / 2 - 1


@EACH_CACHE
def test_an_aborted_request_retains_nothing_of_a_step_that_fails(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str
) -> None:
    """It is aborted while that step is in flight, one of those that read its prompt or a later."""
    device, fault = FailingDriver(), Fault()
    world = open_world(
        models={"a": "llama"},
        planner=fault.planner,
        device=device,
        kv_cache=kv_cache,
        num_ahead=1,
        max_num_batched_tokens=40,
    )
    case = max(cases["llama"], key=lambda case: len(case.prompt))
    lane = world.engine.lanes["a"]
    assert lane.prefixes is not None
    for num_steps in range(5):
        world.send("a", case)
        fault.in_calls = num_steps
        for _ in range(num_steps + 1):
            world.step()
        assert fault.is_over
        for request_id in world.open_requests:
            world.abort(request_id)
        device.error = RuntimeError("torn")
        world.finish()
        assert device.is_over
        world.finished(world.send("a", case))
        lane.prefixes.clear()


@EACH_CACHE
def test_a_request_that_stops_retains_nothing_of_a_step_that_fails(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str
) -> None:
    """That step runs its last token, and it is not known yet that this is the last."""
    device, fault = FailingDriver(), Fault()
    world = open_world(
        models={"a": "llama"}, planner=fault.planner, device=device, kv_cache=kv_cache, num_ahead=1
    )
    case = cases["llama"][0]
    prompt, (tokens,) = case.prompt, case.completions
    # The last token ends a block of 4 tokens, and of a page, and is the first of its kind.
    num_new = next(
        n
        for n in range(1, len(tokens) - 1)
        if (len(prompt) + n) % 8 == 0 and tokens[n - 1] not in tokens[: n - 1]
    )
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[tokens[num_new - 1]])
    fault.in_calls = num_new  # after the step of the prompt, and the others before the last token
    sent = world.send("a", Case(prompt, params, [tokens[:num_new]], "stop"))
    while not sent.has_ended:
        world.step()
    assert fault.is_over
    device.error = RuntimeError("torn")
    world.finish()
    assert device.is_over
    longer = [*prompt, *tokens[: num_new + 1]]
    rest = tokens[num_new + 1 :]
    again = Case(longer, SamplingParams(temperature=0, max_tokens=len(rest)), [rest], "length")
    assert world.finished(world.send("a", again)).num_cached_tokens > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InvariantError("a bug")])
@AHEAD
def test_what_is_not_a_failure_of_the_step_is_raised(
    open_world: Open, cases: dict[str, list[Case]], error: BaseException, num_ahead: int
) -> None:
    """The books are right afterwards all the same."""
    fault = Fault(error)
    world = open_world(
        models={"a": "llama", "b": "sparse-kv"},
        planner=fault.planner,
        num_ahead=num_ahead,
        is_behind=num_ahead > 0,
        max_num_seqs=5,
    )
    send_all(world, cases)
    world.step()
    world.step()
    fault.in_calls = 0
    with pytest.raises(type(error)):
        world.step()
    world.check()
    assert world.engine.has_work
    kind, text = type(error).__name__, str(error)
    assert check_failures(world, f"{kind}: {text}" if text else kind) > 0


def test_an_interrupted_request_may_be_aborted(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    fault = Fault(KeyboardInterrupt())
    world = open_world(models={"a": "llama"}, planner=fault.planner)
    world.send("a", cases["llama"][0])
    world.step()
    fault.in_calls = 0
    with pytest.raises(KeyboardInterrupt):
        world.step()
    for request_id in world.open_requests:
        world.abort(request_id)
    assert not world.engine.has_work
    world.step()


def test_an_interrupted_wait_fails_no_request(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    device = FailingDriver()
    world = open_world(models={"a": "llama", "b": "sparse-kv"}, device=device, num_ahead=1)
    send_all(world, cases)
    world.step()
    device.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        world.step()
    assert check_failures(world, "none") == 0


@pytest.mark.parametrize("fails_first", ["launch", "wait"])
def test_the_error_of_a_lost_device_is_raised(
    open_world: Open, cases: dict[str, list[Case]], fails_first: str
) -> None:
    """Every wait for it fails, so each step would."""
    device, fault = FailingDriver(), Fault(RuntimeError("a kernel cannot be launched"))
    world = open_world(models={"a": "llama"}, planner=fault.planner, device=device, num_ahead=1)
    world.send("a", cases["llama"][0])
    world.step()
    device.is_lost, device.error = True, RuntimeError("illegal address")
    if fails_first == "launch":
        fault.in_calls = 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal address"):
            world.step()
    device.is_lost, device.error = False, None


def test_a_lost_device_is_not_taken_for_a_full_one(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    """It refuses memory, and everything else too."""
    device = FailingDriver()
    world = open_world(models={"a": "llama"}, device=device, num_ahead=1)
    sent = world.send("a", cases["llama"][0])
    world.engine.pool.retired.settle()  # so that a page has to be mapped
    device.is_lost, device.error = True, RuntimeError("illegal address")
    with pytest.raises(RuntimeError, match="illegal address"):
        world.step()
    device.is_lost, device.error = False, None
    world.finish()
    assert "out of memory: LOST" in (sent.error or "")


def test_a_request_that_cannot_be_added_leaves_nothing(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    """Whatever is raised: the engine has not seen the request."""
    world = open_world(models={"a": "llama"})
    prompt: Any = ["no", "token"]
    for _ in range(2):
        with pytest.raises(RequestError, match="whole numbers"):
            world.engine.add(Request("r", "a", prompt, SamplingParams(), 0.0))
        assert not world.engine.has_work
        assert sum(world.engine.stats().num_waiting.values()) == 0
    world.finished(world.send("a", cases["llama"][0]))
