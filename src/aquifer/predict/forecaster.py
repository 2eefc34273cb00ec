"""Forecaster of a model: a forecast for each request that waits, and what came of it.

A trained predictor runs in a thread of its own. A request that is admitted before its prediction is
there has the forecast of recent lengths; nothing waits for a prediction.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

import numpy as np

from aquifer.predict.calibration import Calibration
from aquifer.predict.ended import EndedOutput
from aquifer.predict.lengths import Forecast, bin_of
from aquifer.predict.prior import RecentLengths

_MOST_AT_ONCE = 64
"""Requests that a predictor gets at once."""

_TEMPLATE_TOKENS = 32
"""Tokens that prompts of the same template begin with at least."""

logger = logging.getLogger(__name__)


def template_of(prompt_token_ids: Sequence[int]) -> int:
    """Identity of the beginning of a prompt, which requests of one template share."""
    return zlib.crc32(np.asarray(prompt_token_ids[:_TEMPLATE_TOKENS], np.int32).tobytes())


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a request before its first token.

    Args:
        prompt_token_ids: its prompt.
        most_tokens: the most tokens of its output.
        client: name of the client that it is for.
        template: identity of the beginning of its prompt.
        temperature: of its sampling.
        top_p: of its sampling.
        recent: recent lengths of requests like it (`RecentLengths.summaries`).
    """

    prompt_token_ids: Sequence[int]
    most_tokens: int
    client: str = ""
    template: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    recent: tuple[tuple[float, float], ...] = ()

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """Classes of requests like it, the widest first (`aquifer.predict.prior`)."""
        return self.client, int(bin_of(len(self.prompt_token_ids))) // 4, self.template


class Predictor(Protocol):
    """Predicts the lengths of outputs from their requests alone."""

    def predict(self, asked: Sequence[Asked]) -> Sequence[Forecast]:
        """A forecast of each request."""


@dataclass(slots=True, eq=False)
class Outlook:
    """What is expected of a request; kept by `LengthForecaster`.

    Attributes:
        asked: the request.
        predicted: what the predictor says; None if it says nothing, or nothing yet.
        prior: what recent lengths said when `forecast` was made.
        forecast: both together; None if neither says anything.
        age: outputs that had ended when `forecast` was made; -1 before that.
        has_prediction: whether `forecast` was made with a prediction.
    """

    asked: Asked
    predicted: Forecast | None = None
    prior: Forecast | None = None
    forecast: Forecast | None = None
    age: int = -1
    has_prediction: bool = False


class Forecaster(Protocol):
    """Forecasts the outputs of one model's requests. It is used by one thread."""

    def arrive(self, asked: Asked) -> Outlook:
        """Begin to form an opinion of a request."""

    def forecast(self, outlook: Outlook) -> Forecast | None:
        """The present forecast of a request; None if nothing is known."""

    def judge(self, outlook: Outlook, num_tokens: int) -> None:
        """Learn how well an output was predicted that has ended with so many tokens."""

    def learn(self, ended: EndedOutput) -> None:
        """Learn the length of an output, of this device or another."""

    def close(self) -> None:
        """Stop the thread, if there is one."""


class LengthForecaster:
    """The `Forecaster` that learns from the lengths of recent outputs.

    Args:
        predictor: a trained predictor; None for recent lengths alone.
        in_background: it runs in a thread, else at once as each request arrives.
    """

    def __init__(self, predictor: Predictor | None = None, *, in_background: bool = True) -> None:
        self._predictor = predictor
        self._recent = RecentLengths()
        self._calibration = Calibration()
        self._num_ended = 0
        self._queue: SimpleQueue[Outlook | None] = SimpleQueue()
        self._thread: Thread | None = None
        if predictor is not None and in_background:
            self._thread = Thread(
                target=_predict, args=(predictor, self._queue), name="predictor", daemon=True
            )
            self._thread.start()

    def arrive(self, asked: Asked) -> Outlook:
        """Have it predicted."""
        if self._predictor is not None:
            asked = replace(asked, recent=self._recent.summaries(asked.classes))
        outlook = Outlook(asked)
        if self._thread is not None:
            self._queue.put(outlook)
        elif self._predictor is not None:
            (outlook.predicted,) = self._predictor.predict([asked])
        return outlook

    def forecast(self, outlook: Outlook) -> Forecast | None:
        """The forecast of recent lengths and the predictor; formed anew as outputs end."""
        has_prediction = outlook.predicted is not None
        if outlook.age != self._num_ended or outlook.has_prediction != has_prediction:
            self._form(outlook, has_prediction)
        return outlook.forecast

    def judge(self, outlook: Outlook, num_tokens: int) -> None:
        """Record how well the length was predicted."""
        if outlook.predicted is not None and outlook.prior is not None:
            self._calibration.observe(outlook.predicted, outlook.prior, num_tokens)

    def learn(self, ended: EndedOutput) -> None:
        """Record the length."""
        self._num_ended += 1
        self._recent.observe(ended.classes, ended.num_outputs)

    def close(self) -> None:
        """Stop the predictor's thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _form(self, outlook: Outlook, has_prediction: bool) -> None:
        outlook.age, outlook.has_prediction = self._num_ended, has_prediction
        outlook.prior = forecast = self._recent.forecast(outlook.asked.classes)
        if forecast is not None:
            if outlook.predicted is not None and has_prediction:
                forecast = self._calibration.combine(outlook.predicted, forecast)
            forecast = forecast.limited(outlook.asked.most_tokens)
        outlook.forecast = forecast


class Oracle:
    """The `Forecaster` that takes each output to be as long as it may be.

    It is right where each request states its length.
    """

    def arrive(self, asked: Asked) -> Outlook:
        """The largest length, as certain."""
        return Outlook(asked, forecast=Forecast.certain(max(asked.most_tokens, 1)))

    def forecast(self, outlook: Outlook) -> Forecast | None:
        """The same at all times."""
        return outlook.forecast

    def judge(self, outlook: Outlook, num_tokens: int) -> None:
        """Do nothing: there is nothing to learn."""

    def learn(self, ended: EndedOutput) -> None:
        """Do nothing, likewise."""

    def close(self) -> None:
        """Do nothing."""


def _predict(predictor: Predictor, queue: SimpleQueue[Outlook | None]) -> None:
    """Loop of the predictor's thread. A predictor that fails is not asked again; what comes later
    is dropped."""
    has_failed = False
    while True:
        outlooks = [queue.get()]
        try:
            while len(outlooks) < _MOST_AT_ONCE:
                outlooks.append(queue.get_nowait())
        except Empty:
            pass
        asked = [outlook for outlook in outlooks if outlook is not None]
        if asked and not has_failed:
            try:
                forecasts = predictor.predict([outlook.asked for outlook in asked])
                for outlook, forecast in zip(asked, forecasts, strict=True):
                    outlook.predicted = forecast
            except Exception:
                logger.exception("the length predictor failed; recent lengths are used alone")
                has_failed = True
        if len(asked) < len(outlooks):
            return
