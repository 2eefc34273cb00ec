"""The table of options, and that every interface has what the table says."""

from __future__ import annotations

import inspect
import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer

from aquifer import LLM, ConfigError
from aquifer.bench import options as bench_options
from aquifer.bench.serving.options import SERVE
from aquifer.cli import app
from aquifer.cluster import front
from aquifer.config import EngineConfig, ModelSpec, aliases_of, field_values, parse_models
from aquifer.llm import LLMOptions
from aquifer.option import Option, Scope
from aquifer.options import OPTIONS, default_of, find_option, options_of
from aquifer.parameters import read_options
from aquifer.serve import server
from aquifer.serve.config import ServerConfig
from aquifer.sizes import exact_size, parse_size

MODELS = (ModelSpec("m", Path("/")),)

Serve = Callable[..., tuple[EngineConfig, ServerConfig]]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what conftest.py sets for all other tests."""
    monkeypatch.delenv("AQUIFER_GUARD_PAGES")


@pytest.fixture
def serve_with(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Runs `aquifer serve` up to where the server would start; the options that it would get."""

    def serve_with(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
        got: list[Any] = []
        for module, name in ((server, "serve"), (front, "serve_on_this_machine")):
            monkeypatch.setattr(module, name, lambda *configs, **_: got.extend(configs))
        app(["serve", *arguments], standalone_mode=False)
        return got[0], got[1]

    return serve_with


def _parameters(*command: str) -> dict[str, Any]:
    """The parameters of a command, by name."""
    found: Any = typer.main.get_command(app)
    for name in command:
        found = found.get_command(typer.Context(found), name)
    return {parameter.name: parameter for parameter in found.params}


def _written(option: Option) -> tuple[str, Any]:
    """A value other than the default, as text and as a value."""
    if option.many:
        text = option.choices[1] if option.choices else "some.text"
        return text, (text,)
    if option.unit == "file":
        return __file__, Path(__file__).read_text(encoding="utf-8")
    if option.type is bool:
        return ("false", False) if option.default else ("true", True)
    if option.choices:
        return option.choices[1], option.choices[1]
    if option.type is float:
        return "0.25", 0.25
    if option.type is int:
        return ("3G", 3 << 30) if option.unit == "bytes" else ("37", 37)
    text = option.example or "some.text"
    return text, text


FLAGS = [option for option in OPTIONS if not option.is_argument]
FIELDS = [option for option in FLAGS if option.field_name != "models"]
each_option = pytest.mark.parametrize("option", FLAGS, ids=lambda option: option.name)


# --- the table -------------------------------------------------------------------------------


def test_options_are_described() -> None:
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
    for option in OPTIONS:
        assert option.scopes
        assert option.help.endswith(".")
        assert option.default_meaning or option.is_argument, option.name
        assert set(option.scopes) <= set(get_args(Scope))


@each_option
def test_defaults_and_examples_are_allowed(option: Option) -> None:
    option.check(option.default)
    for text in (option.default_text, option.example):
        if text and option.unit != "file":
            option.parse(text)


def test_each_field_is_one_option() -> None:
    # The server sets where its engine processes find each other.
    described = [option.field_name for option in FIELDS] + ["models", "neighbours"]
    for kind in (EngineConfig, ServerConfig):
        for field in fields(kind):
            assert described.count(field.name) == 1, field.name
    owned = {field.name for kind in (EngineConfig, ServerConfig) for field in fields(kind)}
    assert set(described) == owned


def test_fields_have_the_defaults_of_the_table() -> None:
    engine, http = EngineConfig(MODELS), ServerConfig()
    for option in FIELDS:
        owner = engine if hasattr(engine, option.field_name) else http
        assert getattr(owner, option.field_name) == default_of(option.name)


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 1 << 10, 3 << 19, 4 << 30, 2**40 + 1])
def test_sizes_are_read_as_they_are_written(num_bytes: int) -> None:
    assert parse_size(exact_size(num_bytes)) == num_bytes


def test_infinite_numbers_are_allowed_where_they_mean_something() -> None:
    bounded = Option("rate", float, 1.0, "", above=0)
    infinite = Option("rate", float, 1.0, "", above=0, may_be_infinite=True)
    assert infinite.parse("inf") == math.inf
    for option, text in ((bounded, "inf"), (infinite, "-inf"), (infinite, "nan")):
        with pytest.raises(ConfigError, match=r"above 0, such as 1\.0"):
            option.parse(text)


@pytest.mark.parametrize("value", [-1, -1.0, "-1", "-1m"])
def test_a_negative_duration_is_infinite_however_it_is_written(value: object) -> None:
    assert find_option("keep_alive").parse(value) == math.inf


def test_a_single_choice_is_named() -> None:
    with pytest.raises(ConfigError, match=r"choose only$"):
        Option("kind", str, "only", "", choices=("only",)).parse("other")


# --- interfaces ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options", "others"),
    [
        (("serve",), options_of("serve"), {"config"}),
        (("run",), options_of("run"), {"model", "prompt", "raw", "max_tokens", "temperature"}),
        (("replay",), bench_options.REPLAY, {"trace"}),
        (("bench", "throughput"), bench_options.THROUGHPUT, {"model"}),
        (("bench", "latency"), bench_options.LATENCY, {"model"}),
        (("bench", "serve"), SERVE, {"name"}),
        (("bench", "prefill"), bench_options.PREFILL, {"model"}),
        (("bench", "start"), bench_options.START, {"model"}),
        (("bench", "load"), bench_options.LOAD, {"model"}),
        (("bench", "soak"), bench_options.SOAK, {"model"}),
        (("bench", "overhead"), bench_options.OVERHEAD, set()),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) and isinstance(value[0], str) else "",
)
def test_commands_have_the_options_of_the_table(
    command: tuple[str, ...], options: tuple[Option, ...], others: set[str]
) -> None:
    parameters = _parameters(*command)
    assert set(parameters) - {"help"} == {option.name for option in options} | others
    for option in options:
        parameter = parameters[option.name]
        assert parameter.help.startswith(option.help), option.name
        if option.is_argument:
            continue
        assert parameter.opts == [option.flag, *([option.short] if option.short else [])]
        if option.type is bool:
            assert parameter.default is option.default
            assert parameter.secondary_opts == ["--no-" + option.flag.removeprefix("--")]
        else:
            assert option.parse(parameter.default) == option.default
            assert parameter.metavar == option.metavar


def test_bench_has_the_engine_s_options_as_the_table_has_them() -> None:
    for options in (bench_options.THROUGHPUT, bench_options.LATENCY, bench_options.PREFILL):
        assert set(options_of("bench")) <= set(options)


def test_llm_has_the_options_of_the_table() -> None:
    options = options_of("llm")
    signature = inspect.signature(LLM)
    assert list(signature.parameters) == ["model", *(option.name for option in options)]
    assert get_type_hints(LLMOptions).keys() == {option.name for option in options}
    for option in options:
        assert option.parse(signature.parameters[option.name].default) == option.default
        hint = get_type_hints(LLMOptions)[option.name]
        assert option.type in (get_args(hint) or (hint,))
        assert (type(None) in get_args(hint)) == (option.default is None)
        assert f"{option.name}: {option.help.split()[0]}" in (LLM.__doc__ or "")


def test_llm_refuses_what_the_table_does_not_have() -> None:
    with pytest.raises(TypeError, match=r"no option 'port'; there is block_size, .*, swap_space"):
        LLM("demo", port=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"memory is 'lots'; it must be a size .* such as 4GiB"):
        LLM("demo", memory="lots")
    with pytest.raises(
        ConfigError,
        match="kv_cache is 'tree'; choose virtual, paged, bucketed, avmp, avmp-fixed or avmp-p",
    ):
        LLM("demo", kv_cache="tree")


def _values(engine: EngineConfig, http: ServerConfig) -> Mapping[str, Any]:
    owners = {name: config for config in (engine, http) for name in config.__slots__}
    return {o.name: getattr(owners[o.field_name], o.field_name) for o in FIELDS}


def test_defaults_are_those_of_the_table(serve_with: Serve) -> None:
    assert _values(*serve_with("/")) == {option.name: option.default for option in FIELDS}


def test_several_models_and_options(serve_with: Serve) -> None:
    arguments = ("a=/", "b=/tmp", "--max-model-len", "32K", "--seed", "3", "--port", "0")
    engine, http = serve_with(*arguments)
    assert [(model.name, str(model.path)) for model in engine.models] == [("a", "/"), ("b", "/tmp")]
    set_values = {"max_model_len": 32 << 10, "seed": 3, "port": 0}
    assert _values(engine, http) == {o.name: o.default for o in FIELDS} | set_values


_ORIGIN = {"allowed_origins": "https://chat.example.org"}
NEEDED = {
    "allowed_methods": _ORIGIN,
    "allowed_headers": _ORIGIN,
    "allow_credentials": _ORIGIN,
    "max_log_len": {"enable_log_requests": "true"},
    "placement": {"devices": "cpu,cpu"},
    "api_key_for_all": {"api_key": "k"},
    "prediction_uses": {"length_prediction": "prior"},
    "bucket_routing_threshold": {"kv_cache": "bucketed"},
    "bucket_inflation": {"kv_cache": "bucketed"},
    "bucket_grouping": {"kv_cache": "bucketed"},
    "bucket_bounds": {"kv_cache": "bucketed"},
    "bucket_memory": {"kv_cache": "bucketed"},
}
"""Options that are refused without others, with values of these as they are written."""


@pytest.mark.parametrize("option", FIELDS, ids=lambda option: option.name)
def test_every_source_sets_every_option(
    option: Option, serve_with: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, value = _written(option)
    flag = option.flag if value is not False else "--no-" + option.flag.removeprefix("--")
    arguments = [flag] if option.type is bool else [flag, text]
    needed = NEEDED.get(option.name, {})
    others = [part for name, given in needed.items() for part in (find_option(name).flag, given)]
    others = [part for part in others if part != "true"]
    values = {name: find_option(name).parse(given) for name, given in needed.items()}
    expected = {o.name: o.default for o in FIELDS} | values | {option.name: value}
    assert _values(*serve_with("/", *others, *arguments)) == expected
    for key in (option.name, option.name.replace("_", "-")):
        file = tmp_path / "options.yaml"
        file.write_text(f"{key}: {text}\n")
        assert _values(*serve_with("/", *others, "--config", str(file))) == expected
    monkeypatch.setenv(option.variable, text)
    assert _values(*serve_with("/", *others)) == expected


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    serve_with: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("port: 1\nmax_num_seqs: 1\nblock-size: 1\nenable_prefix_caching: false\n")
    monkeypatch.setenv("AQUIFER_PORT", "2")
    monkeypatch.setenv("AQUIFER_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("AQUIFER_SEED", "")  # an empty variable sets nothing
    arguments = ("--config", str(file), "--port", "8000", "--enable-prefix-caching")
    engine, http = serve_with("/", *arguments)
    assert (http.port, engine.max_num_seqs, engine.block_size, engine.seed) == (8000, 2, 1, None)
    assert engine.enable_prefix_caching


def test_models_in_a_file(serve_with: Serve, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("models: [a=/, b=/tmp]\n")
    assert [model.name for model in serve_with("--config", str(file))[0].models] == ["a", "b"]
    assert [m.name for m in serve_with("--config", str(file), "c=/")[0].models] == ["c"]
    file.write_text(f"model: {tmp_path}\n")
    assert [model.name for model in serve_with("--config", str(file))[0].models] == [str(tmp_path)]


# --- names of models -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("m/t", ModelSpec("m/t", Path("m/t"), ("t",), "m/t")),
        ("m/t//", ModelSpec("m/t", Path("m/t"), ("t", "m/t//"), "m/t")),
        ("/models/tiny", ModelSpec("/models/tiny", Path("/models/tiny"), ("tiny",))),
        ("tiny", ModelSpec("tiny", Path("tiny"))),
        ("tiny/", ModelSpec("tiny", Path("tiny"), ("tiny/",))),
        ("/", ModelSpec("/", Path("/"))),
        ("a=m/t/", ModelSpec("a", Path("m/t"), hub_id="m/t")),
        ("~/tiny", ModelSpec("~/tiny", Path.home() / "tiny", ("tiny",))),
    ],
)
def test_names_of_a_path(text: str, expected: ModelSpec) -> None:
    assert ModelSpec.parse(text) == expected


@pytest.mark.parametrize("text", ["", "=", "a=", "=models/tiny"])
def test_text_that_names_no_model(text: str) -> None:
    with pytest.raises(ConfigError, match="names no model; write PATH or NAME=PATH"):
        ModelSpec.parse(text)


def test_a_path_that_cannot_be_looked_at() -> None:
    with pytest.raises(ConfigError, match=r"no such model: /x+: File name too long"):
        ModelSpec.parse("/" + "x" * 300).check_path()


def test_no_model_has_an_empty_name() -> None:
    for name, aliases in [("", ()), ("a", ("b", ""))]:
        with pytest.raises(ConfigError, match="the model at x has an empty name"):
            ModelSpec(name, Path("x"), aliases)


def test_names_that_the_operator_gives() -> None:
    (model,) = parse_models(["models/tiny/"], ["a", "b", "a"])
    assert model == ModelSpec("a", Path("models/tiny"), ("b",), "models/tiny")
    assert parse_models(["models/tiny", "b=/"]) == (
        ModelSpec.parse("models/tiny"),
        ModelSpec.parse("b=/"),
    )


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["models/tiny", "b"], "names one model, and there are 2; write NAME=PATH for each"),
        (["a=models/tiny"], "'a=models/tiny' and --served-model-name both name the model"),
    ],
)
def test_ambiguous_names_are_refused(texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_models(texts, ["x"])


def test_every_source_sets_the_served_name(
    serve_with: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = "--served-model-name"
    named = (ModelSpec("a", Path("/"), ("b",)),)
    assert serve_with("/", flag, "a", flag, "b")[0].models == named
    file = tmp_path / "x.yaml"
    file.write_text("model: /\nserved-model-name: [a, b]\n")
    assert serve_with("--config", str(file))[0].models == named
    monkeypatch.setenv("AQUIFER_SERVED_MODEL_NAME", "a")
    assert serve_with("/")[0].models == (ModelSpec("a", Path("/")),)
    monkeypatch.setenv("AQUIFER_SERVED_MODEL_NAME", "a, b")
    assert serve_with("/")[0].models == named


def test_a_variable_sets_several_values(serve_with: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUIFER_LENGTH_PREDICTION", "prior")
    monkeypatch.setenv("AQUIFER_PREDICTION_USES", "admission,victims")
    assert serve_with("/")[0].prediction_uses == ("admission", "victims")
    monkeypatch.setenv("AQUIFER_PREDICTION_USES", "admission,")
    with pytest.raises(ConfigError, match=r"AQUIFER_PREDICTION_USES is ''; choose admission, "):
        serve_with("/")


def test_an_alias_stands_for_one_model() -> None:
    models = parse_models(["x/a", "y/a", "x/b", "c=x/d", "y/c", "x/e/"])
    assert aliases_of(models) == {"b": "x/b", "e": "x/e", "x/e/": "x/e"}


# --- what is refused -------------------------------------------------------------------------


def test_a_command_with_some_options_reads_the_file_of_a_server(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("port: 8000\ndtype: float32\n")
    values = read_options((find_option("dtype"), find_option("kv_cache")), {}, {}, file)
    assert values == {"dtype": "float32", "kv_cache": "virtual"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot: 8000\n", r"x.yaml: unknown key 'prot'; there is .*, api_key, .*, port, "),
        ("- port\n", "must hold"),
        ("a: [\n", "cannot read"),
        ("port: 1\nport : 1.5\n", "x.yaml: port is 1.5; it must be a whole number from 0 to 65535"),
        ("page-size: 1M\npage_size: 2M\n", "sets page_size twice; leave out 'page_size'"),
        ("memory: lots\n", "x.yaml: memory is 'lots'; it must be a size of at least 1, such as 4G"),
        ("max_num_seqs: yes\n", "x.yaml: max_num_seqs is True; it must be a whole number"),
        ("enable-prefix-caching: 2\n", "enable_prefix_caching is 2; write true or false"),
        ("api_key: 0123\n", "x.yaml: api_key is not text; put the value in quotes"),
        ("host: null\n", "x.yaml: host is not text"),
        ("threads: 1_000_000\n", "threads is 1000000; it must be a whole number from 1 to 1024"),
        (f"memory: '{'9' * 400}'\n", "it must be a size of at least 1, such as 4GiB"),
        (f"reclaim_below: {'9' * 400}\n", "it must be a number from 0 to 1"),
        ("dtype: [float32]\n", "x.yaml: dtype is .'float32'.; choose auto, float32"),
    ],
)
def test_bad_files(serve_with: Serve, tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        serve_with("/", "--config", str(file))


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        (
            "AQUIFER_PORT",
            "tcp://10.0.0.1:80",
            "AQUIFER_PORT is 'tcp://10.0.0.1:80'; .* such as 8000",
        ),
        (
            "AQUIFER_KV_CACHE",
            "tree",
            "AQUIFER_KV_CACHE is 'tree'; choose virtual, paged, bucketed, avmp, avmp-fixed or ",
        ),
        ("AQUIFER_ENABLE_PREFIX_CACHING", "maybe", "write true or false"),
        (
            "AQUIFER_GPU_MEMORY_UTILIZATION",
            "nan",
            "is nan; it must be a number above 0 and at most 1",
        ),
    ],
)
def test_bad_variables(
    serve_with: Serve, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, words: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=words):
        serve_with("/")


def test_bad_flags_name_the_flag_and_a_value_that_works() -> None:
    options = [option for option in FLAGS if option.type is not str or option.choices]
    for option in options:
        with pytest.raises(ConfigError) as caught:
            read_options(OPTIONS, {option.name: "?"}, {})
        message = str(caught.value)
        assert message.startswith(f"{option.flag} is '?'; ")
        assert message.endswith(option.advice)
        example = option.choices[-1] if option.choices else option.example or option.default_text
        assert example in option.advice


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"swap_space_bytes": -1},
            "swap_space is -1; it must be a size of at least 0, such as 4GiB",
        ),
        (
            {"max_num_seqs": 0},
            "max_num_seqs is 0; it must be a whole number of at least 1, such as",
        ),
        ({"max_num_seqs": "9"}, "max_num_seqs is '9'; it must be a whole number"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_num_waiting": None}, "max_num_waiting is None"),
        ({"device": "cuda:x"}, "device is 'cuda:x'; choose auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:"}, "device is 'cuda:'; choose auto"),
        ({"device": "gpu"}, "device is 'gpu'; choose auto"),
        ({"gpu_memory_utilization": 0.0}, "must be a number above 0 and at most 1, such as 0.9"),
        ({"gpu_memory_utilization": 1.01}, "must be a number above 0 and at most 1, such as 0.9"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"load_format": "pt"}, "load_format is 'pt'; choose auto or dummy"),
        ({"preemption_mode": "drop"}, "preemption_mode is 'drop'"),
        ({"preemption_mode": "swap", "swap_space_bytes": 0}, "needs swap_space above 0"),
        ({"prediction_uses": ("cache",)}, "prediction_uses needs length_prediction"),
        ({"bucket_routing_threshold": 0.5}, "bucket_routing_threshold needs kv_cache bucketed"),
        ({"bucket_inflation": 0.5}, "bucket_inflation needs kv_cache bucketed"),
        ({"bucket_grouping": True}, "bucket_grouping needs kv_cache bucketed"),
        ({"bucket_bounds": "equal"}, "bucket_bounds equal needs kv_cache bucketed"),
        ({"bucket_bounds": "fixed"}, "bucket_bounds is 'fixed'; choose learned or equal"),
        ({"bucket_memory_bytes": 1 << 30}, "bucket_memory needs kv_cache bucketed"),
        (
            {"kv_cache": "bucketed", "bucket_memory_bytes": 1 << 30, "guard_pages": True},
            "guard_pages needs virtual memory",
        ),
        ({"models": MODELS * 2}, "two models have the same name"),
        (
            {"tensor_parallel_size": 0},
            "tensor_parallel_size is 0; it must be a whole",
        ),
        (
            {"tensor_parallel_size": 2, "kv_cache": "bucketed"},
            "kv_cache bucketed is for one device; .* choose virtual or paged",
        ),
        ({"tensor_parallel_size": 2, "kv_cache": "avmp"}, "kv_cache avmp is for one device"),
        (
            {"tensor_parallel_size": 2, "host_cache_bytes": 1 << 30},
            "host_cache keeps weights",
        ),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**{"models": MODELS, **options})


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"block_size": 32}, ["block_size"]),
        ({"block_size": 32, "kv_cache": "paged"}, []),
        ({"block_size": 32, "kv_cache": "bucketed"}, []),
        ({"eager_pages": 0, "map_ahead": "off", "prompt_page_bytes": 1 << 25}, []),
        (
            {
                "eager_pages": 0,
                "map_ahead": "off",
                "prompt_page_bytes": 1 << 25,
                "kv_cache": "bucketed",
            },
            ["prompt_page_size", "map_ahead", "eager_pages"],
        ),
        ({"eager_pages": 0, "kv_cache": "paged"}, []),
        ({"prompt_page_bytes": 1 << 25, "kv_layout": "layer-major"}, ["prompt_page_size"]),
        ({"reclaim_below": 1.0, "kv_cache": "paged"}, []),
        *(({"kv_cache": name}, []) for name in find_option("kv_cache").choices),
    ],
)
def test_options_without_effect(options: dict[str, Any], names: list[str]) -> None:
    found = EngineConfig(models=MODELS, **options).without_effect()
    assert [each.split()[0] for each in found] == names
    assert all(" has no effect with kv_" in each for each in found)


def test_edges_of_what_is_possible() -> None:
    EngineConfig(MODELS, swap_space_bytes=0, enable_prefix_caching=False, seed=-1)
    EngineConfig(MODELS, device="cuda:12", gpu_memory_utilization=1)
    assert EngineConfig(models=()).models == ()


def test_configurations_pickle() -> None:
    config = EngineConfig(MODELS, memory_bytes=1 << 20)
    assert pickle.loads(pickle.dumps(config)) == config


def test_values_go_to_the_fields_that_are_theirs() -> None:
    values = {"memory": 1 << 20, "swap_space": 0, "port": 9, "models": ("x",)}
    assert field_values(EngineConfig, values) == {"memory_bytes": 1 << 20, "swap_space_bytes": 0}
    assert field_values(ServerConfig, values) == {"port": 9}
    assert find_option("memory").field_name == "memory_bytes"


def test_there_may_be_several_keys() -> None:
    assert ServerConfig().api_keys == ()
    assert ServerConfig(api_key="k").api_keys == ("k",)
    assert ServerConfig(api_key="k, l,").api_keys == ("k", "l")
    with pytest.raises(ConfigError, match="api_key contains no key"):
        ServerConfig(api_key=" ,")
    with pytest.raises(ConfigError, match="api_key_for_all needs api_key"):
        ServerConfig(api_key_for_all=True)


# --- options of the HTTP side ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"allowed_origins": " ,"}, "contains no origin"),
        ({"allowed_origins": "https://a.example/"}, "without a path"),
        ({"allowed_origins": "a.example"}, "scheme, host and port"),
        ({"allowed_origins": '["https://a.example"]'}, "separated by commas"),
        ({"allowed_origins": "https://*.example"}, "scheme, host and port"),
        ({"allowed_origins": "*", "allow_credentials": True}, "name the origins"),
        ({"allowed_origins": "*", "allowed_methods": "GET POST"}, "separated by commas"),
        ({"allowed_origins": "*", "allowed_headers": "x:y"}, "separated by commas"),
        ({"allowed_methods": "GET"}, "allowed_methods needs allowed_origins"),
        ({"allowed_headers": "authorization"}, "allowed_headers needs allowed_origins"),
        ({"allow_credentials": True}, "allow_credentials needs allowed_origins"),
        ({"enable_log_requests": True, "log_level": "warning"}, "set log_level to info"),
        ({"max_log_len": 10}, "needs enable_log_requests"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        ServerConfig(**values)


def test_origins_are_those_that_browsers_send() -> None:
    origins = "HTTPS://A.example:443, http://b.example:80,http://[::1]:3000 ,app://obsidian.md"
    cors = ServerConfig(allowed_origins=origins, allowed_methods="get, post").cors
    assert cors is not None
    assert cors.origins == (
        *("https://a.example", "http://b.example", "http://[::1]:3000", "app://obsidian.md"),
    )
    assert cors.methods == ("GET", "POST")
    assert cors.headers == ("*",)
    assert ServerConfig(allowed_origins="*").cors is not None
    assert ServerConfig().cors is None


def test_a_folder_of_models(tmp_path: Path) -> None:
    """Each of its folders with a config.json is served under its name."""
    for name in ("b", "a", "no-model"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        (tmp_path / name / "config.json").touch()
    models = parse_models([f"{tmp_path}/", "c=elsewhere"])
    assert [(model.name, model.path) for model in models] == [
        ("a", tmp_path / "a"),
        ("b", tmp_path / "b"),
        ("c", Path("elsewhere")),
    ]
    assert aliases_of(models) == {str(tmp_path / name): name for name in "ab"}
    assert parse_models([str(tmp_path / "a")])[0].path == tmp_path / "a"
    assert parse_models([str(tmp_path / "no-model")])[0].path == tmp_path / "no-model"
    assert parse_models([f"x={tmp_path}"])[0].path == tmp_path
    with pytest.raises(ConfigError, match="names one model, and there are 2"):
        parse_models([str(tmp_path)], ["x"])
    (tmp_path / "config.json").touch()
    (model,) = parse_models([str(tmp_path)])
    assert model.path == tmp_path
