"""A request on its way to another process, and what is refused of it there."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aquifer.engine.checks import check_token_ids
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import RequestError

VOCAB = 1000
PARAMS = SamplingParams(temperature=0.5, seed=3, logit_bias={7: 1.0})


def request(prompt: Any) -> Request:
    return Request("id", "model", prompt, PARAMS, 1.5, "salt", "client", 60.0)


def sent(original: Request) -> Request:
    """The request as another process gets it, and hands it on."""
    there: Request = original
    for _ in range(2):
        there = pickle.loads(pickle.dumps(there))
    return there


@pytest.mark.parametrize("prompt", [[5], list(range(VOCAB)), [0, VOCAB - 1] * 50])
def test_token_ids_arrive_as_an_array(prompt: list[int]) -> None:
    original = request(prompt)
    there = sent(original)
    assert isinstance(there.prompt_token_ids, array)
    assert list(there.prompt_token_ids) == prompt
    assert replace(there, prompt_token_ids=prompt) == original
    for each in (original, there):
        ids = check_token_ids(each, VOCAB)
        assert ids.dtype == np.int32
        assert ids.tolist() == prompt
    assert original.prompt_token_ids is prompt


def test_they_take_four_bytes_each() -> None:
    sizes = [len(pickle.dumps(request([VOCAB - 1] * count))) for count in (1000, 2000)]
    assert sizes[1] - sizes[0] == 4 * 1000


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "the prompt is empty"),
        ([1, VOCAB], "token id 1000 is outside"),
        ([1, 2**31], "token id 2147483648 is outside"),
        ([1, 2**32 - 1], "token id 4294967295 is outside"),
        ([1, 2**32], "token id 4294967296 is outside"),
        ([1, -1], "token id -1 is outside"),
        ([1, "a"], "must be whole numbers"),
        ([1, 1.5], "must be whole numbers"),
        (["1"], "must be whole numbers"),
    ],
)
def test_what_is_no_prompt_is_refused_on_both_sides(prompt: Sequence[Any], words: str) -> None:
    for each in (request(prompt), sent(request(prompt))):
        with pytest.raises(RequestError, match=words):
            check_token_ids(each, VOCAB)
