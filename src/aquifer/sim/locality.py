"""Requests for many models with the locality of Tangram's evaluation (section 5.1).

Three things are drawn, each from random numbers of its own, so that none changes the others:

- **Arrivals**: intervals follow a Gamma distribution with a mean of 1 / rate and the coefficient of
  variation (CV) of the level.
- **Models**: in runs of consecutive requests for the same model. The paper takes runs from Azura's
  serverless trace, which is not at hand. Here their lengths are geometric with a stated mean, and
  the model of a run follows Zipf's law among all models but that of the run before.
- **Inputs**: prompt and output of a request are a random pair of the given lengths.

The four levels of the paper, and what becomes of a run of n requests:

    L1   CV 0.25   1: no consecutive requests
    L2   CV 0.5    half of n, rounded up
    L3   CV 1      n
    L4   CV 2      n
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from aquifer.errors import ConfigError
from aquifer.sim.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Locality:
    """A level of locality.

    Args:
        name: its name in the paper.
        arrival_cv: coefficient of variation of the intervals between arrivals.
        run_share: the part of a run's requests that is kept; at least one is.
    """

    name: str
    arrival_cv: float
    run_share: float


LOCALITIES = {
    level.name: level
    for level in (
        Locality("L1", 0.25, 0.0),
        Locality("L2", 0.5, 0.5),
        Locality("L3", 1.0, 1.0),
        Locality("L4", 2.0, 1.0),
    )
}

_CLASSES = (("1-3B", 0.3), ("4-13B", 0.6), ("14-30B", 0.1))
"""Size classes of models in billions of parameters, and their shares (section 5.1)."""

TABLE_1 = {
    "1-3B": ("opt-1.3b", "llama-3.2-3b", "qwen-2.5-3b"),
    "4-13B": ("opt-6.7b", "llama-3-8b", "yi-9b", "opt-13b"),
    "14-30B": ("gpt-neox-20b",),
}
"""Models of the paper's Table 1 by size class, as named shapes of `aquifer.sim.device`."""


def models_by_class(num_models: int) -> dict[str, str]:
    """Models by the paper's size classes: shapes by the names of the models.

    Each class has its share of the models, rounded to the nearest whole numbers that add up; within
    it the shapes of `TABLE_1` repeat. Names are those of the shapes, "opt-1.3b-2" for a second one.
    """
    exact = [share * num_models for _, share in _CLASSES]
    counts = [int(count) for count in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for index in by_rest[: num_models - sum(counts)]:
        counts[index] += 1
    models: dict[str, str] = {}
    for (size_class, _), count in zip(_CLASSES, counts, strict=True):
        shapes = TABLE_1[size_class]
        for index in range(count):
            shape, turn = shapes[index % len(shapes)], index // len(shapes)
            models[f"{shape}-{turn + 1}" if turn else shape] = shape
    return models


@dataclass(frozen=True, slots=True)
class LocalityWorkload:
    """Requests for several models.

    Args:
        models: their names.
        lengths: requests of which prompt and output are used.
        rate: mean number of arrivals per second. With batches, of batches.
        num_requests: number of requests; with batches, of batches.
        zipf: exponent of Zipf's law: the k-th most popular model starts runs in proportion to
            k ** -zipf. Which model has which rank is random.
        mean_run: mean length of runs before the level's rule changes them.
        batch_size: sequences of each request, each with lengths of its own. They arrive together.
        seed: of all random numbers.

    Raises:
        ConfigError: there are fewer than two models, no lengths, or a number is too small.
    """

    models: Sequence[str]
    lengths: Sequence[TraceRequest]
    rate: float
    num_requests: int
    zipf: float = 1.0
    mean_run: float = 4.0
    batch_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.models) < 2:
            raise ConfigError("a workload with locality needs at least two models")
        if not self.lengths:
            raise ConfigError("a workload needs lengths of requests")
        if self.rate <= 0 or self.mean_run < 1 or self.batch_size < 1:
            raise ConfigError("rate must be above 0, mean_run and batch_size at least 1")

    @property
    def popularity(self) -> dict[str, float]:
        """Share of each model in Zipf's law: the weight with which a run is for it."""
        random = self._random(0)
        weights = np.arange(1, len(self.models) + 1) ** -float(self.zipf)
        weights /= weights.sum()
        ranks = random.permutation(len(self.models))
        return {name: float(weights[ranks[i]]) for i, name in enumerate(self.models)}

    def requests(self, level: Locality) -> list[TraceRequest]:
        """The requests at one level, in order of arrival."""
        arrivals_s = self._arrivals_s(level)
        models = self._models(level)
        indices = self._random(3).integers(len(self.lengths), size=(len(models), self.batch_size))
        return [
            replace(self.lengths[index], arrival_s=float(arrival_s), model=model)
            for arrival_s, model, of_batch in zip(arrivals_s, models, indices, strict=True)
            for index in of_batch.tolist()
        ]

    def _random(self, stream: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, stream))

    def _arrivals_s(self, level: Locality) -> npt.NDArray[np.float64]:
        """Times of arrivals, [num_requests]."""
        shape = level.arrival_cv**-2
        intervals_s = self._random(1).gamma(shape, 1 / (shape * self.rate), self.num_requests)
        return np.asarray(np.cumsum(intervals_s))

    def _models(self, level: Locality) -> list[str]:
        """Model of each request, [num_requests]."""
        random = self._random(2)
        popularity = self.popularity
        weights = np.array([popularity[name] for name in self.models])
        models: list[str] = []
        previous: int | None = None
        while len(models) < self.num_requests:
            others = weights.copy()
            if previous is not None:
                others[previous] = 0
            previous = int(random.choice(len(weights), p=others / others.sum()))
            length = int(np.ceil(level.run_share * random.geometric(1 / self.mean_run)))
            models += [self.models[previous]] * max(length, 1)
        return models[: self.num_requests]
