"""Part `accuracy`: how well lengths are predicted, by the paper's measure and by others.

The measure of S3 and ODMA is the share of requests that fit into the memory that their predicted
bucket gives them; neither paper says more. It is 100 % for whoever gives everyone the most, so what
it hides stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.odma.workloads import ALPACA, CODE, CONVERSATIONS, GSM8K
from rich.progress import track

from aquifer.cache.buckets import BucketBounds, Granularity, Routing
from aquifer.config import BUNDLED_MODELS
from aquifer.predict.calibration import Calibration
from aquifer.predict.data import Example, read_examples
from aquifer.predict.lengths import Forecast
from aquifer.predict.model import PredictorConfig
from aquifer.predict.prior import RecentLengths
from aquifer.predict.train import Sample, predictions, report, samples_of, split_of, train
from aquifer.text import Tokenizer

PAPER = {"Alpaca": (0.9860, 0.9955), "Google-NQ": (0.8268, 0.9336)}
"""Accuracy of S3's predictor, and of ODMA (section 5.1)."""

MODELS = (
    "Qwen1.5-7B-Chat",
    "gpt4_1106_preview",
    "gpt4_0314",
    "gpt-3.5-turbo-0301",
    "Conifer-7B-DPO",
    "Qwen1.5-1.8B-Chat",
)
"""Of AlpacaEval's: of several makers and sizes, with long and with short outputs."""

_LONGEST = 4096  # tokens of an output
_S3_BUCKETS = 10
_EPOCHS = 12


def accuracy(data: Path, limit: int) -> dict[str, Any]:
    """Train and test on each source.

    Args:
        data: folder of the traces.
        limit: the most examples of a source.
    """
    tokenizer = Tokenizer.load(BUNDLED_MODELS["demo"])
    assert tokenizer is not None
    sources = {
        "Alpaca, six models": read_examples(data / ALPACA, MODELS),
        "Alpaca, one model": read_examples(data / ALPACA, MODELS[:1]),
        "GSM8K": read_examples(data / GSM8K),
        "conversations": read_examples(data / CONVERSATIONS),
        "code": read_examples(data / CODE),
    }
    rows = []
    for name, examples in track(list(sources.items()), "accuracy"):
        chosen = _spread(examples, limit)
        has_prompts = chosen[0].has_prompt
        samples = samples_of(chosen, tokenizer.encode if has_prompts else None)
        split = split_of(chosen, samples)
        config = PredictorConfig("compact", "", reads_prompts=has_prompts)
        predictor = train(split, config, epochs=_EPOCHS)
        forecasts = {
            "predictor alone": predictions(predictor, split.test),
            "predictor, calibrated online": _online(split.train, split.test, predictor.predict),
            "recent lengths alone": _online(split.train, split.test, None),
        }
        lengths = [sample.output_tokens for sample in split.test]
        for way, found in forecasts.items():
            rows.append(
                {"source": name, "way": way, "has_prompts": has_prompts} | report(found, lengths)
            )
        for way, bounds, routing, which in (
            ("S3", _static(), Routing(1.0, 0.0, None), "predictor alone"),
            ("ODMA", BucketBounds(_sizes()), Routing(), "predictor, calibrated online"),
            ("ODMA, recent lengths", BucketBounds(_sizes()), Routing(), "recent lengths alone"),
        ):
            rows.append(
                {"source": name, "way": way}
                | _bucketed(bounds, routing, forecasts[which], split.train, lengths)
            )
    return {"paper": PAPER, "models": MODELS, "longest_tokens": _LONGEST, "rows": rows}


def _spread(examples: Sequence[Example], limit: int) -> list[Example]:
    """At most `limit` examples, evenly from all; with their order."""
    numbers = np.unique(np.linspace(0, len(examples) - 1, min(limit, len(examples))).astype(int))
    return [examples[number] for number in numbers.tolist()]


def _sizes() -> Granularity:
    return Granularity(16, 128, _LONGEST)


def _static() -> BucketBounds:
    return BucketBounds(_sizes(), _S3_BUCKETS, widths="equal", is_static=True)


def _online(before: Sequence[Sample], samples: Sequence[Sample], predict: Any) -> list[Forecast]:
    """Forecasts as a server makes them: each output is learned from before the next one."""
    recent, calibration = RecentLengths(), Calibration()
    for sample in before:
        recent.observe(sample.asked.classes, sample.output_tokens)
    found = []
    for sample in samples:
        prior = recent.forecast(sample.asked.classes)
        assert prior is not None, "the training part has lengths"
        forecast = prior
        if predict is not None:
            (predicted,) = predict([sample.asked])
            forecast = calibration.combine(predicted, prior)
            calibration.observe(predicted, prior, sample.output_tokens)
        found.append(forecast)
        recent.observe(sample.asked.classes, sample.output_tokens)
    return found


def _bucketed(
    bounds: BucketBounds,
    routing: Routing,
    forecasts: Sequence[Forecast],
    before: Sequence[Sample],
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Buckets that outputs get, and whether they fit."""
    for sample in before:
        bounds.observe(sample.output_tokens)
    fits, is_right, given, is_large = [], [], [], []
    for forecast, length in zip(forecasts, lengths, strict=True):
        total = routing.total(0, forecast, _LONGEST)
        bucket = bounds.of(total) or _LONGEST
        right = bounds.of(min(length, _LONGEST)) or _LONGEST
        fits.append(length <= bucket)
        is_right.append(bucket == right)
        given.append(bucket)
        is_large.append(bucket == _LONGEST)
        bounds.observe(length)
    return {
        "accuracy": float(np.mean(fits)),
        "right_bucket": float(np.mean(is_right)),
        "given_over_needed": float(np.sum(given) / np.sum(lengths)),
        "large_bucket": float(np.mean(is_large)),
    }
