"""Forecaster of a model: a forecast for each request as it arrives, and what came of it.

A trained predictor runs in a thread of its own. A request that is admitted before its prediction is
there has the forecast of recent lengths; nothing waits for a prediction.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from aquifer.predict.calibration import Calibration
from aquifer.predict.lengths import Forecast, bin_of
from aquifer.predict.prior import RecentLengths


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a request before its first token.

    Args:
        num_prompt_tokens: length of its prompt.
        most_tokens: the most tokens of its output.
        client: name of the client that it is for.
        template: identity of the beginning of its prompt.
    """

    num_prompt_tokens: int
    most_tokens: int
    client: str = ""
    template: int = 0

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """Classes of requests like it, the widest first (`aquifer.predict.prior`)."""
        return self.client, int(bin_of(self.num_prompt_tokens)) // 4, self.template


class Predictor(Protocol):
    """Predicts the length of an output from its request alone."""

    def predict(self, asked: Asked) -> Forecast | None:
        """A forecast, or None if it has nothing to say."""


@dataclass(slots=True, eq=False)
class Outlook:
    """What is expected of a request.

    Attributes:
        asked: the request.
        prior: what recent lengths say; None if too little is known.
        predicted: what the predictor says; None if it says nothing, or nothing yet.
        forecast: both together; None if neither says anything.
    """

    asked: Asked
    prior: Forecast | None
    predicted: Forecast | None = None
    forecast: Forecast | None = None


class Forecaster:
    """Forecasts the outputs of one model's requests.

    Args:
        predictor: a trained predictor; None for recent lengths alone.
    """

    def __init__(self, predictor: Predictor | None = None) -> None:
        self._predictor = predictor
        self._recent = RecentLengths()
        self._calibration = Calibration()

    def outlook(self, asked: Asked) -> Outlook:
        """What is expected of a request that has arrived."""
        prior = self._recent.forecast(asked.classes)
        outlook = Outlook(asked, prior, forecast=prior)
        if self._predictor is not None:
            self._add(outlook, self._predictor.predict(asked))
        if outlook.forecast is not None:
            outlook.forecast = outlook.forecast.limited(asked.most_tokens)
        return outlook

    def ended(self, outlook: Outlook, num_tokens: int) -> None:
        """Learn from an output that has come to its own end."""
        if outlook.predicted is not None and outlook.prior is not None:
            self._calibration.observe(outlook.predicted, outlook.prior, num_tokens)
        self._recent.observe(outlook.asked.classes, num_tokens)

    def _add(self, outlook: Outlook, predicted: Forecast | None) -> None:
        """Enter what the predictor says."""
        outlook.predicted = predicted
        if predicted is not None and outlook.prior is not None:
            outlook.forecast = self._calibration.combine(predicted, outlook.prior)


class Oracle:
    """Takes each output to be as long as it may be: right where a request states its length."""

    def outlook(self, asked: Asked) -> Outlook:
        """The largest length, as certain."""
        return Outlook(asked, None, forecast=Forecast.certain(asked.most_tokens))

    def ended(self, outlook: Outlook, num_tokens: int) -> None:
        """Do nothing: there is nothing to learn."""
