"""Unusual tokenizers, which encode in a worker process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import tiny_llama

from aquifer.config import ModelSpec
from aquifer.engine.reports import ModelInfo
from aquifer.errors import ConfigError, ContextLengthError, LimitError
from aquifer.serve.encoders import encode_here, encoder_of
from aquifer.serve.models import TextModel
from aquifer.serve.service import ServedModel, encode
from aquifer.text import Tokenizer

_DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_CUBIC = {**_SPLIT, "pattern": {"Regex": "a*a*[^a]"}}


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "odd")


def test_a_usual_tokenizer_needs_no_worker(folder: Path) -> None:
    assert encoder_of(load(folder)) is None
    assert encoder_of(None) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre_tokenizer": _CUBIC}, r"encoding takes longer than 0\.5 s; send less at a time"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [_DOUBLING] * 40}},
            "encoding takes (too much memory|longer than)",
        ),
    ],
)
def test_a_text_may_take_so_much_time_and_memory(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    """In the web process the first takes minutes, and the other ends it."""
    expected = load(folder).encode("b")
    edit(folder, **changes)
    encoder = encoder_of(load(folder), max_s=0.5)
    assert encoder is not None

    async def run() -> None:
        with pytest.raises(LimitError, match=words) as caught:
            await encoder.run("encoding", "prompt", encode_here, "a" * 4000, True, 4096)
        assert caught.value.param == "prompt"
        assert await encoder.run("encoding", "prompt", encode_here, "b", True, 10) == expected

    try:
        asyncio.run(run())
    finally:
        encoder.close()


def test_a_model_with_an_unusual_tokenizer_encodes_in_its_worker(folder: Path) -> None:
    usual = load(folder)
    edit(folder, pre_tokenizer=_CUBIC)
    info = ModelInfo("odd", "", "Fake", "float32", 10, 320, 0, 0, 1)
    model = ServedModel(TextModel.load(ModelSpec("odd", folder)), info)

    def must_not_be_called(*_: Any, **__: Any) -> list[int]:
        raise AssertionError

    async def run() -> None:
        assert await encode(model, "bcd") == load(folder).encode("bcd")
        tokenizer = model.text.need_tokenizer()
        tokenizer.encode = must_not_be_called  # type: ignore[method-assign]
        assert len(await encode(model, "bcd")) == len(usual.encode("bcd"))
        with pytest.raises(ContextLengthError):
            await encode(model, "b" * 100_000)

    try:
        asyncio.run(run())
    finally:
        model.close()


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Replace", "pattern": {"Regex": "a*a*[^a]"}, "content": "b"},
        {"type": "Sequence", "decoders": [_DOUBLING] * 40},
    ],
)
def test_a_decoder_that_could_stop_the_server_is_refused(
    folder: Path, decoder: dict[str, Any]
) -> None:
    edit(folder, decoder=decoder)
    with pytest.raises(ConfigError, match=r"the decoder of its tokenizer\.json .* convert"):
        TextModel.load(ModelSpec("odd", folder))
