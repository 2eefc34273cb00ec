"""Tokenizers, chat templates, incremental detokenisation and stop strings."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoints import SPECIAL_TOKENS, VOCAB_SIZE, tiny_llama
from tokenizers import decoders
from tokenizers.models import WordLevel

from aquifer.engine.outputs import (
    CompletionOutput,
    FinishReason,
    RequestTiming,
    TokenLogprobs,
    TokenOutput,
)
from aquifer.engine.params import BeamSearchParams, Request, SamplingParams
from aquifer.errors import ConfigError, EngineError, RequestError
from aquifer.text import Delta, Detokenizer, OutputBuilder, StopStrings, Tokenizer

CONVERSATION = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes and a few pairs: every character but ASCII takes several tokens."""
    loaded = Tokenizer.load(tiny_llama(tmp_path_factory.mktemp("text") / "model"))
    assert loaded is not None
    return loaded


# --- pieces of output ----------------------------------------------------------------------

texts = st.text(st.sampled_from("aet no.é漢字😀👩\u200d🚀\n\u0301ﬁ"), max_size=12)


def pieces_of(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=True)
    return [detokenizer.push(token_id) for token_id in output]


@settings(deadline=None)
@given(prompt=texts, output=texts)
def test_pieces_are_whole_characters_and_add_up(
    tokenizer: Tokenizer, prompt: str, output: str
) -> None:
    pieces = pieces_of(tokenizer, tokenizer.encode(prompt), tokenizer.encode(output))
    assert "".join(pieces) == output
    assert "\ufffd" not in "".join(pieces)


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8),
    output=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20),
)
def test_any_tokens_come_out_as_they_decode(
    tokenizer: Tokenizer, prompt: list[int], output: list[int]
) -> None:
    """Prompts may end within a character, and models may emit bytes that are none."""
    pieces = pieces_of(tokenizer, prompt, output)
    whole = tokenizer.decode(output)
    assert whole.startswith("".join(pieces))
    if tokenizer.decode(prompt).endswith("\ufffd"):
        return  # the output's beginning may complete the prompt's last character
    if not whole.endswith("\ufffd"):
        assert "".join(pieces) == whole


def test_an_emoji_waits_for_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    assert len(ids) == 4
    assert pieces_of(tokenizer, [], [*ids, *tokenizer.encode("!")]) == ["", "", "", "😀", "!"]


def test_special_tokens_are_left_out_or_not(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("n"), SPECIAL_TOKENS.index("<|end|>")]
    assert pieces_of(tokenizer, [], ids) == ["n", ""]
    shown = Detokenizer(tokenizer, [], skip_special_tokens=False)
    assert [shown.push(token_id) for token_id in ids] == ["n", "<|end|>"]


broken = st.lists(
    st.tuples(
        st.lists(st.sampled_from("éa ½😀"), max_size=2).map("".join),
        st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0xE2, 0xC3, 0x80, 0xFF]), min_size=1),
        st.integers(1, 40),
    ),
    max_size=4,
)


@settings(deadline=None)
@given(parts=broken, skip=st.booleans(), random=st.randoms(use_true_random=False))
def test_many_tokens_without_a_character_come_out_as_they_decode(
    tokenizer: Tokenizer, parts: Any, skip: bool, random: Random
) -> None:
    """Text that waits is at most one character, or of a bounded number of tokens."""
    byte_ids = byte_tokens(tokenizer)
    output = tokenizer.encode("n")
    for text, values, times in parts:
        output += [*tokenizer.encode(text), *[byte_ids[value] for value in values * times]]
        output += [SPECIAL_TOKENS.index("<|end|>"), VOCAB_SIZE + 7] * random.randrange(30)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("a"), skip_special_tokens=skip)
    shown = ""
    for position, token_id in enumerate(output, 1):
        shown += detokenizer.push(token_id)
        whole = tokenizer.decode(output[:position], skip)
        assert whole.startswith(shown)
        assert len(whole) - len(shown) <= 16
    shown += detokenizer.push(tokenizer.encode("n")[0])
    assert shown == whole + "n"


def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """The token of each byte, by the byte."""
    characters = {}  # as byte-level tokenizers write bytes
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    for number, byte in enumerate(sorted(set(range(256)) - set(printable))):
        characters[byte] = chr(256 + number)
    characters |= {byte: chr(byte) for byte in printable}
    vocab = tokenizer.backend.get_vocab()
    return {byte: vocab[character] for byte, character in characters.items()}


def test_the_tokens_that_a_step_decodes_are_bounded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that held all tokens since the last text would take quadratic time."""
    held: list[int] = []

    class Stream:
        def __init__(self, ids: Sequence[int], skip_special_tokens: bool) -> None:
            self._stream = decoders.DecodeStream(ids, skip_special_tokens)
            held[:] = ids

        def step(self, backend: tokenizers.Tokenizer, token_id: int) -> str | None:
            held.append(token_id)
            text = self._stream.step(backend, token_id)
            assert text is None
            assert len(held) <= 32
            return text

    monkeypatch.setattr("aquifer.text.output.DecodeStream", Stream)
    for token_id in (SPECIAL_TOKENS.index("<|end|>"), VOCAB_SIZE + 7, byte_tokens(tokenizer)[0x98]):
        pieces_of(tokenizer, [6], [token_id] * 100)


def word_tokenizer(words: Sequence[str], decoder: Any) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(WordLevel(vocab, unk_token=words[0]))
    backend.decoder = decoder
    return Tokenizer(backend, None, {})


def test_the_prompt_decides_on_the_leading_space() -> None:
    """SentencePiece drops the first space of a text, but an output is not the start of a text."""
    words = ["▁hello", "▁world", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "!"]
    decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = word_tokenizer(words, decoder)
    assert pieces_of(tokenizer, [], [0, 1]) == ["hello", " world"]
    assert pieces_of(tokenizer, [0], [1, 2, 3, 4, 5, 6]) == [" world", "", "", "", "😀", "!"]


def test_many_byte_tokens_that_are_no_character() -> None:
    """Decoders with byte fallback have a U+FFFD for each byte, and a space before a word."""
    words = ["▁hello", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "!"]
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = word_tokenizer(words, decoder)
    for num_broken in range(40):
        output = [0, *[4] * num_broken, 1, 2, 3, 0, 5]
        assert "".join(pieces_of(tokenizer, [0], output)) == tokenizer.decode(output)


def test_a_decoder_that_changes_its_mind_loses_no_token() -> None:
    """WordPiece's decoder makes "it 's" into "it's" once the s is there."""
    tokenizer = word_tokenizer(["it", "'", "s", "me"], decoders.WordPiece())
    pieces = pieces_of(tokenizer, [], [0, 1, 2, 3])
    assert "".join(pieces).replace(" ", "") == "it'sme"


@given(text=texts)
def test_the_bytes_of_tokens_are_those_of_their_text(tokenizer: Tokenizer, text: str) -> None:
    parts = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)]
    assert b"".join(parts) == text.encode()


def test_bytes_of_other_tokens(tokenizer: Tokenizer) -> None:
    for byte, token_id in byte_tokens(tokenizer).items():
        assert tokenizer.token_bytes(token_id) == bytes([byte])
    assert tokenizer.token_bytes(SPECIAL_TOKENS.index("<|end|>")) == b"<|end|>"
    assert tokenizer.token_bytes(VOCAB_SIZE + 7) == b""
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    words = word_tokenizer(["<0xF0>", "é", "\ufffd"], decoder)
    assert [words.token_bytes(i) for i in range(3)] == [b"\xf0", "é".encode(), b"\xef\xbf\xbd"]


# --- stop strings --------------------------------------------------------------------------


def push_all(stop: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    """(text shown, stop string found) after each piece; checks what is held back on the way."""
    strings = StopStrings(stop)
    shown = arrived = ""
    for piece in pieces:
        text, found = strings.push(piece)
        shown, arrived = shown + text, arrived + piece
        if found is not None:
            assert strings.flush() == ""
            return shown, found
        assert arrived.startswith(shown)
        held = arrived[len(shown) :]
        # What is held back is exactly what could become a stop string.
        assert not held or any(s.startswith(held) for s in stop)
        assert not any(arrived.endswith(s[:n]) for s in stop for n in range(len(held) + 1, len(s)))
    return shown + strings.flush(), None


def search(stop: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    """The reference: search the whole text again after each piece."""
    text = ""
    for piece in pieces:
        text += piece
        found = [(text.find(s), -len(s), s) for s in stop if s in text]
        if found:
            return text[: min(found)[0]], min(found)[2]
    return text, None


_ab = st.text("ab", max_size=5)


@settings(deadline=None)
@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(_ab, max_size=12),
)
def test_stop_strings_are_found_wherever_they_are_cut(stop: list[str], pieces: list[str]) -> None:
    assert push_all(stop, pieces) == search(stop, pieces)


@settings(deadline=None)
@given(
    stop=st.text("ab", min_size=1, max_size=4), text=st.text("ab", max_size=30), seed=st.integers()
)
def test_one_stop_string_is_found_where_str_finds_it(stop: str, text: str, seed: int) -> None:
    random = Random(seed)
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(random.randrange(8)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    position = text.find(stop)
    expected = (text, None) if position < 0 else (text[:position], stop)
    assert push_all([stop], pieces) == expected


# --- a request's output --------------------------------------------------------------------


def builder_of(tokenizer: Tokenizer | None, **params: Any) -> OutputBuilder:
    request = Request("0", "m", [6], SamplingParams(**params), 0.0)
    return OutputBuilder(request, None, tokenizer)


def test_output_ends_at_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one. Two. x")
    builder = builder_of(tokenizer, stop=["Two", "x"], max_tokens=None)
    shown = ""
    for token_id in ids:
        shown += builder.push(TokenOutput("0", [token_id])).text
        if builder.finished:
            break
    (completion,) = builder.output.outputs
    assert shown == completion.text == "one. "
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "Two")
    assert tokenizer.decode(completion.token_ids) == "one. Two"


@settings(deadline=None)
@given(
    tokens=st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6), max_size=6),
    has_tokenizer=st.booleans(),
)
def test_tokens_of_several_steps_are_what_each_of_them_is(
    tokenizer: Tokenizer, tokens: list[list[int]], has_tokenizer: bool
) -> None:
    single, together = (builder_of(tokenizer if has_tokenizer else None, n=2) for _ in range(2))
    for position, token_ids in enumerate(tokens):
        index = position % 2
        outputs = [TokenOutput("0", [token_id], index) for token_id in token_ids]
        expected = [single.push(output).text for output in outputs]
        delta = together.push_tokens(index, token_ids)
        assert list(delta.texts) == expected
        assert (delta.text, delta.token_ids, delta.index) == ("".join(expected), token_ids, index)
        assert delta.finish_reason is None
    assert together.output == single.output
    assert together.num_generated_tokens == sum(map(len, tokens))


@pytest.mark.parametrize("params", [{"stop": "x"}, {"logprobs": 0}, {"best_of": 2}])
def test_what_needs_each_output_takes_no_tokens(
    tokenizer: Tokenizer, params: dict[str, Any]
) -> None:
    assert builder_of(tokenizer).takes_tokens
    assert not builder_of(tokenizer, **params).takes_tokens


def test_text_held_back_comes_with_the_end(tokenizer: Tokenizer) -> None:
    *first, last = tokenizer.encode("one Tw")
    builder = builder_of(tokenizer, stop="Two", max_tokens=None)
    texts = [builder.push(TokenOutput("0", [token_id])).text for token_id in first]
    assert "".join(texts) == "one "
    assert builder.push(TokenOutput("0", [last], finish_reason="length")).text == "Tw"
    assert builder.output.outputs[0].text == "one Tw"
    assert builder.output.outputs[0].finish_reason == "length"


def test_no_stop_string_before_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("xxxxxx")
    builder = builder_of(tokenizer, stop="x", min_tokens=3, max_tokens=None)
    for token_id in ids[:3]:
        builder.push(TokenOutput("0", [token_id]))
        assert not builder.finished
    builder.push(TokenOutput("0", [ids[3]]))
    assert builder.finished
    assert builder.output.outputs[0].text == "xxx"


def test_logprobs_name_their_tokens(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    builder = builder_of(tokenizer, logprobs=1)
    entry = TokenLogprobs([a, b], [-2.0, -0.5], [2, 1])
    delta = builder.push(TokenOutput("0", [a], logprobs=[entry]))
    assert delta.logprobs is not None
    assert [logprob.decoded_token for logprob in delta.logprobs[0].values()] == ["a", "b"]
    assert builder.output.outputs[0].cumulative_logprob == -2.0


def test_without_a_tokenizer_there_are_only_token_ids() -> None:
    builder = builder_of(None, logprobs=0)
    entry = TokenLogprobs([9], [-1.0], [1])
    builder.push(TokenOutput("0", [9], logprobs=[entry], finish_reason="stop"))
    (completion,) = builder.output.outputs
    assert (completion.text, completion.token_ids) == ("", [9])
    assert completion.logprobs is not None
    assert completion.logprobs[0][9].decoded_token is None


# --- several completions -------------------------------------------------------------------

_STOP = ["no", "e.", "é"]

completion_texts = st.lists(
    st.text(st.sampled_from("aet no.é漢😀"), min_size=1, max_size=10), min_size=1, max_size=5
)


def token_outputs(
    tokenizer: Tokenizer, text: str, index: int, logprob: float | None
) -> list[TokenOutput]:
    """The engine's outputs for a completion with that text, token by token."""
    outputs = [TokenOutput("0", [token_id], index) for token_id in tokenizer.encode(text)]
    if logprob is not None:
        for output in outputs:
            ids = [*output.token_ids, 7]
            output.logprobs = [TokenLogprobs(ids, [logprob, logprob - 1], [1, 2])]
    outputs[-1].finish_reason = "length"
    return outputs


def push_interleaved(
    builder: OutputBuilder, outputs: Sequence[list[TokenOutput]], random: Random
) -> list[Delta]:
    """Push outputs: each completion's in order, completions interleaved at random."""
    queues = {index: list(of_one) for index, of_one in enumerate(outputs)}
    deltas = []
    while queues:
        assert not builder.finished
        index = random.choice(sorted(queues))
        deltas.append(builder.push(queues[index].pop(0)))
        assert deltas[-1].index == index
        if deltas[-1].needs_abort or not queues[index]:
            assert deltas[-1].finish_reason is not None
            del queues[index]
    assert builder.finished
    return deltas


@settings(deadline=None, max_examples=60)
@given(texts=completion_texts, has_logprobs=st.booleans(), seed=st.integers())
def test_completions_do_not_touch_each_other(
    tokenizer: Tokenizer, texts: list[str], has_logprobs: bool, seed: int
) -> None:
    """Whatever order outputs come in, each completion is what it is alone."""
    common: dict[str, Any] = {"stop": _STOP, "max_tokens": None}
    if has_logprobs:
        common["logprobs"] = 1
    expected = []
    for index, text in enumerate(texts):
        alone = builder_of(tokenizer, **common)
        outputs = token_outputs(tokenizer, text, 0, -0.5 if has_logprobs else None)
        push_interleaved(alone, [outputs], Random(0))
        (completion,) = alone.output.outputs
        completion.index = index
        expected.append(completion)
    builder = builder_of(tokenizer, n=len(texts), **common)
    all_outputs = [
        token_outputs(tokenizer, text, index, -0.5 if has_logprobs else None)
        for index, text in enumerate(texts)
    ]
    deltas = push_interleaved(builder, all_outputs, Random(seed))
    assert builder.output.outputs == expected
    assert builder.num_generated_tokens == sum(len(c.token_ids) for c in expected)
    for completion in expected:
        of_one = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(delta.text for delta in of_one) == completion.text
        assert [i for delta in of_one for i in delta.token_ids] == completion.token_ids
        reasons = [(delta.finish_reason, delta.stop_reason) for delta in of_one]
        assert reasons[-1] == (completion.finish_reason, completion.stop_reason)
        assert set(reasons[:-1]) <= {(None, None)}


@settings(deadline=None, max_examples=60)
@given(
    logprobs=st.lists(st.sampled_from([-3.0, -2.0, -1.5, -1.0, -0.5]), min_size=1, max_size=6),
    data=st.data(),
)
def test_the_best_completions_are_chosen(
    tokenizer: Tokenizer, logprobs: list[float], data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, len(logprobs)))
    lengths = [data.draw(st.integers(1, 4)) for _ in logprobs]
    asked_for = data.draw(st.sampled_from([None, 1]))
    builder = builder_of(tokenizer, n=n, best_of=len(logprobs), max_tokens=None, logprobs=asked_for)
    outputs = [
        token_outputs(tokenizer, chr(ord("A") + index) * length, index, logprob)
        for index, (length, logprob) in enumerate(zip(lengths, logprobs, strict=True))
    ]
    push_interleaved(builder, outputs, Random(data.draw(st.integers())))
    sums = [length * logprob for length, logprob in zip(lengths, logprobs, strict=True)]
    expected = list(range(n))
    if n < len(logprobs):
        expected = sorted(range(len(sums)), key=lambda index: -sums[index])[:n]
    chosen = builder.output.outputs
    assert [completion.index for completion in chosen] == list(range(n))
    assert [completion.text for completion in chosen] == [
        chr(ord("A") + index) * lengths[index] for index in expected
    ]
    if n < len(logprobs):
        assert [completion.cumulative_logprob for completion in chosen] == [
            sums[index] for index in expected
        ]
    assert all((completion.logprobs is None) == (asked_for is None) for completion in chosen)
    assert builder.num_generated_tokens == sum(lengths)


def test_a_stop_string_counts_in_its_own_completion_only(tokenizer: Tokenizer) -> None:
    """Two halves of a stop string in different completions do not match."""
    first, second = tokenizer.encode("Xx")
    builder = builder_of(tokenizer, n=2, stop="Xx", max_tokens=None)
    assert not builder.push(TokenOutput("0", [first], 0)).needs_abort
    assert not builder.push(TokenOutput("0", [second], 1)).needs_abort
    delta = builder.push(TokenOutput("0", [second], 0))
    assert (delta.needs_abort, delta.index, delta.stop_reason) == (True, 0, "Xx")
    assert [c.finish_reason for c in builder.output.outputs] == ["stop", None]
    delta = builder.push(TokenOutput("0", [first], 1, finish_reason="length"))
    assert (delta.needs_abort, delta.text, delta.finish_reason) == (False, "X", "length")
    assert builder.finished
    assert [completion.text for completion in builder.output.outputs] == ["", "xX"]


def test_a_stop_token_needs_no_abort(tokenizer: Tokenizer) -> None:
    builder = builder_of(tokenizer, n=2, max_tokens=None)
    delta = builder.push(TokenOutput("0", [7], 1, finish_reason="stop", stop_reason=7))
    assert (delta.finish_reason, delta.stop_reason, delta.needs_abort) == ("stop", 7, False)


def test_beams_come_whole_and_in_order(tokenizer: Tokenizer) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=8).sampling_params()
    prompt = tokenizer.encode("a")
    builder = OutputBuilder(Request("0", "m", prompt, params, 0.0), None, tokenizer)
    for index, text in enumerate(["né 😀", "en 漢"]):
        ids = tokenizer.encode(text)
        reason: FinishReason = "stop" if index == 0 else "length"
        beam = TokenOutput("0", ids, index, finish_reason=reason, cumulative_logprob=-1.5 - index)
        assert builder.push(beam).text == text
    assert builder.finished
    assert builder.output.outputs == [
        CompletionOutput(0, "né 😀", tokenizer.encode("né 😀"), -1.5, None, "stop"),
        CompletionOutput(1, "en 漢", tokenizer.encode("en 漢"), -2.5, None, "length"),
    ]


def test_an_error_ends_all_completions(tokenizer: Tokenizer) -> None:
    builder = builder_of(tokenizer, n=3, max_tokens=None)
    builder.push(TokenOutput("0", [7], 1, finish_reason="length"))
    builder.push(TokenOutput("0", finish_reason="error", error="lost"))
    assert builder.finished
    reasons = [completion.finish_reason for completion in builder.output.outputs]
    assert reasons == ["error", "length", "error"]


def test_what_is_said_once_stays(tokenizer: Tokenizer) -> None:
    timing = RequestTiming(0.0, 1.0, 2.0, 3.0)
    entry = TokenLogprobs([7], [-1.0], [1])
    builder = builder_of(tokenizer, n=2, max_tokens=None)
    builder.push(TokenOutput("0", [7], 0, num_cached_tokens=16, prompt_logprobs=[None, entry]))
    builder.push(TokenOutput("0", [7], 1, finish_reason="length", timing=timing))
    builder.push(TokenOutput("0", [7], 0))
    assert builder.output.num_cached_tokens == 16
    assert builder.output.metrics == timing
    assert builder.output.prompt_logprobs is not None
    assert len(builder.output.prompt_logprobs) == 2


# --- loading -------------------------------------------------------------------------------


def test_a_checkpoint_may_have_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert Tokenizer.load(folder) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE", "vocab": '),
        ("tokenizer.json", b"\xff\xfe\x00"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": 1, "template": "a"}]}'),
        ("tokenizer_config.json", b'{"chat_template": ["a"]}'),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": {"default": "a"}}'),
        ("tokenizer_config.json", b'{"eos_token": 5}'),
        ("tokenizer_config.json", b'{"pad_token": true}'),
        ("tokenizer_config.json", b'{"unk_token": {"content": 1}}'),
        ("tokenizer_config.json", b'{"cls_token": ["a"]}'),
        ("tokenizer_config.json", b'{"cls_token": "\\ud800"}'),
        ("tokenizer_config.json", b'{"a": ' + b"1" * 5000 + b"}"),
        ("tokenizer_config.json", b'{"bos_token": {"lstrip": false}}'),
        ("chat_template.jinja", b"\xff\xff"),
    ],
)
def test_damaged_files_are_the_operators_to_mend(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(folder)
    assert str(folder / name) in str(caught.value)
    if name == "tokenizer_config.json":
        fields = re.findall(r'^{"(\w+)": ', content.decode())
        assert all(f": {field} is " in str(caught.value) for field in fields)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_to_nothing_is_not_taken_for_a_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("nowhere")
    with pytest.raises(ConfigError, match=f"cannot read .*{name}: it is no file, or a link"):
        Tokenizer.load(folder)


def edit_tokenizer(folder: Path, **changes: Any) -> Tokenizer:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


def test_a_tokenizer_of_absurd_size_is_not_read(folder: Path) -> None:
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 40)  # a sparse file
    with pytest.raises(ConfigError, match=r"tokenizer.json: it has more than 256.00 MiB"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("charsmap", ["AAAA", "AAIAAP////////////////8="])
def test_a_tokenizer_that_panics_when_it_is_read(folder: Path, charsmap: str) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer.json: PanicException: "):
        edit_tokenizer(folder, normalizer=normalizer)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}},
        {"model": {"type": "Unigram", "vocab": [], "unk_id": None, "byte_fallback": False}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="}},
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "b"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}},
    ],
)
def test_a_tokenizer_that_fails_on_a_text(folder: Path, changes: dict[str, Any]) -> None:
    """By an exception or a panic, which is no `Exception`."""
    tokenizer = edit_tokenizer(folder, **changes)
    with pytest.raises(RequestError, match="tokenizer cannot encode the text: ") as caught:
        tokenizer.encode("a" * 30 + "X")
    assert caught.value.param == "prompt"


def test_a_tokenizer_that_fails_on_tokens(folder: Path) -> None:
    pattern = {"Regex": "(a+)+$"}
    replace = {"type": "Replace", "pattern": pattern, "content": "b"}
    tokenizer = edit_tokenizer(
        folder, decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}, replace]}
    )
    (letter,), (other,) = tokenizer.encode("a"), tokenizer.encode("X")
    fatal = [letter] * 30 + [other]
    with pytest.raises(EngineError, match="tokenizer cannot decode the output: PanicException"):
        tokenizer.decode(fatal)
    with pytest.raises(EngineError, match="tokenizer cannot decode the output: PanicException"):
        tokenizer.decode(fatal * 10)
    assert tokenizer.decode([other]) == "X"
    assert pieces_of(tokenizer, [], [other, other]) == ["X", "X"]


def test_truncation_and_padding_are_for_training(folder: Path) -> None:
    """As in Transformers, a prompt is encoded whole, and as it is."""
    expected = edit_tokenizer(folder).encode("some text")
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    assert edit_tokenizer(folder, truncation=truncation).encode("some text") == expected
    assert edit_tokenizer(folder, truncation=None, padding=padding).encode("some text") == expected


def test_what_real_tokenizer_configurations_hold(folder: Path) -> None:
    """Flags whose names end as tokens' do, tokens as objects, and lengths without a limit."""
    content = {
        "add_bos_token": True,
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "image_token": {"id": 5},
        "model_max_length": int(1e30),
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ pad_token }}{{ eos_token }}"},
            {"name": "tools", "template": "no"},
        ],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode_chat([]), skip_special_tokens=False) == "<s></s>"


def test_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode") as caught:
        tokenizer.encode("\ud83d")
    assert caught.value.param == "prompt"


# --- chat templates ------------------------------------------------------------------------


def configure(folder: Path, **changes: Any) -> Tokenizer:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


def rendered(tokenizer: Tokenizer, **args: Any) -> str:
    ids = tokenizer.encode_chat(CONVERSATION, **args)
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_the_template_lays_out_the_conversation(tokenizer: Tokenizer) -> None:
    assert rendered(tokenizer) == "<|user|>hi<|end|><|assistant|>"
    assert rendered(tokenizer, add_generation_prompt=False) == "<|user|>hi<|end|>"
    assert rendered(tokenizer, chat_template="{{ bos_token }}{{ mood }}", mood="e") == "<s>e"


def test_where_templates_come_from(folder: Path) -> None:
    several = [{"name": "tool_use", "template": "n"}, {"name": "default", "template": "e"}]
    assert rendered(configure(folder, chat_template=several)) == "e"
    special = {"content": "<s>", "lstrip": False}
    configured = configure(folder, bos_token=special, chat_template="{{ bos_token }}o")
    assert rendered(configured) == "<s>o"
    (folder / "chat_template.jinja").write_text("a")
    assert rendered(configure(folder)) == "a"
    given = Tokenizer.load(folder, chat_template="t")
    assert given is not None
    assert rendered(given) == "t"


def test_without_a_template_there_is_no_chat(folder: Path) -> None:
    tokenizer = configure(folder, chat_template=None)
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.encode_chat(CONVERSATION)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for message in messages %}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[7]['content'] }}",
        "{{ messages[0].content.nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ ''.join(1) }}",
        "{{ messages[0]['content'].__class__.__mro__ }}",
    ],
)
def test_what_a_template_raises_is_about_the_request(tokenizer: Tokenizer, template: str) -> None:
    with pytest.raises(RequestError, match="chat template refused the messages") as caught:
        tokenizer.encode_chat(CONVERSATION, chat_template=template)
    assert caught.value.param == "messages"


def test_messages_that_the_template_cannot_read(tokenizer: Tokenizer) -> None:
    messages: list[Any]
    for messages in ([{"role": "user"}], [{"role": "user", "content": None}], [{"content": "x"}]):
        with pytest.raises(RequestError, match="chat template refused"):
            tokenizer.encode_chat(messages)
