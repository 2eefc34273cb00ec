"""JSON files of a checkpoint: what is refused as a whole, and how each kind of field is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aquifer.errors import ConfigError, InvariantError, as_config_error, one_line
from aquifer.fields import SETTINGS_BYTES, Fields, read_fields

FILE = Path("some") / "config.json"
LONG = "7" * 5000
DEEP = 100_000


def written(tmp_path: Path, content: bytes | str) -> Path:
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no valid JSON: JSONDecodeError: Expecting value"),
        ("{", "no valid JSON: JSONDecodeError"),
        (b'{"a": "\xff"}', "UnicodeDecodeError"),
        ('\ufeff{"a": 1}', "no valid JSON"),
        ("[1]", "it holds no JSON object"),
        ("null", "it holds no JSON object"),
        ('"text"', "it holds no JSON object"),
        (LONG, "it holds no JSON object"),
        ("[" * DEEP, "no valid JSON: RecursionError"),
        ('{"a":' * DEEP + "1" + "}" * DEEP, "no valid JSON: RecursionError"),
        (" " * SETTINGS_BYTES + "{}", r"it has more than 4\.00 MiB"),
    ],
    ids=range(11),
)
def test_a_file_that_holds_no_object(tmp_path: Path, content: bytes | str, message: str) -> None:
    file = written(tmp_path, content)
    with pytest.raises(ConfigError, match=f"^cannot read {file}: {message}"):
        read_fields(file)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^cannot read {tmp_path}: IsADirectoryError"):
        read_fields(tmp_path)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (f'{{"a": {LONG}}}', "a is a number of 5000 digits; it must have at most 100"),
        (f'{{"a": -{LONG}}}', "a is a number of 5000 digits"),
        (f'{{"a": {{"b": [1, {{"c": {LONG}}}]}}}}', r"a\.b\[1\]\.c is a number of 5000 digits"),
        (r'{"a": ["\ud800"]}', r"a\[0\] is no valid Unicode"),
        (r'{"a": {"\udc00b": 1}}', r'a\."\\udc00b" is no valid Unicode'),
    ],
)
def test_numbers_and_texts_that_no_field_can_hold(tmp_path: Path, content: str, name: str) -> None:
    file = written(tmp_path, content)
    with pytest.raises(ConfigError, match=f"^{file}: {name}"):
        read_fields(file)


def test_what_tokenizers_really_hold_is_read(tmp_path: Path) -> None:
    values = {
        "model_max_length": int(1e30),
        "a": "\n<|end|> \U0001f600",
        "b": [0.5, None, -(10**99)],
    }
    assert read_fields(written(tmp_path, json.dumps(values))).values == values
    assert read_fields(written(tmp_path, '{"a": Infinity}')).values == {"a": float("inf")}


# --- fields --------------------------------------------------------------------------------------

ABSENT = object()
READERS: dict[str, tuple[Callable[[Fields], Any], list[Any], list[Any], str]] = {
    "integer": (
        lambda fields: fields.integer("a", 1, 9),
        [1, 9],
        [ABSENT, None, 0, 10, -1, 10**99, 1.0, True, "1", [1], {}, float("nan")],
        "a whole number from 1 to 9",
    ),
    "integers": (
        lambda fields: fields.integers("a", 1, 9),
        [ABSENT, None, 1, 9, [], [1, 9]],
        [0, True, 1.0, "1", [1, 0], [1, True], [[1]], [None], {}, {"a": 1}],
        "a whole number from 1 to 9, or a list of these",
    ),
    "number": (
        lambda fields: fields.number("a", 0.5, 1e6),
        [0.5, 1, 10**6],
        [ABSENT, None, 0, 0.4, 10**99, True, "1", [1.0], {}, float("nan"), float("inf")],
        r"a number from 0\.5 to 1e\+06",
    ),
    "flag": (
        lambda fields: fields.flag("a", default=False),
        [ABSENT, None, True, False],
        [0, 1, "true", 0.0, [], {}],
        "true or false",
    ),
    "text": (
        lambda fields: fields.text("a"),
        ["silu", "\u00e9", "x" * 200],
        [ABSENT, None, "", "x" * 201, "a\nb", "\x1b[0m", 1, True, ["a"], {}],
        "a text of 1 to 200 printable characters",
    ),
    "texts": (
        lambda fields: fields.texts("a"),
        [ABSENT, None, [], ["a", "b"]],
        ["a", 1, True, {}, [1], [None], ["a", ""]],
        "a list of texts of 1 to 200 printable characters",
    ),
    "section": (
        lambda fields: fields.section("a"),
        [ABSENT, None, {}, {"b": 1}],
        [[], [1], "a", 1, False],
        "an object",
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_fields_of_each_kind(kind: str) -> None:
    read, good, bad, valid = READERS[kind]
    for value in good:
        read(Fields(FILE, {} if value is ABSENT else {"a": value}))
    for value in bad:
        found = f"{FILE} lacks p.a, which" if value is ABSENT else rf"{FILE}: p\.a (is|has) .*; it"
        with pytest.raises(ConfigError, match=f"^{found} must be {valid}$"):
            read(Fields(FILE, {} if value is ABSENT else {"a": value}, "p."))


def test_values_are_returned_as_their_kind() -> None:
    fields = Fields(FILE, {"one": 1, "list": [1, 2], "flag": True, "null": None, "in": {"a": 3}})
    assert fields.integer("one", 0, 9) == 1
    assert isinstance(fields.number("one", 0, 9), float)
    assert fields.integers("one", 0, 9) == (1,)
    assert fields.integers("list", 0, 9) == (1, 2)
    assert fields.integers("null", 0, 9) == ()
    assert fields.flag("flag", default=False) is True
    assert fields.integer("null", 1, 2, default=5) == 5
    assert fields.text("missing", default="") == ""
    assert fields.section("in").integer("a", 0, 9) == 3
    assert fields.flag("null", default=True) is False
    assert fields.with_defaults({"null": True}).flag("null", default=True) is False
    assert fields.with_defaults({}).flag("null", default=True) is False
    assert fields.flag("missing", default=True) is True
    assert "null" not in fields
    assert list(fields) == ["one", "list", "flag", "in"]
    assert fields.with_defaults({"one": 7, "null": 8}).values == {
        "one": 1, "list": [1, 2], "flag": True, "null": 8, "in": {"a": 3},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x", '"x"'),
        ("a\nb\x1b\ud800", r'"a\\nb\\u001b\\ud800"'),
        ("x" * 300, '"x{56}\\.\\.\\.'),
        (10**99, "10{56}\\.\\.\\."),
        (True, "true"),
        (None, "null"),
        (float("nan"), "NaN"),
        ([1] * 1000, "a list"),
        ({"a": 1}, "an object"),
    ],
)
def test_a_message_shows_any_value_in_one_short_line(value: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"^{FILE}: a is {shown}; it must be"):
        Fields(FILE, {"a": value}).integer("a", 0, 1)


# --- code of others ------------------------------------------------------------------------------


def test_an_exception_of_others_becomes_a_config_error() -> None:
    for error, cause in [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (KeyError("spiral"), "KeyError: 'spiral'"),
        (AssertionError(), "AssertionError"),
        (RuntimeError("a\n  b\x1b"), r"RuntimeError: a b\x1b"),
        (RecursionError("x" * 1000), "RecursionError: " + "x" * 297 + "..."),
    ]:
        with pytest.raises(ConfigError) as caught, as_config_error("tiny cannot run"):
            raise error
        assert str(caught.value) == f"tiny cannot run: {cause}"
        assert caught.value.__cause__ is error
        assert one_line(error) == cause


def test_own_exceptions_and_interrupts_pass_unchanged() -> None:
    for error in (ConfigError("a field"), InvariantError("a bug"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, as_config_error("tiny cannot run"):
            raise error
        assert caught.value is error
