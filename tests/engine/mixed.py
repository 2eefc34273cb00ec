"""Requests of all decoding methods, and what came of them."""

from __future__ import annotations

from random import Random
from typing import Any

from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request, SamplingParams

Results = dict[tuple[str, int], tuple[list[int], Any, Any]]
"""(request, completion) -> its tokens, its ending, and the reported candidates."""


def requests(count: int = 21, max_tokens: int = 40) -> list[Request]:
    """Prompts that begin alike, of all decoding methods in turn.

    Args:
        count: how many; 7 for one of each method.
        max_tokens: tokens of each output.
    """
    random = Random(3)
    beginning = [random.randrange(40) for _ in range(30)]
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5, "n": 3},
        {"n": 2, "best_of": 3, "use_beam_search": True},
        {"temperature": 0, "logprobs": 2, "min_tokens": 6, "stop_token_ids": [1, 2, 3, 4, 5, 6]},
        {"temperature": 0.8, "seed": 7, "frequency_penalty": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0, "prompt_logprobs": 1, "logit_bias": {3: 2.0, 9: -4.0}},
        {"temperature": 1.0, "seed": 2, "top_k": 5, "top_p": 0.9},
    ]
    return [
        Request(
            str(number),
            "m",
            [*beginning[: random.choice((0, 17, 30))], *(random.randrange(40) for _ in range(9))],
            SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, **options[number % len(options)]
            ),
            0.0,
        )
        for number in range(count)
    ]


def note(results: Results, output: TokenOutput) -> None:
    tokens, _, logprobs = results.get((output.request_id, output.index), ([], None, []))
    tokens += output.token_ids
    logprobs += [entry.token_ids for entry in output.logprobs or ()]
    results[output.request_id, output.index] = (tokens, output.finish_reason, logprobs)
