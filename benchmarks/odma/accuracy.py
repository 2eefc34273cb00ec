"""Part `accuracy`: how well lengths are predicted, by the paper's measure and by others.

The measure of S3 and ODMA is the share of requests that fit into the memory that their predicted
bucket gives them; neither paper defines it further. A policy that gives every request the largest
bucket reaches 100 %, so the result also has errors, calibration and the memory that was given.
"""

from __future__ import annotations

from collections import defaultdict
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
from aquifer.predict.lengths import NUM_BINS, Forecast, bin_of
from aquifer.predict.model import PredictorConfig
from aquifer.predict.prior import RecentLengths
from aquifer.predict.train import Sample, predictions, report, samples_of, split_of, train
from aquifer.text import Tokenizer

PAPER = {"Alpaca": (0.9860, 0.9955), "Google-NQ": (0.8268, 0.9336)}
"""Accuracy of S3's predictor, and of ODMA (section 5.1)."""

NUM_MODELS = 8
"""Models of AlpacaEval: sorted by mean output length, cut into so many equal parts, one from the
middle of each."""

INFLATIONS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Candidates of alpha, which the paper does not state."""

FIT_GOAL = 0.95
"""Share of the validation part that must fit; the least alpha with which it does is taken."""

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
    of_alpaca = read_examples(data / ALPACA)
    models = chosen_models(of_alpaca)
    middle = models[len(models) // 2]
    sources = {
        f"Alpaca, {len(models)} models": [each for each in of_alpaca if each.model in models],
        "Alpaca, one model": [each for each in of_alpaca if each.model == middle],
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
        alone = predictions(predictor, split.test)
        before = [*split.train, *split.validation]
        forecasts = {
            "all outputs alike": [marginal(split.train)] * len(split.test),
            "outputs of a model alike": by_model(split.train, split.test),
            "recent lengths alone": _online(before, split.test, None),
            "predictor alone": alone,
            "predictor, calibrated online": _online(before, split.test, predictor.predict),
        }
        lengths = [sample.output_tokens for sample in split.test]
        described = {"source": name, "has_prompts": has_prompts, "num_train": len(split.train)}
        rows += [described | {"way": way} | report(f, lengths) for way, f in forecasts.items()]
        bounds = static_bounds(split.train)
        rows += [
            {"source": name, "way": way} | _classified(bounds, forecasts[which], lengths)
            for way, which in (
                ("S3", "predictor alone"),
                ("S3, all outputs alike", "all outputs alike"),
            )
        ]
        alpha = least_inflation(split.train, split.validation, predictor.predict)
        as_written = Routing(inflation=alpha, level=None)
        rows += [
            {"source": name, "way": way, "inflation": routing.inflation}
            | _bucketed(bounds_of, routing, forecasts[which], before, lengths)
            for way, bounds_of, routing, which in (
                ("ODMA", _dynamic("equal shares"), as_written, "predictor alone"),
                ("ours", _dynamic("least waste"), Routing(), "predictor, calibrated online"),
                (
                    "ours, recent lengths",
                    _dynamic("least waste"),
                    Routing(),
                    "recent lengths alone",
                ),
            )
        ]
    return {"paper": PAPER, "models": models, "longest_tokens": _LONGEST, "rows": rows}


def chosen_models(examples: Sequence[Example]) -> list[str]:
    """Choose the models of several whose outputs are predicted (`NUM_MODELS`)."""
    lengths = defaultdict(list)
    for example in examples:
        lengths[example.model].append(example.output_tokens)
    ordered = sorted(lengths, key=lambda model: (float(np.mean(lengths[model])), model))
    places = (np.arange(min(NUM_MODELS, len(ordered))) + 0.5) / min(NUM_MODELS, len(ordered))
    return [ordered[place] for place in (places * len(ordered)).astype(int).tolist()]


def marginal(samples: Sequence[Sample]) -> Forecast:
    """The distribution of all lengths, each bin with a tenth of an output more."""
    bins = bin_of([sample.output_tokens for sample in samples])
    return Forecast.of(np.bincount(bins, minlength=NUM_BINS) + 0.1)


def by_model(before: Sequence[Sample], samples: Sequence[Sample]) -> list[Forecast]:
    """Forecast each sample by the distribution of its model's output lengths."""
    of_model = defaultdict(list)
    for sample in before:
        of_model[sample.asked.client].append(sample)
    found = {model: marginal(those) for model, those in of_model.items()}
    return [found[sample.asked.client] for sample in samples]


def static_bounds(samples: Sequence[Sample]) -> list[int]:
    """S3's buckets: of equal widths, up to the longest output of the training part."""
    longest = max(sample.output_tokens for sample in samples)
    return [-(-longest * (number + 1) // _S3_BUCKETS) for number in range(_S3_BUCKETS)]


def least_inflation(before: Sequence[Sample], samples: Sequence[Sample], predict: Any) -> float:
    """The least alpha with which enough of the samples fit; the largest one if none does."""
    forecasts = predict([sample.asked for sample in samples])
    lengths = [sample.output_tokens for sample in samples]
    for alpha in INFLATIONS:
        routing = Routing(inflation=alpha, level=None)
        found = _bucketed(_dynamic("equal shares"), routing, forecasts, before, lengths)
        if found["accuracy"] >= FIT_GOAL:
            return alpha
    return INFLATIONS[-1]


def _spread(examples: Sequence[Example], limit: int) -> list[Example]:
    """At most `limit` examples, evenly from all; with their order."""
    numbers = np.unique(np.linspace(0, len(examples) - 1, min(limit, len(examples))).astype(int))
    return [examples[number] for number in numbers.tolist()]


def _dynamic(rule: Any) -> BucketBounds:
    return BucketBounds(Granularity(16, 128, _LONGEST), rule=rule)


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


def _classified(
    bounds: Sequence[int], forecasts: Sequence[Forecast], lengths: Sequence[int]
) -> dict[str, Any]:
    """Buckets that outputs get from S3, by class: each gets the likeliest one."""
    chosen = []
    for forecast in forecasts:
        ends = forecast.cumulative(bounds)
        ends[-1] = 1.0
        chosen.append(int(np.diff(ends, prepend=0.0).argmax()))
    right = np.searchsorted(bounds, lengths)
    given = np.array(bounds)[chosen]
    # An output that does not fit moves to the next larger bucket, until it does.
    finally_given = np.array([*bounds, _LONGEST])[np.maximum(chosen, right)]
    return _figures(lengths, given, finally_given) | {
        "right_bucket": float((right == chosen).mean()),
        "num_used": len(set(chosen)),
        "large_bucket": 0.0,
    }


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
    given, right = [], []
    for forecast, length in zip(forecasts, lengths, strict=True):
        given.append(bounds.of(routing.total(0, forecast, _LONGEST)) or _LONGEST)
        right.append(bounds.of(min(length, _LONGEST)) or _LONGEST)
        bounds.observe(length)
    fits = np.array(lengths) <= np.array(given)
    # An output that does not fit moves to the large bucket.
    return _figures(lengths, np.array(given), np.where(fits, given, _LONGEST)) | {
        "right_bucket": float((np.array(given) == right).mean()),
        "num_used": len(set(given)),
        "large_bucket": float((np.array(given) == _LONGEST).mean()),
    }


def _figures(lengths: Sequence[int], given: Any, finally_given: Any) -> dict[str, Any]:
    """Whether outputs fit, and what they got; at first, and when they have moved."""
    total = sum(lengths)
    return {
        "accuracy": float((np.array(lengths) <= given).mean()),
        "given_over_needed": float(given.sum() / total),
        "given_over_needed_in_the_end": float(finally_given.sum() / total),
    }
