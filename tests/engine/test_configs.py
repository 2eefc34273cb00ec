"""Configurations of checkpoints: a bad one is refused with the file and the field, by any way in.

Whatever a field holds, either the model opens and gives a token, or a ConfigError says why not.
"""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.architectures import GQA, TRANSFORMERS, save_tiny
from tests.checkpoints import llama_config, llama_weights, save_checkpoint

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import ConfigError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.models import limits

MIB = 1 << 20
MEMORY_BYTES = 16 * MIB
ABSENT = "@absent@"
"""In place of a field's value: the field is removed."""

LONG = "@long@"
"""In place of a field's value: a number of 5000 digits, which `json` does not write."""

SMALL: dict[str, int] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint that can be served, of our decoder and of two models of Transformers."""
    folder = tmp_path_factory.mktemp("whole")
    config = llama_config(**SMALL)
    save_checkpoint(folder / "llama", config, llama_weights(config, 0))
    for name in ("helium", "gpt_bigcode"):
        save_tiny(TRANSFORMERS[name](), folder / name)
    return {name: folder / name for name in ("llama", "helium", "gpt_bigcode")}


def edited(whole: Path, folder: Path, name: str = "config.json", /, **fields: Any) -> Path:
    """A checkpoint with the weights of another one, and fields of one file changed."""
    folder.mkdir(exist_ok=True)
    for file in whole.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    link = folder / "model.safetensors"
    if not link.is_symlink():
        link.symlink_to(whole / "model.safetensors")
    file = folder / name
    values = (json.loads(file.read_text()) if file.is_file() else {}) | fields
    text = json.dumps({key: value for key, value in values.items() if value != ABSENT})
    file.write_text(text.replace(f'"{LONG}"', "9" * 5000))
    return folder


def serve_a_token(folder: Path, load_format: str = "auto", kv_cache: str = "virtual") -> list[int]:
    """Open an engine on a checkpoint, and get one token of it; in any case nothing is left."""
    driver = FaultyDriver(HostDriver())
    config = EngineConfig(
        (ModelSpec("tiny", folder),),
        device="cpu",
        memory_bytes=MEMORY_BYTES,
        max_num_seqs=2,
        load_format=load_format,
        kv_cache=kv_cache,
        seed=0,
    )
    outputs: list[TokenOutput] = []
    try:
        engine = Engine.open(config, driver=driver)
        try:
            # With tokens that end the output forbidden, all of their ids are used.
            params = SamplingParams(max_tokens=1, min_tokens=1, temperature=0.0)
            engine.add(Request("one", "tiny", [0], params, 0.0))
            while engine.has_work:
                outputs += engine.step()
        finally:
            engine.close()
    finally:
        assert (driver.live_handles, driver.mapped_pages, driver.reservations) == (set(), 0, {})
        driver.close()
    (output,) = outputs
    assert output.finish_reason == "length"
    return output.token_ids


# --- a table of bad configurations ---------------------------------------------------------------

Bad = tuple[dict[str, Any], str]
"""Fields, and what the message must match."""

IS = r"config\.json: NAME is .*; it must be "
WHOLE = "a whole number from"
NAN, INFINITY = float("nan"), float("inf")
NO_NUMBERS = ["a", 0, -1e-6, NAN, INFINITY, 10**40, True, [1e-6], {}]
"""Neither norms nor rotary embeddings can be computed with these."""

NO_TOKENS = [[-1, "x"], [1, "x"], -1, "x", 1.0, True, {}, [[1]], [None], 2**31]
NO_LAYERS = ["full_attention", 1, [1], ["full_attention"] * 2, ["chunked_attention"], {}]
NO_WINDOWS: list[Any] = [0, -1, 1.5, "x", [8], limits.MOST_POSITIONS + 1]
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
TEXTS = ("hidden_act", "torch_dtype", "dtype", "model_type")
YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
SIZES = {
    "num_hidden_layers": limits.MOST_LAYERS,
    "num_attention_heads": limits.MOST_HEADS,
    "num_key_value_heads": limits.MOST_HEADS,
    "hidden_size": limits.MOST_WIDTH,
    "intermediate_size": limits.MOST_WIDTH,
    "head_dim": limits.MOST_WIDTH,
    "vocab_size": limits.MOST_VOCAB,
    "max_position_embeddings": limits.MOST_POSITIONS,
}
REQUIRED = sorted(SIZES.keys() - {"num_key_value_heads", "head_dim", "max_position_embeddings"})


def each(names: Iterable[str], values: Sequence[Any], message: str) -> list[Bad]:
    """Each value in each field; NAME in the message is the field."""
    return [({n: value}, message.replace("NAME", n)) for n in names for value in values]


def scaling(kinds: Sequence[str], names: Iterable[str], values: Sequence[Any]) -> list[Bad]:
    """Each value in each field of rotary scaling of each kind."""
    return [
        ({"rope_scaling": {"type": kind, n: value}}, rf"json: rope_scaling\.{n} is .*; it must be")
        for kind in kinds
        for n in names
        for value in values
    ]


BAD: list[Bad] = [
    *each(SIZES, [0, -5, 10**9, 10**99, INFINITY, True, "x", 2.0, [2], {"a": 2}], IS + WHOLE),
    *each(SIZES, [LONG], r"config\.json: NAME is a number of 5000 digits"),
    *(({n: most + 1}, rf"json: {n} is {most + 1}; .* to {most}$") for n, most in SIZES.items()),
    (
        {"vocab_size": 600_000},
        r"vocab_size is 600000; it must be .* to 524287$",
    ),  # cannot be sampled
    *each(REQUIRED, [ABSENT], r"config\.json lacks NAME, which must be " + WHOLE),
    *each(REQUIRED, [None], IS + WHOLE),
    *each(FLAGS, [0, 1.0, "true", [], {}], IS + "true or false"),
    *each(["rms_norm_eps"], NO_NUMBERS, IS + "a number from 1e-30 to 1$"),
    *each(["rope_theta"], NO_NUMBERS, IS + r"a number from 2 to 1e\+30$"),
    *each(TEXTS, [0, "", "a\nb", ["silu"], {}, True], IS + "a text"),
    *each(["architectures"], [5, "Llama", {}, [1], [None]], IS + "a list of texts"),
    ({"model_type": ABSENT}, r"config\.json lacks model_type"),
    ({"model_type": None}, r"config\.json: model_type is null"),
    ({"hidden_act": "\ud800"}, r"config\.json: hidden_act is no valid Unicode"),
    ({"hidden_act": "spiral"}, r"make LlamaForCausalLM from .*config\.json: .*spiral"),
    ({"partial_rotary_factor": "x"}, r"config\.json: partial_rotary_factor is \"x\""),
    # Sizes that do not fit together.
    ({"num_key_value_heads": 3}, r"num_key_value_heads is 3; it must be a divisor of the 2 heads"),
    ({"num_key_value_heads": 4}, r"num_key_value_heads is 4; it must be a divisor of the 2 heads"),
    ({"head_dim": 5}, r"config\.json: head_dim is 5; it must be even"),
    ({"head_dim": ABSENT, "hidden_size": 33}, r"hidden_size is 33; it must be a multiple of the 2"),
    ({"head_dim": ABSENT, "hidden_size": 34}, r"hidden_size is 34; it must be an even multiple"),
    # Layers.
    *(
        ({"use_sliding_window": True, "sliding_window": value}, rf"sliding_window is .* {WHOLE}")
        for value in NO_WINDOWS
    ),
    *each(["max_window_layers"], [-1, "x", 10**9], IS + WHOLE),
    *each(["layer_types"], NO_LAYERS, IS + "a list"),
    # Tokens that end the output.
    *each(["eos_token_id"], NO_TOKENS, rf"config\.json: NAME (is|has) .* {WHOLE} 0 to"),
    # Rotary scaling.
    *each(["rope_scaling", "rope_parameters"], [1, [2], "x"], IS + "an object"),
    ({"rope_parameters": {"full_attention": {}}}, r"rope_parameters\.full_attention is an object"),
    ({"rope_scaling": {"type": "spiral"}}, r"rope_scaling\.type is \"spiral\"; it must be one of"),
    ({"rope_scaling": {"rope_type": 1}}, r"rope_scaling\.rope_type is 1; it must be a text"),
    ({"rope_scaling": {"rope_theta": 0}}, r"rope_scaling\.rope_theta is 0; it must be a number"),
    ({"rope_scaling": {"rope_theta": LONG}}, r"rope_scaling\.rope_theta is a number of 5000"),
    *scaling(["linear", "dynamic", "yarn", "llama3"], ["factor"], NO_NUMBERS),
    *scaling(["yarn"], YARN, ["x", -1, NAN, True, [1.0]]),
    ({"rope_scaling": {"type": "linear"}}, r"config\.json lacks rope_scaling\.factor"),
    ({"rope_scaling": {"type": "linear", "factor": 1e6}}, r"factor is 1000000.0; it must be such"),
    ({"rope_scaling": {"type": "yarn", "factor": 0.001}}, r"factor is 0\.001; it must be such"),
    (
        {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        r"rope_scaling\.type is \"dynamic\"; it must be of another kind for heads of 2",
    ),
    ({"rope_scaling": {"type": "yarn", "truncate": 1}}, r"rope_scaling\.truncate is 1"),
    (
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 8.0}},
        rf"rope_scaling\.original_max_position_embeddings is 8\.0; it must be {WHOLE}",
    ),
    (
        {"rope_scaling": {"type": "llama3", "factor": 2.0}},
        r"config\.json lacks rope_scaling\.original_max_position_embeddings",
    ),
    (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 2.0,
                "original_max_position_embeddings": 32,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
            }
        },
        r"rope_scaling\.high_freq_factor is 4\.0; it must be more than low_freq_factor",
    ),
]


def check_refused(folder: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        serve_a_token(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def _id(value: Any) -> str:
    return re.sub(r"[^\w.+]+", "-", str(value))[:50]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[_id(fields) for fields, _ in BAD])
def test_a_bad_configuration(
    whole: dict[str, Path], tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    check_refused(edited(whole["llama"], tmp_path / "tiny", **fields), message)


BAD_TRANSFORMERS: dict[str, list[Bad]] = {
    "helium": [
        *each(sorted(SIZES.keys() - {"intermediate_size"}), [0, -5, "x", 1.5, True], IS + WHOLE),
        *each(SIZES, [10**9, 10**30], IS + WHOLE),
        *each(SIZES, [LONG], r"config\.json: NAME is a number of 5000 digits"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; .* a divisor of the 4"),
        ({"rms_norm_eps": "a"}, r"config\.json is not a valid helium .*'rms_norm_eps'"),
        ({"hidden_act": "spiral"}, r"make HeliumForCausalLM from .*config\.json: .*spiral"),
        ({"eos_token_id": [-1, "x"]}, r"config\.json.*eos_token_id"),
        ({"intermediate_size": -4}, r"config\.json"),
        ({"rope_parameters": {"rope_type": "spiral"}}, r"config\.json.*spiral"),
        ({"rope_parameters": [1]}, r"config\.json"),
    ],
    # The same sizes, under the names of this architecture.
    "gpt_bigcode": each(
        ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size"),
        [0, -5, 10**9, "x"],
        IS + WHOLE,
    ),
}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [(name, *bad) for name, table in BAD_TRANSFORMERS.items() for bad in table],
    ids=[name + _id(bad[0]) for name, table in BAD_TRANSFORMERS.items() for bad in table],
)
def test_a_bad_configuration_of_transformers(
    whole: dict[str, Path], tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    check_refused(edited(whole[name], tmp_path / "tiny", **fields), message)


def test_modules_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that the constructor counts to, under a name of this architecture alone."""
    monkeypatch.setattr(limits, "MOST_PARTS", 2000)
    config = {"model_type": "gemma3n_text", **GQA, "num_kv_shared_layers": 0}
    config["altup_num_inputs"] = 5000
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json: ValueError: .* more than 2000 modules"):
        serve_a_token(tmp_path, "dummy")
    config["altup_num_inputs"] = 10**8
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json: altup_num_inputs is 100000000; it must"):
        serve_a_token(tmp_path, "dummy")


def test_constants_without_end(whole: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are allocated while a plan is made, unlike weights."""
    monkeypatch.setattr(limits, "MOST_CONSTANT_BYTES", 60)  # two frequencies of 32 bytes
    check_refused(whole["helium"], r"config\.json: .* constants of 64 B, and at most 60 B")


@pytest.mark.parametrize("value", [[-1, "x"], -1, "x", 1.5, True, [LONG]])
def test_a_bad_generation_config(whole: dict[str, Path], tmp_path: Path, value: Any) -> None:
    folder = edited(whole["llama"], tmp_path / "a", "generation_config.json", eos_token_id=value)
    check_refused(folder, r"generation_config\.json: eos_token_id")


@pytest.mark.parametrize("content", ["", "[]", "{", '"x"', "[" * 100_000, " " * (4 * MIB) + "{}"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_are_no_object(
    whole: dict[str, Path], tmp_path: Path, name: str, content: str
) -> None:
    folder = edited(whole["llama"], tmp_path / "tiny")
    (folder / name).write_text(content)
    check_refused(folder, f"^cannot read {folder / name}: ")


def test_documented_limits() -> None:
    document = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    stated = re.findall(r"^  \| [^|]+ \| ([\d ]+) \|$", document, re.MULTILINE)
    assert [int(number.replace(" ", "")) for number in stated] == [
        limits.MOST_LAYERS,
        limits.MOST_HEADS,
        limits.MOST_WIDTH,
        limits.MOST_VOCAB,
        limits.MOST_POSITIONS,
    ]


# --- good ones -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": None},
        {"rope_theta": 10000, "rms_norm_eps": 1},
        {"rope_scaling": None, "sliding_window": None, "attention_bias": None, "head_dim": 16},
        {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": 0}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_parameters": {}, "rope_scaling": {"type": "linear", "factor": 8}},
        {"max_window_layers": 40, "layer_types": ["full_attention"]},
        {"max_position_embeddings": limits.MOST_POSITIONS},
        {"eos_token_id": None},
        {"eos_token_id": []},
        {"architectures": None, "unknown": {"a": [10**40, "\n", INFINITY]}},
        {"bos_token_id": "ignored", "pad_token_id": -1},
    ],
    ids=_id,
)
def test_a_good_configuration(
    whole: dict[str, Path], tmp_path: Path, fields: dict[str, Any]
) -> None:
    kv_heads = {"num_key_value_heads": None} if "num_key_value_heads" in fields else {}
    load_format = "dummy" if kv_heads else "auto"  # the weights have the shapes of one KV head
    assert serve_a_token(edited(whole["llama"], tmp_path / "tiny", **fields), load_format)


def test_end_tokens_beyond_the_vocabulary_are_ignored(
    whole: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Transformers compares with them in vain; those within it still end the output."""
    (token,) = serve_a_token(whole["llama"])
    others = [i for i in range(64) if i != token]
    folder = edited(
        whole["llama"], tmp_path / "tiny", "generation_config.json", eos_token_id=[*others, 64, 900]
    )
    assert serve_a_token(folder) == [token]  # all others are forbidden, as `min_tokens` asks
    assert "generation_config.json lists tokens beyond the vocabulary of 64" in caplog.text
    assert "ignored: 64, 900" in caplog.text


# --- any value in any field ----------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(-(2**70), 2**70),
    st.sampled_from([10**40, 2**24, 2**24 + 1, 2**31, 2**63, LONG]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["linear", "dynamic", "yarn", "llama3", "qwen3", "mistral", "bfloat16"]),
)
ROPE_FIELDS = (
    "rope_type",
    "factor",
    "rope_theta",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "dynamic", "yarn", "llama3", "default"])},
    optional={name: st.one_of(st.floats(0.1, 100), SCALARS) for name in ROPE_FIELDS[1:]},
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = sorted(
    {
        *llama_config(),
        "attention_bias",
        "dtype",
        "layer_types",
        "max_window_layers",
        "mlp_bias",
        "partial_rotary_factor",
        "sliding_window",
        "use_sliding_window",
    }
)
MORE_BYTES = 400 * MIB
"""Memory that all examples together may add to the peak: far more than one tiny model takes, far
less than anything made in the size of a bad field."""


def check_any(folder: Path, load_format: str, kv_cache: str = "virtual") -> None:
    """The model opens and gives a token, or a ConfigError of one line says why not."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal = ""
    try:
        assert serve_a_token(folder, load_format, kv_cache)
    except ConfigError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MORE_BYTES


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.one_of(st.sampled_from(FIELDS), st.sampled_from(["rope_scaling", "rope_parameters"])),
    value=st.one_of(JSON, ROPE),
    load_format=st.sampled_from(["auto", "dummy"]),
    kv_cache=st.sampled_from(["virtual", "paged"]),
)
@example(name="num_hidden_layers", value=10**9, load_format="dummy", kv_cache="virtual")
@example(name="max_position_embeddings", value=2**24, load_format="dummy", kv_cache="paged")
@example(name="vocab_size", value=1, load_format="dummy", kv_cache="virtual")
def test_any_value_in_a_field_of_our_decoder(
    whole: dict[str, Path],
    tmp_path: Path,
    name: str,
    value: Any,
    load_format: str,
    kv_cache: str,
) -> None:
    # A type of another backend's is the business of the next test.
    if name == "model_type" and isinstance(value, str):
        value = "qwen2"
    check_any(edited(whole["llama"], tmp_path / "tiny", **{name: value}), load_format, kv_cache)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), value=JSON, load_format=st.sampled_from(["auto", "dummy"]))
def test_any_value_in_a_field_of_transformers(
    whole: dict[str, Path], tmp_path: Path, data: st.DataObject, value: Any, load_format: str
) -> None:
    names = sorted(json.loads((whole["helium"] / "config.json").read_text()))
    name = data.draw(st.sampled_from(names))
    check_any(edited(whole["helium"], tmp_path / "tiny", **{name: value}), load_format)
