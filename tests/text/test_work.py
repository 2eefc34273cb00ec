"""How much work a tokenizer may make of a text, as far as its description tells."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as BackendTokenizer

from aquifer.text.work import decodes_usually, growth, is_quick, is_usual

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CL100K = (
    r"(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    "regex",
    [
        *(_QWEN2, _CL100K, _O200K, _DEEPSEEK),
        r" ?[^(\s|[.,!?…、])]+",
        r"\s{2,}|[\n\r\t]",
        *(" {2,}", "^▁+$", "[一-龥ぁ-ゟ]+", "[]a]+b", "{a}+", ""),
    ],
)
def test_what_published_tokenizers_match_is_quick(regex: str) -> None:
    assert is_quick(regex)


@pytest.mark.parametrize(
    "regex",
    [
        *("(a+)+c", "(?:a|b)*c", "(?:a*|b)c", "(?=a*b)a+", r"(a)\1+"),  # within a group
        *("a*a*[^a]", "a{2,}a{2,}b", "a*?a*?b", "a*b*c*", "a{0,99}a{0,99}b"),
        *("a?" * 20 + "a" * 20, "(?:a|a)" * 20 + "b", "a{1,9}a{1,9}a{1,9}b"),
        *("((a*)*", "[a", "a**", r"(?>a+)", "(?x:a # b\n)(?i)", "(?=(\\d{3})+(?!\\d))"),
    ],
)
def test_what_backtracks_or_is_not_known_is_not_quick(regex: str) -> None:
    assert not is_quick(regex)


def replace(old: str | None, new: str, regex: str = "") -> dict[str, Any]:
    pattern = {"Regex": regex} if old is None else {"String": old}
    return {"type": "Replace", "pattern": pattern, "content": new}


def backend(**parts: Any) -> BackendTokenizer:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    return BackendTokenizer.from_str(json.dumps({"version": "1.0", "model": model, **parts}))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], 1),
        ([replace("▁", " ")], 1),
        ([replace("ab", "a")], 1),
        ([replace("a", "aa")] * 10, 2**10),
        ([replace("a", "bb"), replace("b", "cc"), replace("c", "dd")], 8),
        ([replace("a", "xyz"), replace("b", "xyz"), replace("c", "xyz")], 3),  # of each only one
        ([replace(None, "bb", "x"), replace("b", "cc")], 6),  # it may match where nothing is
    ],
)
def test_replacements_multiply_a_text(steps: list[dict[str, Any]], expected: float) -> None:
    tokenizer = backend(normalizer={"type": "Sequence", "normalizers": steps})
    assert growth(tokenizer.normalizer) == expected
    assert is_usual(tokenizer) == (expected <= 64)
    tokenizer = backend(decoder={"type": "Sequence", "decoders": steps})
    assert growth(tokenizer.decoder) == expected
    assert decodes_usually(tokenizer) == (expected <= 64)


def test_a_template_that_repeats_the_text() -> None:
    piece = {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 0}}
    for times in (1, 100):
        template = {
            "type": "TemplateProcessing",
            "single": [piece] * times,
            "pair": [piece, other],
            "special_tokens": {},
        }
        tokenizer = backend(post_processor=template)
        assert growth(tokenizer.post_processor) == times
        assert is_usual(tokenizer) == (times == 1)


def test_regular_expressions_are_found_in_all_parts() -> None:
    slow = replace(None, "b", "(a+)+c")
    split = {"type": "Split", "pattern": {"Regex": "(a+)+c"}, "behavior": "Isolated"}
    split["invert"] = False  # type: ignore[assignment]
    inner = {"type": "Sequence", "pretokenizers": [split]}
    assert not is_usual(backend(normalizer=slow))
    assert not is_usual(backend(pre_tokenizer={"type": "Sequence", "pretokenizers": [inner]}))
    assert not decodes_usually(backend(decoder=slow))
    assert is_usual(backend(decoder=slow))
