"""Engines that come and go, with links to processes that are played by the test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.policies.placement import DeviceReport, ModelReport
from aquifer.engine.reports import EngineStats, ModelInfo
from aquifer.errors import ConfigError, RequestError, UnavailableError
from aquifer.predict.ended import EndedOutput
from aquifer.serve.engines import MOST_LOST, Engines
from aquifer.serve.messages import (
    Abort,
    AbortAll,
    Add,
    Close,
    FromEngine,
    KeepAlive,
    Learn,
    Manage,
    Managed,
    OpenFailed,
    Outputs,
    Pin,
    Ping,
    Pinned,
    Pong,
    Ready,
    Register,
    Registered,
    Remove,
    Step,
    ToEngine,
    Unpin,
    Withdraw,
    first_number,
)
from aquifer.serve.prefixes import PinnedPrefixes
from aquifer.serve.questions import ANSWER_S

STATS = EngineStats({}, {}, {}, 0.0, {}, {})


def spec(name: str) -> ModelSpec:
    return ModelSpec(name, Path(name))


def info(name: str) -> ModelInfo:
    return ModelInfo(name, "", "Fake", "float32", 10**6, 320, 0, 0, 1)


def report(*names: str) -> DeviceReport:
    models = {name: ModelReport(0, is_resident=True) for name in names}
    return DeviceReport(models, 1 << 20, 1 << 20)


class Link:
    """An `EngineLink` whose process is the test: it says when it is ready and when it dies."""

    current_model: str | None = "m"
    exit_code: int | None = -9

    def __init__(self, config: EngineConfig, fails: str | None = None) -> None:
        self.names = [model.name for model in config.models]
        self.refuses: str | None = None
        self.answers_pins = True
        self.answers_managing = True
        self.dies_registering = False
        self.sent: list[ToEngine] = []
        self._fails = fails
        self.is_gone = False
        self.is_started = False
        self.may_start = threading.Event()
        self.may_start.set()

    def start(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[FromEngine | None], None]
    ) -> None:
        self.may_start.wait()
        self._loop, self._handle = loop, handle
        self.is_started = True
        if self._fails is not None:
            self.say(OpenFailed(self._fails, True, self.names[0]), None)

    def ready(self) -> None:
        models = {name: info(name) for name in self.names}
        self.say(Ready(models, STATS, report(*self.names)))

    def say(self, *messages: FromEngine | None) -> None:
        for message in messages:
            self._loop.call_soon_threadsafe(self._handle, message)

    async def begin(self) -> None:
        self.ready()
        await settle()

    def step(
        self,
        *numbers: int,
        others: list[tuple[int, TokenOutput]] | None = None,
        report: DeviceReport | None = None,
        withdrawn: dict[str, list[str]] | None = None,
    ) -> None:
        outputs = Outputs([*numbers], [], [7] * len(numbers), others or [])
        self.say(Step(outputs, STATS, report=report, withdrawn=withdrawn or {}))

    def finish(self, request_id: str, number: int) -> None:
        self.step(others=[(number, TokenOutput(request_id, [8], finish_reason="length"))])

    def send(self, message: ToEngine) -> None:
        if self.is_gone:
            return
        self.sent.append(message)
        match message:
            case Ping():
                self.say(Pong())
            case Register() if self.dies_registering:
                self.kill()
            case Register(model):
                known = model.name == self.refuses
                error = RequestError("cannot be read", param="model")
                self.say(Registered(error if known else info(model.name)))
            case Remove():
                self.say(Managed(None))
            case Manage() if self.answers_managing:
                self.say(Managed(None))
            case Pin(_, token_ids) if self.answers_pins:
                self.say(Pinned(len(token_ids)))
            case Close():
                self.kill()

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def added(self) -> list[str]:
        return [message.request.request_id for message in self.of(Add)]

    def kill(self) -> None:
        assert self.is_started
        if not self.is_gone:
            self.is_gone = True
            self.say(None)

    def join(self) -> None:
        assert self.is_started


class Server:
    """Engines with links of the test; what they deliver is collected."""

    def __init__(self, *models: str, placement: str = "least-loaded") -> None:
        self.engines = Engines(placement, self)
        self.config = EngineConfig(tuple(map(spec, models)))
        self.links: dict[str, list[Link]] = {}
        self.tokens: list[int] = []  # numbers of completions, one for each token
        self.ended: list[int] = []
        self.refused: dict[int, str] = {}
        self.fails: str | None = None
        self.new_may_start = True

    async def add(self, name: str, *, insists: bool = True, ready: bool = True) -> Link:
        """Add an engine."""

        def new_link(config: EngineConfig) -> Link:
            link = Link(config, self.fails)
            if not self.new_may_start:
                link.may_start.clear()
            self.links.setdefault(name, []).append(link)
            return link

        self.engines.add(name, self.config, new_link, insists=insists)
        if ready:
            self.links[name][-1].ready()
            await settle()
        return self.links[name][-1]

    async def again(self, name: str, num_links: int = 2) -> Link:
        """The link to the process that takes the place of one that died."""
        while len(self.links[name]) < num_links or not self.links[name][-1].is_started:
            await asyncio.sleep(0.001)
        await settle()
        return self.links[name][-1]

    def send(self, request_id: str, number: int, model: str = "m", n: int = 1) -> None:
        params = SamplingParams(n=n)
        self.engines.send(Add(Request(request_id, model, [1, 2], params, 0.0), number))

    def deliver(self, outputs: Outputs) -> None:
        self.tokens += outputs.numbers
        self.ended += [number for number, _ in outputs.others]
        self.refused |= {number: str(error) for number, error in outputs.refused.items()}

    def launched(self, model: str, num_tokens: int) -> None:
        """It is not looked at."""

    def changed(self) -> None:
        """It is not looked at."""


async def until(is_so: Callable[[], object]) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_a_request_that_has_output_nothing_is_run_again_elsewhere() -> None:
    async def test() -> None:
        server = Server("m")
        first, second = await server.add("a"), await server.add("b")
        server.send("r0", 0)
        server.send("r1", 1)
        server.send("r2", 2)
        assert (first.added(), second.added()) == (["r0", "r2"], ["r1"])
        first.step(0)
        await settle()
        first.kill()
        await settle()
        assert second.added() == ["r1", "r2"]
        assert list(server.refused) == [0]
        assert "died before the request finished" in server.refused[0]
        second.step(1, 2)
        second.finish("r2", 2)
        await settle()
        assert (server.tokens, server.ended) == ([0, 1, 2], [2])
        assert server.engines.availability.reason is None

    run(test())


@pytest.mark.parametrize("borrowed_s", [None, 0.05])
def test_a_device_that_can_borrow_the_weights_gets_a_request(borrowed_s: float | None) -> None:
    """Instead of waiting for a second elsewhere, where loading from files would take longer."""

    async def test() -> None:
        server = Server("m", placement="affinity")
        first, second = await server.add("a"), await server.add("b")
        busy = ModelReport(9, is_resident=True, oldest_s=time.monotonic() - 1.0)
        first.say(Step(Outputs(), STATS, report=DeviceReport({"m": busy}, 9, 9)))
        absent = ModelReport(9, 9, 30.0, borrowed_s)
        second.say(Step(Outputs(), STATS, report=DeviceReport({"m": absent}, 9, 9)))
        await settle()
        server.send("r", 0)
        assert (first.added(), second.added()) == (
            (["r"], []) if borrowed_s is None else ([], ["r"])
        )

    run(test())


def test_a_request_that_ends_processes_is_not_run_for_ever() -> None:
    async def test() -> None:
        server = Server("m")
        links = {name: await server.add(name) for name in "abcd"}
        server.send("r", 0)
        deaths = 0
        while not server.refused:
            (holder,) = (link for link in links.values() if "r" in link.added())
            holder.sent.clear()
            holder.kill()
            deaths += 1
            await settle()
        assert deaths == 1 + MOST_LOST
        assert not any(link.added() for link in links.values())

    run(test())


def test_without_another_engine_it_ends_with_the_reason() -> None:
    async def test() -> None:
        server = Server("m")
        link = await server.add("a")
        server.send("r", 5)
        link.kill()
        await settle()
        assert "died" in server.refused[5]
        again = await server.again("a")
        again.ready()
        await settle()
        server.send("s", 6)
        assert again.added() == ["s"]
        assert server.engines.num_restarts == 1

    run(test())


def test_completions_and_aborts_count_as_changes() -> None:
    """What was aborted is not run again, and neither is a request of which one completion has
    output something. Of one of which a completion was aborted, the others are."""

    async def test() -> None:
        server = Server("m")
        first = await server.add("a")
        server.send("whole", 0, n=2)
        server.send("begun", 10, n=2)
        server.send("less", 20, n=2)
        server.send("gone", 30)
        server.send("left", first_number(1))
        second = await server.add("b")
        first.step(11)
        await settle()
        server.engines.send(Abort("less", 1))
        server.engines.send(Abort("gone"))
        server.engines.send(AbortAll(1))
        first.kill()
        await settle()
        assert second.added() == ["whole", "less"]
        assert second.of(Abort) == [Abort("less", 1)]
        assert list(server.refused) == [10]
        second.finish("less", 20)
        await settle()
        server.engines.send(Abort("whole", 0))
        server.engines.send(Abort("whole", 1))
        await (await server.again("a")).begin()
        second.kill()
        await settle()
        assert list(server.refused) == [10]
        assert server.ended == [20]

    run(test())


def test_a_device_that_leaves_gives_its_waiting_requests_away() -> None:
    async def test() -> None:
        server = Server("m")
        first = await server.add("a")
        server.send("r0", 0)
        server.send("r1", 1)
        first.step(0)
        await settle()
        second = await server.add("b")
        draining = asyncio.create_task(server.engines.drain("a", 60))
        await settle()
        assert first.of(Withdraw) == [Withdraw("m", 2)]
        assert second.added() == []  # it may run there
        first.step(0, withdrawn={"m": ["r1"]})
        await settle()
        assert second.added() == ["r1"]
        second.step(1)
        server.send("r2", 2)
        await settle()
        assert server.tokens == [0, 0, 1]
        assert second.added() == ["r1", "r2"]
        assert not draining.done()
        first.finish("r0", 0)
        await draining
        await server.engines.remove("a")
        assert server.engines.names == ["b"]
        assert first.of(Close)
        assert not server.refused

    run(test())


def test_requests_that_wait_go_to_a_device_that_is_idle() -> None:
    """Once the one where they wait has given them up; those that were aborted go nowhere."""

    async def test() -> None:
        server = Server("m")
        first = await server.add("a")
        for number in range(5):
            server.send(f"r{number}", number)
        server.send("s", 10, n=2)
        second, third = await server.add("b"), await server.add("c")
        server.send("t", 20)
        assert second.added() == ["t"]
        third.step(report=report())  # it does not have the model
        await asyncio.sleep(0.25)
        assert not first.of(Withdraw)  # none waits for long
        waiting = {"m": ModelReport(0, is_resident=True, oldest_s=time.monotonic() - 1.0)}
        first.step(0, report=DeviceReport(waiting, 1 << 20, 1 << 20))
        await asyncio.sleep(0.25)
        assert not first.of(Withdraw)  # no other is idle
        second.finish("t", 20)
        await until(lambda: first.of(Withdraw))
        assert first.of(Withdraw) == [Withdraw("m", 3)]
        await asyncio.sleep(0.25)
        assert len(first.of(Withdraw)) == 1  # it has not answered
        server.engines.send(Abort("r1"))
        server.engines.send(Abort("s", 1))
        first.step(withdrawn={"m": ["r1", "r2", "s"]})
        await settle()
        assert second.added() == ["t", "r2", "s"]
        assert second.of(Abort) == [Abort("s", 1)]
        assert not third.added()
        second.finish("r2", 2)
        second.finish("s", 10)
        await until(lambda: len(first.of(Withdraw)) == 2)  # it is idle again
        assert first.of(Withdraw)[1] == Withdraw("m", 2)
        first.kill()
        await settle()
        assert second.added() + third.added() == ["t", "r2", "s", "r3", "r4"]
        assert list(server.refused) == [0]
        for number in (3, 4):
            server.engines.send(Abort(f"r{number}"))
        await asyncio.sleep(0.25)
        server.engines.refuse()

    run(test())


def test_how_long_weights_are_kept_is_said_to_all_devices() -> None:
    async def test() -> None:
        server = Server("m")
        links = [await server.add(name) for name in "abc"]
        params = SamplingParams()
        server.engines.send(Add(Request("r", "m", [1], params, 0.0, keep_alive_s=7.0), 0))
        server.send("s", 1)
        assert [link.of(KeepAlive) for link in links] == [[KeepAlive("m", 7.0)]] * 3

    run(test())


def test_a_device_that_is_removed_is_heard_no_more() -> None:
    async def test() -> None:
        server = Server("m")
        first = await server.add("a")
        server.send("r0", 0)
        server.send("r1", 1)
        first.step(0)
        await settle()
        second = await server.add("b")
        removing = asyncio.create_task(server.engines.remove("a"))
        await asyncio.sleep(0)
        first.step(0, 1)
        await removing
        assert server.tokens == [0]
        assert server.refused == {0: "the device left before the request finished"}
        assert second.added() == ["r1"]
        await server.engines.remove("a")  # a second time
        await server.engines.remove("b")
        assert "died" not in server.refused[1]
        server.send("r2", 2)
        assert server.refused[2] == "no worker serves at the moment"
        with pytest.raises(UnavailableError, match="no worker"):
            await server.engines.memory()
        assert server.engines.stats == STATS  # the counters do not go

    run(test())


def test_a_model_is_registered_while_an_engine_starts() -> None:
    async def test() -> None:
        server = Server("m")
        first = await server.add("a")
        late = await server.add("b", ready=False)
        assert (await server.engines.register(spec("new"))).name == "new"
        await server.engines.remove_model("m")
        assert [message.spec.name for message in first.of(Register)] == ["new"]
        assert not late.sent
        late.ready()  # with the models of when it was started
        await settle()
        assert [message.spec.name for message in late.of(Register)] == ["new"]
        assert [message.model for message in late.of(Remove)] == ["m"]
        await server.engines.remove("a")
        server.send("r", 0, "new")
        assert late.added() == ["r"]

    run(test())


def test_a_model_that_one_device_refuses_is_registered_on_none() -> None:
    async def test() -> None:
        server = Server("m")
        first, second = await server.add("a"), await server.add("b")
        second.refuses = "new"
        with pytest.raises(RequestError, match="cannot be read"):
            await server.engines.register(spec("new"))
        assert [message.model for message in first.of(Remove)] == ["new"]
        first.kill()
        again = await server.again("a")
        assert again.names == ["m"]

    run(test())


def test_a_process_that_dies_while_a_model_is_registered() -> None:
    """The model is not registered, and the error says why."""

    async def test() -> None:
        server = Server("m")
        first = await server.add("")
        first.dies_registering = True
        with pytest.raises(UnavailableError, match="process died and is being started again"):
            await server.engines.register(spec("new"))
        again = await server.again("")
        again.ready()
        await settle()
        assert not again.of(Register)
        # It may have been started just before the model was taken back.
        assert again.names == ["m", *(message.model for message in again.of(Remove))]
        assert server.engines.serving == [""]

    run(test())


def test_a_process_that_is_being_started_when_the_server_stops() -> None:
    """It is killed once it can be: a process that is not started yet cannot be."""

    async def test() -> None:
        server = Server("m")
        first = await server.add("")
        server.new_may_start = False
        first.kill()
        await until(lambda: len(server.links[""]) == 2)
        second = server.links[""][1]
        await settle()
        server.engines.refuse()
        stopping = asyncio.create_task(server.engines.stop())
        await settle()
        try:
            assert not stopping.done()
        finally:
            second.may_start.set()
        await stopping
        assert second.is_gone

    run(test())


def test_what_was_pinned_on_a_device_that_left_is_pinned_on_the_next() -> None:
    async def test() -> None:
        server = Server("m")
        await server.add("a")
        assert await server.engines.pin("m", [1, 2, 3], None, "") == 3
        await server.engines.remove("a")
        second = await server.add("b")
        assert [message.token_ids for message in second.of(Pin)] == [[1, 2, 3]]
        second.kill()
        again = await server.again("b")
        again.ready()
        await settle()
        assert len(again.of(Pin)) == 1

    run(test())


def test_a_model_that_is_unpinned_stays_so_on_devices_that_do_not_serve() -> None:
    """One starts again meanwhile, and one has left, of which the next takes the place."""

    async def test() -> None:
        server = Server("m")
        first = await server.add("a")
        await server.engines.manage("pin", "m")
        first.kill()
        again = await server.again("a")
        await server.add("b")
        await server.engines.manage("unpin", "m")
        again.ready()
        await settle()
        assert not again.of(Manage)
        await server.engines.manage("pin", "m")
        for name in ("a", "b"):
            await server.engines.remove(name)
        await server.add("c")
        await server.engines.manage("unpin", "m")
        await server.engines.remove("c")
        last = await server.add("d")
        assert not last.of(Manage)

    run(test())


def test_a_process_that_dies_while_it_is_told_what_to_pin() -> None:
    """What was to be asked after that is not asked, so that answers stay with their questions."""

    async def test() -> None:
        server = Server("m", "n")
        first = await server.add("a")
        for model in ("m", "n"):
            await server.engines.manage("pin", model)
        first.kill()
        again = await server.again("a")
        again.answers_managing = False
        again.ready()
        await settle()
        assert [message.model for message in again.of(Manage)] == ["m"]
        again.kill()
        third = await server.again("a", 3)
        third.ready()
        await settle()
        assert [message.model for message in third.of(Manage)] == ["m", "n"]
        await server.engines.manage("load", "m")

    run(test())


def test_a_model_is_removed_while_it_is_pinned_again() -> None:
    async def test() -> None:
        server = Server("m", "n")
        first = await server.add("a")
        for model in ("m", "n"):
            await server.engines.manage("pin", model)
        first.kill()
        again = await server.again("a")
        again.answers_managing = False
        again.ready()
        await settle()
        removing = asyncio.create_task(server.engines.remove_model("n"))
        await settle()
        again.answers_managing = True
        again.say(Managed(None))
        await settle()
        await removing
        assert server.engines.availability.reason is None
        assert [message.model for message in again.of(Manage)] == ["m"]

    run(test())


def test_a_pin_that_is_answered_too_late_is_undone() -> None:
    """The engine does it all the same, and the client was told that it failed."""

    async def test() -> None:
        server = Server("m")
        link = await server.add("a")
        link.answers_pins = False
        pinning = asyncio.create_task(server.engines.pin("m", [1, 2], "salt", "client"))
        await settle()
        loop = asyncio.get_running_loop()
        loop.time = lambda: time.monotonic() + ANSWER_S + 1  # type: ignore[method-assign]
        with pytest.raises(UnavailableError):
            await pinning
        questions = [each for each in link.sent if isinstance(each, Pin | Unpin)]
        assert questions == [
            Pin("m", [1, 2], "salt", "client"),
            Unpin("m", [1, 2], "salt"),
        ]
        link.say(Pong(), Pinned(2), Pinned(0))
        link.answers_pins = True
        await settle()
        assert await server.engines.pin("m", [1, 2, 3], None, "client") == 3

    run(test())


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_pin_for_which_the_caller_is_cancelled_is_undone(*, is_answered: bool) -> None:
    """Before the answer, or when it has just come."""

    async def test() -> None:
        server = Server("m")
        link = await server.add("a")
        link.answers_pins = False
        prefixes = PinnedPrefixes(server.engines)
        pinning = asyncio.create_task(prefixes.pin(None, "client", "m", [1, 2], "salt"))
        await settle()
        answers = Pinned(2), Pinned(0)
        if is_answered:
            link.say(answers[0])
            asyncio.get_running_loop().call_soon(pinning.cancel)
        else:
            pinning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pinning
        assert link.of(Unpin) == [Unpin("m", [1, 2], "salt")]
        assert prefixes.of(None) == []
        link.say(*answers[is_answered:])
        link.answers_pins = True
        await settle()
        assert (await prefixes.pin(None, "client", "m", [1, 2, 3], None)).num_tokens == 3

    run(test())


def test_a_prefix_of_a_model_that_is_removed_while_it_is_pinned_is_forgotten() -> None:
    """A process that is started later is not told to pin it for another model of that name."""

    async def test() -> None:
        server = Server("m", "n")
        link = await server.add("a")
        link.answers_pins = False
        pinning = asyncio.create_task(server.engines.pin("n", [1, 2], None, "client"))
        await settle()
        removing = asyncio.create_task(server.engines.remove_model("n"))
        link.say(Pinned(2))  # when it has begun to remove it
        await pinning
        await removing
        await server.engines.register(spec("n"))
        link.kill()
        again = await server.again("a")
        again.ready()
        await settle()
        assert server.engines.availability.reason is None
        assert again.of(Pin) == []

    run(test())


def test_an_engine_that_insists_starts_without_what_it_cannot_load() -> None:
    async def test() -> None:
        server = Server("bad", "m")
        server.fails = "no such file"
        await server.add("a", ready=False)
        server.fails = None
        with pytest.raises(ConfigError, match="no such file"):
            await server.engines.ready(lambda _: None)
        again = await server.again("a")
        assert again.names == ["m"]
        again.ready()
        await settle()
        assert "could not be loaded" in server.engines.availability.out_of_service["bad"]

    run(test())


def test_one_that_does_not_insist_reports_it() -> None:
    async def test() -> None:
        server = Server("bad")
        server.fails = "no such file"
        await server.add("a", insists=False, ready=False)
        with pytest.raises(ConfigError, match="no such file"):
            await server.engines.ready(lambda _: None)
        await settle()
        assert len(server.links["a"]) == 1

    run(test())


def test_all_learn_from_what_ends_on_any_device() -> None:
    """In one order, a process that is started later too, and one that leaves no more."""

    async def test() -> None:
        server = Server("m", "n")
        first, second = await server.add("a"), await server.add("b")
        late = await server.add("c", ready=False)
        outputs = [EndedOutput(10, number) for number in range(1, 1500)]
        for link, ended in ((first, outputs[:2]), (second, outputs[2:3]), (first, outputs[3:])):
            link.say(Step(Outputs(), STATS, ended={"m": ended}))
            await settle()
        second.say(Step(Outputs(), STATS, ended={"n": outputs[:1]}))
        await settle()

        def learnt(link: Link, model: str = "m") -> list[EndedOutput]:
            return [
                each for learn in link.of(Learn) if learn.model == model for each in learn.ended
            ]

        assert learnt(first) == learnt(second) == outputs
        assert learnt(first, "n") == learnt(second, "n") == outputs[:1]
        assert not learnt(late)
        late.ready()
        second.kill()
        await settle()
        again = await server.again("b")
        again.ready()
        await settle()
        assert learnt(late) == learnt(again) == outputs[-1000:]
        assert learnt(late, "n") == learnt(again, "n") == outputs[:1]
        await server.engines.remove_model("n")
        await server.engines.remove("c")
        first.say(Step(Outputs(), STATS, ended={"m": outputs[:1]}))
        await settle()
        assert len(learnt(first)) == len(outputs) + 1
        assert (len(learnt(again)), len(learnt(late))) == (1001, 1000)
        assert not learnt(await server.add("d"), "n")

    run(test())
