"""Requests of ODMA's benchmark, and predictors that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aquifer.predict.forecaster import Asked
from aquifer.predict.lengths import NUM_BINS, Forecast
from aquifer.sim.results import RequestRecord
from aquifer.sim.trace import TraceRequest, fit_lengths, poisson_arrivals, read_trace

CONVERSATIONS = "azure_llm_2023_conv.csv.gz"
CODE = "azure_llm_2023_code.csv.gz"
GSM8K = "gsm8k_lengths.jsonl.gz"
ALPACA = "alpaca_eval_lengths.json.gz"

FloatArray = npt.NDArray[np.float64]

_ALPACA_MODEL = "Qwen1.5-7B-Chat"

WRONG = ("random", "always short", "always long")


@dataclass(frozen=True, slots=True)
class WrongPredictor:
    """Says anything, or always the same.

    Args:
        says: one of `WRONG`.
    """

    says: str

    def predict(self, asked: Sequence[Asked]) -> list[Forecast]:
        """A sure forecast of each request."""
        forecasts = []
        for each in asked:
            masses = np.zeros(NUM_BINS)
            random = np.random.default_rng(each.template)
            chosen = {"always short": 1, "always long": NUM_BINS - 2}
            masses[chosen.get(self.says, int(random.integers(NUM_BINS)))] = 1.0
            forecasts.append(Forecast(masses))
        return forecasts


def recorded(file: Path, max_tokens: int, num_requests: int | None = None) -> list[TraceRequest]:
    """The first requests of a trace that fit a context, at their own times."""
    fitting, _ = fit_lengths(read_trace(file), max_tokens, cut=False)
    return fitting[:num_requests]


def saturated(
    file: Path, max_tokens: int, num_requests: int, outputs_of: str | None = None
) -> list[TraceRequest]:
    """As many requests, all at the start: how many run at once is up to the memory alone."""
    fitting, _ = fit_lengths(read_trace(file, outputs_of=outputs_of), max_tokens, cut=False)
    return poisson_arrivals(fitting, 1e6, num_requests, seed=0)


def saturated_sources(
    data: Path, max_tokens: int, num_requests: int
) -> dict[str, list[TraceRequest]]:
    """The same of each source of lengths, by its name."""
    return {
        "Alpaca": saturated(data / ALPACA, max_tokens, num_requests, _ALPACA_MODEL),
        "GSM8K": saturated(data / GSM8K, max_tokens, num_requests),
        "conversations": saturated(data / CONVERSATIONS, max_tokens, num_requests),
    }


def shifting(data: Path, max_tokens: int, num_each: int, rate: float) -> list[TraceRequest]:
    """Conversations, then code, then conversations: outputs become ten times shorter at once, and
    as long as before again."""
    parts = [
        fit_lengths(read_trace(data / name), max_tokens, cut=False)[0][:num_each]
        for name in (CONVERSATIONS, CODE)
    ]
    later = fit_lengths(read_trace(data / CONVERSATIONS), max_tokens, cut=False)[0]
    mixed = [*parts[0], *parts[1], *later[num_each : 2 * num_each]]
    return poisson_arrivals(mixed, rate, len(mixed), seed=0)


def most_tokens(records: Sequence[RequestRecord], num_points: int = 4000) -> float:
    """Most tokens with KV at once, of requests that ran without waiting for memory."""
    return float(tokens_in_use(records, num_points).max())


def tokens_in_use(records: Sequence[RequestRecord], num_points: int = 4000) -> FloatArray:
    """Tokens with KV at equal distances of time, of requests that ran without waiting for memory.

    Returns: [num_points].
    """
    begins, ends, prompts, outputs = np.array(
        [
            (record.scheduled_s, record.finished_s, record.prompt_tokens, record.output_tokens)
            for record in records
            if record.finished_s is not None
        ],
        np.float64,
    ).T
    in_use = np.zeros(num_points)
    for index, time_s in enumerate(np.linspace(0, ends.max(), num_points)):
        runs = (begins <= time_s) & (time_s < ends)
        done = (time_s - begins[runs]) / (ends[runs] - begins[runs])
        in_use[index] = (prompts[runs] + outputs[runs] * done).sum()
    return in_use


def num_good(records: Sequence[RequestRecord], ttft_s: float, tpot_s: float) -> int:
    """Requests within both bounds: until the first token, and by each token after that."""
    good = 0
    for record in records:
        if record.first_token_s is None or record.finished_s is None:
            continue
        after_s = record.finished_s - record.first_token_s
        good += record.first_token_s - record.arrival_s <= ttft_s and after_s <= tpot_s * max(
            record.output_tokens - 1, 1
        )
    return good
