"""Training of a length predictor (ODMA, sections 3.2 and 4.2)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from aquifer.errors import ConfigError
from aquifer.predict.data import Example
from aquifer.predict.features import numbers
from aquifer.predict.forecaster import Asked, template_of
from aquifer.predict.lengths import NUM_BINS, Forecast, bin_of
from aquifer.predict.model import LengthPredictor, PredictorConfig
from aquifer.predict.prior import RecentLengths

Encode = Callable[[str], Sequence[int]]
"""Turns a text into token ids."""

_MOST_OUTPUT_TOKENS = 1 << 15
_BATCH = 64
_PATIENCE = 8
"""Rounds without a better validation loss after which training ends."""

_RATE = 1e-3
_ENCODER_RATE = 3e-4
"""Learning rates: of the encoder with 64 elements, in inverse proportion to others, and of all
else. The encoder normalizes after each layer, and a rate of 2e-3 makes its vectors of all prompts
nearly the same."""

_WARM_UP = 0.1
"""Part of the training in which the learning rates grow to these. They then shrink to a tenth."""

_SMOOTHING = 0.15
"""Part of a length's weight that goes to the bins beside its own, half to either."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An example as the predictor sees it, and its output's length in tokens."""

    asked: Asked
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Split:
    """Samples to train on, to stop by, and to test with."""

    train: list[Sample]
    validation: list[Sample]
    test: list[Sample]


def samples_of(examples: Sequence[Example], encode: Encode | None) -> list[Sample]:
    """Samples of examples, in the same order.

    What is known of recent lengths is that of the examples before each one, as in a server.

    Args:
        examples: in order of arrival, if they have times.
        encode: turns prompts into tokens; None if no example has more than a length.

    Raises:
        ConfigError: an example has a text, and there is no `encode`.
    """
    recent: dict[str, RecentLengths] = {}
    ids_of: dict[str, Sequence[int]] = {}
    samples = []
    for example in examples:
        prompt: Sequence[int] = example.prompt_token_ids
        if example.prompt:
            if encode is None:
                raise ConfigError("the examples have texts; give --tokenizer MODEL to read them")
            if example.prompt not in ids_of:
                ids_of[example.prompt] = encode(example.prompt)
            prompt = ids_of[example.prompt]
        if not prompt:
            prompt = [0] * max(example.prompt_tokens, 1)
        asked = Asked(
            prompt,
            _MOST_OUTPUT_TOKENS,
            client=example.model,
            template=template_of(prompt),
            temperature=example.temperature,
        )
        seen = recent.setdefault("", RecentLengths())
        samples.append(
            Sample(replace(asked, recent=seen.summaries(asked.classes)), example.output_tokens)
        )
        seen.observe(asked.classes, example.output_tokens)
    return samples


def split_of(
    examples: Sequence[Example], samples: Sequence[Sample], held_out: Sequence[str] = ()
) -> Split:
    """Split samples: by time where there are times, else by prompt, or without prompts one by one.

    A prompt is in one part only, whichever models answered it.

    Args:
        examples: the examples.
        samples: the samples of them, in the same order.
        held_out: models that are in the test part alone.
    """
    if all(example.arrival_s is not None for example in examples):
        ends = [int(0.7 * len(samples)), int(0.8 * len(samples))]
        parts = [
            list(samples[: ends[0]]),
            list(samples[ends[0] : ends[1]]),
            list(samples[ends[1] :]),
        ]
        return Split(*parts)
    split = Split([], [], [])
    for number, (example, sample) in enumerate(zip(examples, samples, strict=True)):
        name = example.prompt or str(example.prompt_token_ids or number)
        share = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 16**8
        if share >= 0.8:
            if not held_out or example.model in held_out:
                split.test.append(sample)
        elif example.model not in held_out:
            (split.train if share < 0.7 else split.validation).append(sample)
    return split


def train(
    split: Split,
    config: PredictorConfig,
    *,
    epochs: int = 20,
    seed: int = 0,
    device: str = "cpu",
    prepare: Callable[[LengthPredictor], None] = lambda _: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LengthPredictor:
    """Train a predictor; the one of the round with the least validation loss.

    Args:
        split: the samples.
        config: what the predictor is made for.
        epochs: the most rounds over the training part.
        seed: seed of weights and order.
        device: where to train.
        prepare: called with the new predictor, to load pretrained layers.
        on_progress: called with (batches done, batches in all).

    Raises:
        ConfigError: a part of the split is empty.
    """
    if not (split.train and split.validation and split.test):
        raise ConfigError(
            f"{len(split.train)}, {len(split.validation)} and {len(split.test)} examples to train, "
            "to stop by and to test with are too few; give more"
        )
    torch.manual_seed(seed)
    predictor = LengthPredictor(replace(config, outputs=len(split.train)))
    prepare(predictor)
    predictor.standardize(numbers([sample.asked for sample in split.train]))
    predictor.to(device)
    order = np.random.default_rng(seed)
    num_batches = -(-len(split.train) // _BATCH)
    optimizer, schedule = _optimizer(predictor, epochs * num_batches)
    best_loss, since, best = np.inf, 0, predictor.state_dict()
    for epoch in range(epochs):
        predictor.train()
        places = order.permutation(len(split.train))
        for batch in range(num_batches):
            chosen = [split.train[i] for i in places[batch * _BATCH : (batch + 1) * _BATCH]]
            optimizer.zero_grad()
            _loss(predictor, chosen, device).backward()
            torch.nn.utils.clip_grad_norm_(predictor.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            on_progress(epoch * num_batches + batch + 1, epochs * num_batches)
        predictor.eval()
        with torch.inference_mode():
            losses = [
                _loss(predictor, split.validation[start : start + 512], device)
                for start in range(0, len(split.validation), 512)
            ]
        loss = float(torch.stack(losses).mean())
        if loss < best_loss:
            best_loss, since = loss, 0
            best = {name: value.clone() for name, value in predictor.state_dict().items()}
        elif (since := since + 1) >= _PATIENCE:
            break
    on_progress(epochs * num_batches, epochs * num_batches)
    predictor.load_state_dict(best)
    return predictor.cpu().eval()


def predictions(predictor: LengthPredictor, samples: Sequence[Sample]) -> list[Forecast]:
    """The forecast of each sample."""
    found: list[Forecast] = []
    for start in range(0, len(samples), 512):
        found += predictor.predict([sample.asked for sample in samples[start : start + 512]])
    return found


def report(forecasts: Sequence[Forecast], lengths: Sequence[int]) -> dict[str, Any]:
    """Figures of forecasts beside the lengths that came.

    Returns: mean absolute error of the median in tokens; the share of lengths in the bin held most
        likely; mean log-likelihood by bin, in nats; and for each tenth the share of lengths below
        that quantile (`calibration`), with the mean distance from what it should be.
    """
    bins = bin_of(lengths)
    levels = [
        float(forecast.cumulative(length - 0.5))
        for forecast, length in zip(forecasts, lengths, strict=True)
    ]
    tenths = np.arange(1, 10) / 10
    below = [(np.array(levels) <= tenth).mean() for tenth in tenths]
    masses = np.array([forecast.masses for forecast in forecasts])
    likelihood = np.maximum(masses[np.arange(len(bins)), bins], 1e-9)
    errors = [
        abs(forecast.quantile(0.5) - length)
        for forecast, length in zip(forecasts, lengths, strict=True)
    ]
    return {
        "num_outputs": len(lengths),
        "mean_tokens": float(np.mean(lengths)),
        "mean_absolute_error": float(np.mean(errors)),
        "right_bin": float((masses.argmax(1) == bins).mean()),
        "log_likelihood": float(np.log(likelihood).mean()),
        "calibration": [float(share) for share in below],
        "calibration_error": float(np.abs(np.array(below) - tenths).mean()),
    }


def _optimizer(
    predictor: LengthPredictor, num_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW with a learning rate for the encoder and one for all else, and their course."""
    encoder = [] if predictor.encoder is None else list(predictor.encoder.parameters())
    in_encoder = set(map(id, encoder))
    others = [each for each in predictor.parameters() if id(each) not in in_encoder]
    groups: list[dict[str, Any]] = [{"params": others, "lr": _RATE}]
    if predictor.encoder is not None:
        groups.append({"params": encoder, "lr": _ENCODER_RATE * 64 / predictor.encoder.dim})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    warm_up = max(_WARM_UP * num_steps, 1.0)

    def part(step: int) -> float:
        return min((step + 1) / warm_up, 1.0 - 0.9 * step / num_steps)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, part)


def _loss(predictor: LengthPredictor, samples: Sequence[Sample], device: str) -> torch.Tensor:
    """Cross entropy of the bins, smoothed over neighbours, and Huber's loss of the logarithm."""
    rows, features = predictor.inputs([sample.asked for sample in samples])
    logits, logs = predictor(None if rows is None else rows.to(device), features.to(device))
    lengths = torch.tensor([sample.output_tokens for sample in samples], dtype=torch.float32)
    bins = torch.from_numpy(bin_of([sample.output_tokens for sample in samples]))
    targets = torch.nn.functional.one_hot(bins, NUM_BINS).float() * (1 - _SMOOTHING)
    for shift in (-1, 1):
        beside = (bins + shift).clamp(0, NUM_BINS - 1)
        targets += torch.nn.functional.one_hot(beside, NUM_BINS).float() * (_SMOOTHING / 2)
    cross = torch.nn.functional.cross_entropy(logits, targets.to(device))
    return cross + 0.1 * torch.nn.functional.huber_loss(logs, lengths.log2().to(device))
