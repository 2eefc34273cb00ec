"""A server with several devices: two CPU engines, each with a pool of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.checkpoints import tiny_llama
from tests.serve.alone import answers_of_one_engine
from tests.serve.running import RunningServer, drain, eventually, is_running, running

from aquifer.config import EngineConfig, ModelSpec
from aquifer.errors import ConfigError
from aquifer.memory.proc import available_host_bytes
from aquifer.serve.config import ServerConfig
from aquifer.serve.engine_configs import engine_configs, lend_weights

COMPLETIONS, PREFIXES = "/v1/completions", "/v1/prefixes"
OPTIONS = ["--port", "0", "--page-size", "4K", "--max-model-len", "512"]
DEVICES = ["--devices", "cpu,cpu"]
NAMES = ["cpu:0", "cpu:1"]
LONG = "A prefix that several prompts have in common, of more than a few blocks. " * 3


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    others = [f"m{seed}={tiny_llama(folder / str(seed), seed=seed)}" for seed in (1, 2)]
    return [f"m0={checkpoint}", *others]


@pytest.fixture(scope="module")
def weight_bytes(server: RunningServer) -> int:
    """Of a model."""
    _, memory, _ = server.call("GET", "/memory")
    return int(memory["models"]["tiny"]["weights_total_bytes"])


@pytest.fixture(scope="module")
def narrow(models: list[str], weight_bytes: int) -> Iterator[RunningServer]:
    """Three models on two devices, each with memory for one model and a half."""
    options = [*OPTIONS, *DEVICES, "--api-server-count", "2"]
    memory = ["--memory", str(int(1.5 * weight_bytes))]
    with running(["-m", "aquifer", "serve", *models, *options, *memory]) as server:
        yield server
    assert server.process.returncode == 0
    assert server.problems == ""


def _wide(models: list[str], *more: str) -> Iterator[RunningServer]:
    """Two models on two devices, with memory for all."""
    options = [*OPTIONS, *DEVICES, "--memory", "64M", *more]
    with running(["-m", "aquifer", "serve", *models[:2], *options]) as server:
        yield server
    assert server.process.returncode == 0


@pytest.fixture(scope="module")
def wide(models: list[str]) -> Iterator[RunningServer]:
    """A server for tests that leave models and processes as they are."""
    yield from _wide(models)


@pytest.fixture(scope="module")
def changing(models: list[str]) -> Iterator[RunningServer]:
    """A server for tests that load and unload models, whatever is loaded before."""
    yield from _wide(models, "--placement", "round-robin")


@pytest.fixture
def own_wide(models: list[str]) -> Iterator[RunningServer]:
    """A server for one test, which may end processes."""
    yield from _wide(models)


def _loads(server: RunningServer) -> dict[str, dict[str, int]]:
    """How often each model was loaded, by device."""
    _, states, _ = server.call("GET", "/models")
    return {
        model["name"]: {device: of["loads"] for device, of in model["devices"].items()}
        for model in states["models"]
    }


def _answer(server: RunningServer, model: str, prompt: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": prompt, "max_tokens": 5, "temperature": 0, **fields}
    status, answer, _ = server.call("POST", COMPLETIONS, body)
    assert status == 200, answer
    return answer


def _text(server: RunningServer, model: str, prompt: str) -> str:
    text: str = _answer(server, model, prompt)["choices"][0]["text"]
    return text


def _cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def _running(server: RunningServer) -> list[int]:
    """Requests that run, by device."""
    _, memory, _ = server.call("GET", "/memory")
    return [memory["devices"][name]["requests_running"] for name in NAMES]


def test_requests_go_where_their_model_is(narrow: RunningServer):
    """Each device has loaded another model, and requests for these two load nothing."""
    loads = _loads(narrow)
    assert loads == {
        "m0": {"cpu:0": 1, "cpu:1": 0},
        "m1": {"cpu:0": 0, "cpu:1": 1},
        "m2": {"cpu:0": 0, "cpu:1": 0},
    }
    for number in range(4):
        _answer(narrow, f"m{number % 2}", f"prompt {number}")
    assert _loads(narrow) == loads
    _answer(narrow, "m2", "x")
    assert sum(_loads(narrow)["m2"].values()) == 1


def test_answers_are_those_of_one_device_with_room_for_all(
    narrow: RunningServer, models: list[str]
):
    asked = [(f"m{number % 3}", f"prompt {number}") for number in range(24)]
    expected = answers_of_one_engine(models, asked, max_tokens=5)
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda each: _text(narrow, *each), asked))
    assert found == expected
    assert _running(narrow) == [0, 0]


def test_reports_are_of_each_device_and_of_all(narrow: RunningServer):
    _answer(narrow, "m0", "x")
    _, memory, _ = narrow.call("GET", "/memory")
    assert memory["device"] == "cpu:0, cpu:1"
    assert list(memory["devices"]) == NAMES
    weight_bytes = memory["models"]["m0"]["weights_total_bytes"]
    for name, of_device in memory["devices"].items():
        assert (of_device["device"], of_device["page_bytes"]) == (name, 4096)
        assert weight_bytes < of_device["budget_bytes"] < 2 * weight_bytes
        parts = [of_device["overhead_bytes"], of_device["free_bytes"]]
        parts += [
            model[f"{kind}_bytes"]
            for model in of_device["models"].values()
            for kind in ("weights", "kv", "state", "prefix")
        ]
        assert sum(parts) == of_device["budget_bytes"]
    budgets = [of_device["budget_bytes"] for of_device in memory["devices"].values()]
    assert memory["budget_bytes"] == sum(budgets)
    _, metrics, _ = narrow.call("GET", "/metrics")
    for name, budget_bytes in zip(NAMES, budgets, strict=True):
        values = [
            float(line.rpartition(" ")[2])
            for line in metrics.splitlines()
            if line.startswith(f'aquifer:pool_bytes{{device="{name}"')
        ]
        assert sum(values) == budget_bytes
    _, states, _ = narrow.call("GET", "/models")
    m0 = states["models"][0]
    assert (m0["status"], m0["weights_resident_bytes"]) == ("resident", weight_bytes)
    resident = [of["weights_resident_bytes"] for of in m0["devices"].values()]
    assert max(resident) == weight_bytes


def test_ps_lists_them_by_device(narrow: RunningServer):
    command = [sys.executable, "-m", "aquifer", "ps", "--url", narrow.url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    listed = {(row[0], row[1]) for row in rows if row and row[0].startswith("m")}
    assert listed == {(f"m{number}", device) for number in range(3) for device in NAMES}
    captions = [row for row in rows if row and row[0] in ("cpu:0:", "cpu:1:")]
    assert len(captions) == 2


def test_models_are_managed_on_all_of_them(changing: RunningServer):
    def call(verb: str, model: str) -> Any:
        status, answer, _ = changing.call("POST", f"/models/{model}/{verb}")
        assert status == 200, answer
        return answer

    assert call("pin", "m0")["pinned"]
    assert call("pin", "m0")["pinned"]  # where it is pinned already
    _, states, _ = changing.call("GET", "/models")
    (m0,) = (model for model in states["models"] if model["name"] == "m0")
    assert sorted(of["pinned"] for of in m0["devices"].values()) == [False, True]
    status, error, _ = changing.call("POST", "/models/m0/unload")
    assert status == 400
    assert "pinned" in error["error"]["message"]
    assert not call("unpin", "m0")["pinned"]
    assert call("unload", "m0")["weights_resident_bytes"] == 0
    assert call("load", "m0")["status"] == "resident"


def test_a_model_is_registered_on_all_of_them(narrow: RunningServer, checkpoint: Path):
    status, answer, _ = narrow.call("POST", "/models", {"model": f"new={checkpoint}"})
    assert status == 200, answer
    assert set(answer["devices"]) == set(NAMES)
    assert _answer(narrow, "new", "x")["model"] == "new"
    assert narrow.call("DELETE", "/models/new")[0] == 200
    body = {"model": "new", "prompt": "x"}
    assert narrow.call("POST", COMPLETIONS, body)[0] == 404
    assert narrow.call("POST", "/models", {"model": "bad=/nowhere"})[0] == 400


def test_a_model_runs_on_both(wide: RunningServer):
    """Streams of one model are placed where fewer requests are, once both devices have it."""
    for model in ("m0", "m1"):
        assert set(_loads(wide)[model].values()) == {1}
    streams = [
        wide.stream(f"prompt {number}", model="m0", max_tokens=400, extra_body={"ignore_eos": True})
        for number in range(4)
    ]
    assert _running(wide) == [2, 2]
    assert [drain(stream) for stream in streams] == ["length"] * 4


def test_prompts_that_begin_alike_find_their_prefix(wide: RunningServer):
    first = _answer(wide, "m0", LONG + "1")
    assert _cached(first) == 0
    for number in range(2, 8):
        assert _cached(_answer(wide, "m0", f"{LONG}{number}")) > 0
    status, prefix, _ = wide.call("POST", PREFIXES, {"model": "m1", "prompt": "Pinned. " + LONG})
    assert (status, prefix["num_tokens"] > 0) == (200, True)
    for number in range(3):
        assert _cached(_answer(wide, "m1", f"Pinned. {LONG}{number}")) > 0
    assert wide.call("DELETE", f"{PREFIXES}/{prefix['id']}")[0] == 200


def test_a_device_whose_process_is_killed(own_wide: RunningServer):
    """Its requests end with an error, the other's go on; it is back with what it had pinned."""
    own_wide.call("POST", PREFIXES, {"model": "m0", "prompt": "Pinned. " + LONG})
    fields: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
    streams = [own_wide.stream(f"prompt {number}", model="m0", **fields) for number in range(4)]
    assert _running(own_wide) == [2, 2]
    victim = own_wide.spawned()[1]
    os.kill(victim, signal.SIGKILL)
    ends = []
    for stream in streams:
        try:
            ends.append(drain(stream))
        except openai.APIError as error:
            ends.append(str(error))
    assert ends.count("length") == 2
    assert sum("the engine process died before the request finished" in str(end) for end in ends)
    assert own_wide.call("GET", "/health")[0] == 200
    for number in range(4):
        _answer(own_wide, f"m{number % 2}", f"after {number}")
    eventually(lambda: len(_devices(own_wide)) == 2, "the device is back")
    assert not is_running(victim)
    assert "the engine process of cpu:1 died (exit code -9)" in own_wide.stderr
    _, metrics, _ = own_wide.call("GET", "/metrics")
    assert "aquifer:engine_restarts_total 1.0" in metrics
    assert _cached(_answer(own_wide, "m0", f"Pinned. {LONG}")) > 0
    assert _running(own_wide) == [0, 0]


def _devices(server: RunningServer) -> list[str]:
    _, memory, _ = server.call("GET", "/memory")
    return list(memory["devices"])


@pytest.mark.parametrize("placement", ["round-robin", "least-loaded", "random"])
def test_other_placements(checkpoint: Path, placement: str):
    command = ["-m", "tests.serve.fake_server", str(checkpoint), "0", *DEVICES]
    with running([*command, "--placement", placement]) as server:
        prompts = [f"prompt {number}" for number in range(8)]
        streams = [server.stream(prompt) for prompt in prompts]
        num_running = _running(server)
        assert sum(num_running) == 8
        if placement != "random":
            assert num_running == [4, 4]
        for stream in streams:
            stream.close()
        eventually(lambda: _running(server) == [0, 0], "all are aborted")


def test_weights_of_another_device(changing: RunningServer):
    """The first device loads them from disk, the second one from the first."""
    assert changing.call("POST", "/models/m1/unload")[0] == 200  # equal pages would come from it
    loaded, num_bytes = _load_on_both(changing)
    assert loaded == {"disk": num_bytes, "neighbour": num_bytes}


def test_each_device_loads_its_own_weights(checkpoint: Path):
    options = [*OPTIONS, *DEVICES, "--memory", "64M", "--placement", "round-robin"]
    command = ["-m", "aquifer", "serve", f"m0={checkpoint}", *options, "--no-peer-weights"]
    with running(command) as server:
        loaded, num_bytes = _load_on_both(server)
        assert loaded == {"disk": 2 * num_bytes, "neighbour": 0}


def _load_on_both(server: RunningServer) -> tuple[dict[str, int], int]:
    """Load a model on both devices; bytes that were loaded by source, and bytes of its weights."""
    assert server.call("POST", "/models/m0/unload")[0] == 200
    before = _loaded(server)
    first, second = (_answer(server, "m0", "x")["choices"] for _ in range(2))
    assert first == second
    loaded = {source: num_bytes - before[source] for source, num_bytes in _loaded(server).items()}
    _, memory, _ = server.call("GET", "/memory")
    return loaded, int(memory["models"]["m0"]["weights_total_bytes"])


def _loaded(server: RunningServer) -> dict[str, int]:
    """Bytes of weights that were loaded, by source."""
    _, metrics, _ = server.call("GET", "/metrics")
    found = re.findall(r'loaded_weight_bytes_total.model="m0",source="(\w+)". (\S+)', metrics)
    return {"disk": 0, "neighbour": 0} | {source: int(float(value)) for source, value in found}


def test_a_model_that_ends_every_process(checkpoint: Path):
    """It is out of service once all devices have given it up, and the server answers so."""
    with running(["-m", "tests.serve.fake_server", str(checkpoint), "0", *DEVICES]) as server:

        def crash() -> int:
            body = {"model": "fake", "prompt": "crash", "max_tokens": 9}
            return server.call("POST", COMPLETIONS, body)[0]

        def is_out() -> bool:
            status, answer, _ = server.call("POST", COMPLETIONS, {"model": "fake", "prompt": "x"})
            return status == 503 and "no model is left" in json.dumps(answer)

        for _ in range(6):
            eventually(lambda: crash() in (500, 503), "it crashes")
        eventually(lambda: bool(crash()) and is_out(), "it is out of service")


def test_weights_are_shared_by_several_devices_only() -> None:
    config = EngineConfig(models=(ModelSpec("a", Path("a")),), peer_weights=True)
    with pytest.raises(ConfigError, match="--devices"):
        lend_weights([config])
    assert lend_weights([config, config])
    unsaid = replace(config, peer_weights=None)
    assert [lend_weights([unsaid] * count) for count in (1, 2)] == [False, True]
    assert not lend_weights([replace(config, peer_weights=False)] * 2)
    assert not lend_weights([replace(unsaid, tensor_parallel_size=2)] * 2)
    with pytest.raises(ConfigError, match="peer_weights is for models on one device"):
        replace(config, tensor_parallel_size=2)


def test_a_device_that_is_not_there(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "aquifer", "serve", str(checkpoint), "--port", "0"]
    done = subprocess.run(
        [*command, "--devices", "cpu,cuda:99", "--memory", "64M"], capture_output=True, text=True
    )
    assert done.returncode in (1, 2)  # where there is no such GPU, or no bindings for any
    assert "error: " in done.stderr
    assert "cuda" in done.stderr


def test_an_engine_that_does_not_answer(checkpoint: Path):
    """It is left out of reports and gets no requests; when it goes on, it is there again."""
    with running(["-m", "tests.serve.fake_server", str(checkpoint), "0", *DEVICES]) as server:
        stopped = server.spawned()[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            # The first report waits for its answer; at the second one it counts as silent.
            assert [_devices(server) for _ in range(2)] == [["cpu:1"]] * 2
            body = {"model": "fake", "prompt": "x", "max_tokens": 3}
            for _ in range(4):
                assert server.call("POST", COMPLETIONS, body)[0] == 200
        finally:
            os.kill(stopped, signal.SIGCONT)
        eventually(lambda: len(_devices(server)) == 2, "it answers again")


def test_each_engine_begins_with_another_model() -> None:
    specs = tuple(ModelSpec(name, Path(name)) for name in "abcde")
    config = EngineConfig(models=specs)
    assert engine_configs(config, ()) == [config]
    configs = engine_configs(config, ("cuda:0", "cuda:1", "cuda:2"))
    assert [one.device for one in configs] == ["cuda:0", "cuda:1", "cuda:2"]
    orders = ["".join(spec.name for spec in one.models) for one in configs]
    assert orders == ["abcde", "bcdea", "deabc"]
    # Each has its part of the host's memory.
    sized = replace(config, host_cache_bytes=9 << 30)
    assert {one.host_cache_bytes for one in engine_configs(sized, ("cuda:0", "cpu"))} == {9 << 29}
    (of_each,) = {one.host_cache_bytes for one in configs}
    assert of_each is not None
    assert 0 < 3 * of_each <= available_host_bytes()
    assert engine_configs(config, ("cpu", "cpu"))[0].host_cache_bytes is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": " , "}, "names none"),
        ({"devices": "cuda:0,cuda"}, "number each GPU"),
        ({"devices": "cuda:0,gpu1"}, "devices is 'gpu1'; choose"),
        ({"devices": "cuda:1,cuda:1"}, "cuda:1 several times"),
        ({"placement": "random"}, "placement needs several devices"),
        ({"placement": "nearest", "devices": "cpu,cpu"}, "placement is 'nearest'; choose"),
    ],
)
def test_devices_that_cannot_be(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**options)  # type: ignore[arg-type]


def test_device_and_devices(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "aquifer", "serve", str(checkpoint), "--device", "cpu"]
    done = subprocess.run([*command, *DEVICES], capture_output=True, text=True)
    assert done.returncode == 2
    assert "device and devices are both given" in done.stderr


def test_devices_are_taken_in_groups_of_ranks() -> None:
    models = (ModelSpec("a", Path("a")),)
    config = EngineConfig(models=models, tensor_parallel_size=2)
    devices = ("cuda:2", "cuda:3", "cpu", "cpu", "cuda:0", "cuda:1")
    assert [one.device for one in engine_configs(config, devices)] == ["cuda:2", "cpu", "cuda:0"]
    with pytest.raises(ConfigError, match="devices has 3, which are no groups of 2"):
        engine_configs(config, ("cuda:0", "cuda:1", "cuda:2"))
    with pytest.raises(ConfigError, match="give neighbours, such as cuda:1,cuda:2"):
        engine_configs(config, ("cuda:1", "cuda:3"))
