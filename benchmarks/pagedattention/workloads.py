"""Workloads of the replayed figures.

The paper's own lengths (ShareGPT's and Alpaca's, section 6.1) are not available. Two kinds take
their place: published lengths of similar services, unchanged, and lengths scaled to the means that
the paper gives. Only Mooncake's arrival times are used.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aquifer.sim.trace import PREFIX_BLOCK_TOKENS, TraceRequest, fit_lengths, read_trace

IntArray = npt.NDArray[np.int64]

CONTEXT_TOKENS = 2048
"""Context length of OPT and LLaMA."""

LONG_CONTEXT_TOKENS = 4096
"""Context length of Llama 2."""

SHAREGPT_MEANS = (161.31, 337.99)
ALPACA_MEANS = (19.31, 58.45)
"""Mean tokens of prompts and outputs in Fig. 11."""

SHORT_PREFIX_TOKENS = 80
LONG_PREFIX_TOKENS = 341
"""Shared prefixes of one example and of five (section 6.4)."""

BLOCK_REQUESTS = 400
"""Requests of a block, each of which is like all of its workload."""

_ORDERED = ("chatbot", "mooncake", "mooncake-slow")  # their order matters and is kept
_SEED = 0
_NUM_MADE = 4000  # requests of a generated workload
_OUTPUT_LOG_SIGMA = 0.86  # that of the outputs in Azure's conversation trace
_SLOWER = 4.0
_CHAT_TOKENS = 1024  # maximum of a prompt, and of an output (section 6.5)
_CHAT_SESSIONS = 64  # concurrent sessions
_CHAT_ROUNDS = 5  # mean rounds of a session


def load(name: str, data: Path) -> list[TraceRequest]:
    """Load a workload by its name; see `WORKLOADS`.

    Unless their order matters, the requests come in blocks of about `BLOCK_REQUESTS`, each like all
    of the workload (`representative_blocks`), and within a block in a random order.

    Raises:
        ConfigError: a file of `data` is missing or unreadable.
    """
    requests = WORKLOADS[name](data)
    if name in _ORDERED:
        return requests
    random = np.random.default_rng(_SEED)
    blocks = representative_blocks(requests, round(len(requests) / BLOCK_REQUESTS))
    return [requests[index] for block in blocks for index in random.permutation(block).tolist()]


def representative_blocks(requests: list[TraceRequest], num_blocks: int) -> list[IntArray]:
    """Divide requests into blocks of equal sizes with nearly equal lengths on average.

    Lengths have long tails: the means of a few hundred requests in a random order are often 5 % off
    those of all, and so would be every throughput. Here requests are dealt out in the order of how
    much memory they take and for how long: their tokens in the cache, summed over all steps.

    Returns: the indices of each block's requests.
    """
    prompts = np.array([request.prompt_tokens for request in requests])
    outputs = np.array([request.output_tokens for request in requests])
    order = np.argsort(outputs * (prompts + outputs / 2), kind="stable")
    # There and back, so that no block always gets the longer of its neighbours.
    turns, places = np.divmod(np.arange(len(requests)), num_blocks)
    places = np.where(turns % 2, num_blocks - 1 - places, places)
    return [order[places == block] for block in range(num_blocks)]


def _azure(data: Path, max_tokens: int) -> list[TraceRequest]:
    requests = read_trace(data / "azure_llm_2023_conv.csv.gz")
    return fit_lengths(requests, max_tokens, cut=False)[0]


def _alpaca_eval(data: Path) -> list[TraceRequest]:
    # The model that also wrote Alpaca's own answers.
    return read_trace(data / "alpaca_eval_lengths.json.gz", outputs_of="text_davinci_003")


def _alpaca(data: Path) -> list[TraceRequest]:
    return fit_lengths(_alpaca_eval(data), CONTEXT_TOKENS, cut=False)[0]


def _alpaca_like(data: Path) -> list[TraceRequest]:
    requests = _alpaca_eval(data)
    prompts = np.array([request.prompt_tokens for request in requests])
    outputs = np.array([request.output_tokens for request in requests])
    return _with_means(prompts, outputs, ALPACA_MEANS)


@cache
def _sharegpt_like(data: Path) -> list[TraceRequest]:
    """Prompt lengths of ShareGPT's first turns, log-normal outputs, both scaled to the means."""
    with gzip.open(data / "sharegpt_prompt_tokens.json.gz", "rt", encoding="utf-8") as file:
        known = np.array(json.load(file)["prompt_tokens"])
    random = np.random.default_rng(_SEED)
    prompts = random.choice(known, _NUM_MADE)
    outputs = random.lognormal(0.0, _OUTPUT_LOG_SIGMA, _NUM_MADE)
    return _with_means(prompts, outputs, SHAREGPT_MEANS)


def _with_means(
    prompts: npt.NDArray[np.generic], outputs: npt.NDArray[np.generic], means: tuple[float, float]
) -> list[TraceRequest]:
    """Scale lengths until those that fit the context have the given means.

    Args:
        prompts: [requests], in any unit.
        outputs: [requests], in any unit.
        means: mean tokens of prompts and of outputs.
    """
    shapes = np.stack((prompts, outputs)).astype(np.float64)
    scales = np.array(means) / shapes.mean(1)
    for _ in range(50):
        lengths = np.maximum(np.rint(shapes * scales[:, None]), 1)
        lengths = lengths[:, lengths.sum(0) <= CONTEXT_TOKENS]
        scales *= np.array(means) / lengths.mean(1)
    return [TraceRequest(None, int(prompt), int(output)) for prompt, output in lengths.T]


def _translation(data: Path, num_prefix: int) -> list[TraceRequest]:
    """Lengths of GSM8K's questions for sentences and their translations, after one prefix."""
    sentences = [request.prompt_tokens for request in read_trace(data / "gsm8k_lengths.jsonl.gz")]
    return [
        TraceRequest(None, num_prefix + count, count, prefix_ids=(0,), prefix_tokens=num_prefix)
        for count in sentences
    ]


def _chatbot(data: Path) -> list[TraceRequest]:
    """Rounds of chat sessions: a prompt is the session's text so far, its last 1024 tokens.

    Each request continues a random one of 64 sessions; a new session replaces one that ends. As
    long as nothing is cut, a prompt begins with the one before it. Answers count as new text,
    because a replay makes up other tokens for them.
    """
    turns = _turns(_sharegpt_like(data))
    random = np.random.default_rng(_SEED)
    said = [0] * _CHAT_SESSIONS  # tokens of each session so far
    session_ids = list(range(_CHAT_SESSIONS))
    num_sessions = _CHAT_SESSIONS
    requests = []
    for _ in range(_NUM_MADE):
        place = int(random.integers(_CHAT_SESSIONS))
        question, answer = next(turns)
        num_prompt = said[place] + question
        first_id = session_ids[place] * (_CHAT_TOKENS // PREFIX_BLOCK_TOKENS)
        request = TraceRequest(None, min(num_prompt, _CHAT_TOKENS), min(answer, _CHAT_TOKENS))
        if num_prompt <= _CHAT_TOKENS:
            blocks = range(first_id, first_id + -(-num_prompt // PREFIX_BLOCK_TOKENS))
            request = replace(request, prefix_ids=tuple(blocks))
        requests.append(request)
        said[place] = num_prompt + request.output_tokens
        if random.random() < 1 / _CHAT_ROUNDS:
            said[place], session_ids[place] = 0, num_sessions
            num_sessions += 1
    return requests


def _turns(requests: list[TraceRequest]) -> Iterator[tuple[int, int]]:
    """Yield lengths of questions and answers, without end."""
    while True:
        for request in requests:
            yield request.prompt_tokens, request.output_tokens


def _mooncake(data: Path) -> list[TraceRequest]:
    # 131072 is the context length of Llama 3.1.
    return fit_lengths(read_trace(data / "mooncake_synthetic.jsonl.gz"), 131072, cut=False)[0]


def _mooncake_slow(data: Path) -> list[TraceRequest]:
    return [
        replace(request, arrival_s=_SLOWER * (request.arrival_s or 0.0))
        for request in _mooncake(data)
    ]


WORKLOADS: dict[str, Callable[[Path], list[TraceRequest]]] = {
    "conversation": lambda data: _azure(data, CONTEXT_TOKENS),
    "conversation-4096": lambda data: _azure(data, LONG_CONTEXT_TOKENS),
    "sharegpt-like": _sharegpt_like,
    "alpaca": _alpaca,
    "alpaca-like": _alpaca_like,
    "translation-80": lambda data: _translation(data, SHORT_PREFIX_TOKENS),
    "translation-341": lambda data: _translation(data, LONG_PREFIX_TOKENS),
    "chatbot": _chatbot,
    "mooncake": _mooncake,
    "mooncake-slow": _mooncake_slow,
}
"""Workloads by name:

- conversation: Azure's conversation trace of 2023, requests of at most 2048 tokens;
- conversation-4096: the same trace, at most 4096;
- sharegpt-like: first turns of ShareGPT and log-normal outputs, scaled to Fig. 11's means;
- alpaca: AlpacaEval's instructions, with the outputs of text-davinci-003;
- alpaca-like: the same, scaled to Fig. 11's means;
- translation-80, translation-341: GSM8K's questions after a common prefix;
- chatbot: sessions of sharegpt-like turns;
- mooncake: Mooncake's synthetic trace, with its arrivals;
- mooncake-slow: the same in four times the time, which a single H200 can sustain.
"""
