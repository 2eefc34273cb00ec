"""Number of torch's threads for each step: by the size of its matrix products, and by trial.

A product that takes one core some microseconds is not done sooner by two: to start the second and
to wait for it takes as long. A thread that waits does so in a loop, and so takes a core from the
web process or any other program. When that gets its share, it is often a thread that the others
wait for. So a step gets as many threads as its products are worth, and one if the model is small.

Beside other busy programs, a step may be done sooner by fewer threads (`ThreadControl`).
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from aquifer.cpus import usable_cpus
from aquifer.weights.parameters import Parameter

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which a user sets the number of torch's threads."""

# Rates of one core, in float32 and with weights in memory; measured on a Zen 4 core of an AMD EPYC.
_OPERATIONS_PER_S = 5e10
_BYTES_PER_S = 1.5e10

_ALONE_S = 5e-4
"""Time of a product on one core below which there is one thread. On two idle cores, a second thread
gains nothing at 50 us, and a third of the time from 200 us up. But beside other programs it made
steps of such products ten times as long."""

_PER_THREAD_S = 1e-4
"""Time of a product on one core for each thread, where there are several."""


_CONTENDED_PER_S = 50.0
"""Interruptions per second above which fewer threads are tried. An idle machine has few. Two cores
with four busy threads had some hundreds, and still a hundred when this process had one thread."""

_PAUSE = 20
"""Time between two trials, by the time that the last one took."""

_GAIN = 0.9
"""A trial is kept if the step took less than this share of what it would have taken."""

_WEIGHT = 0.3
"""Weight of the latest step in averages."""


@dataclass(frozen=True, slots=True)
class Products:
    """The matrix products of a model's forward pass, by their weights.

    An embedding counts as well: its weight is often also that of the last product. Of a mixture of
    experts all experts count.
    """

    count: int
    num_elements: int
    num_bytes: int

    @classmethod
    def of(cls, parameters: Iterable[Parameter]) -> Products:
        """The products of a model with these parameters."""
        matrices = [parameter for parameter in parameters if len(parameter.shape) > 1]
        return cls(
            len(matrices),
            sum(math.prod(matrix.shape) for matrix in matrices),
            sum(matrix.num_bytes for matrix in matrices),
        )

    def mean_s(self, num_tokens: int) -> float:
        """Time of the mean product on one core: it computes, or waits for its weight."""
        operations_s = 2 * self.num_elements * num_tokens / _OPERATIONS_PER_S
        return max(operations_s, self.num_bytes / _BYTES_PER_S) / max(self.count, 1)


@dataclass(frozen=True, slots=True)
class ThreadLimit:
    """The most threads of a step, and whether the user set this number for every step."""

    most: int
    is_fixed: bool

    @classmethod
    def of(
        cls,
        option: int | None,
        environment: Mapping[str, str],
        num_torch_threads: int,
        num_cpus: int,
    ) -> ThreadLimit:
        """The limit by the option, or else by the environment, or else by the machine.

        Args:
            option: `EngineConfig.threads`.
            environment: variables of the process.
            num_torch_threads: what torch uses by default. It follows the environment and the
                affinity, and leaves out second threads of a core.
            num_cpus: CPUs that the process may use.
        """
        if option is not None:
            return cls(option, True)
        if any(environment.get(name) for name in _VARIABLES):
            return cls(num_torch_threads, True)
        return cls(min(num_torch_threads, num_cpus), False)

    @classmethod
    def of_process(cls, option: int | None, num_sharing: int = 1) -> ThreadLimit:
        """The limit in this process.

        Args:
            option: `EngineConfig.threads`.
            num_sharing: processes that run the same steps on the same CPUs.
        """
        num_cpus = max(usable_cpus() // num_sharing, 1)
        return cls.of(option, os.environ, torch.get_num_threads(), num_cpus)


def choose_threads(products: Products, num_tokens: int, limit: ThreadLimit) -> int:
    """Number of threads for a step.

    Args:
        products: those of the model.
        num_tokens: tokens of the step.
        limit: the most threads.

    Returns: the limit, or a power of two below it, into which weights divide evenly.
    """
    product_s = products.mean_s(num_tokens)
    if limit.is_fixed:
        return limit.most
    if product_s < _ALONE_S:
        return 1
    worth = int(product_s / _PER_THREAD_S)
    return limit.most if worth >= limit.most else 1 << worth.bit_length() - 1


class ThreadControl:
    """Chooses the threads of steps, and learns from how long they took.

    A thread that has no CPU for some milliseconds keeps all others waiting at the end of each
    product. On two cores beside a test suite, a step of 200 sequences took 620 ms with two threads,
    and 118 ms with one. So if the threads of a process are often interrupted, half as many are
    tried, and kept if steps are faster; after a while twice as many are tried again. A trial may
    last twice as long as the step would have, or longer, so trials take a twentieth of the time.

    Args:
        products: those of the model.
        limit: the most threads.
    """

    def __init__(self, products: Products, limit: ThreadLimit) -> None:
        self._products = products
        self._limit = limit
        self._learns = False  # whether the threads of the current step are a matter of choice
        self._halvings = 0
        self._trial: int | None = None  # halvings that are tried in the current step
        # Seconds for each second of predicted work, by halvings; recent steps count more.
        self._pace: dict[int, float] = {}
        self._interruptions_per_s = 0.0
        self._untried_s = 0.0  # time of steps since the last trial
        self._last_trial_s = 0.0

    def choose(self, num_tokens: int) -> int:
        """The number of threads for a step, which `observe` is told of afterwards."""
        worth = choose_threads(self._products, num_tokens, self._limit)
        self._trial = None
        self._learns = worth > 1 and not self._limit.is_fixed
        if not self._learns:
            return worth
        if self._halvings in self._pace and self._untried_s >= _PAUSE * self._last_trial_s:
            is_contended = self._interruptions_per_s > _CONTENDED_PER_S
            if is_contended and worth >> self._halvings > 1:
                self._trial = self._halvings + 1
            elif self._halvings and (not is_contended or worth >> self._halvings == 1):
                self._trial = self._halvings - 1
        return max(worth >> (self._halvings if self._trial is None else self._trial), 1)

    def observe(self, num_tokens: int, seconds: float, num_interruptions: int) -> None:
        """Learn from the step that was chosen for last.

        Args:
            num_tokens: tokens of the step.
            seconds: time that it took.
            num_interruptions: how often a thread of this process lost its CPU meanwhile.
        """
        if not self._learns:
            return
        pace = seconds / (self._products.mean_s(num_tokens) * self._products.count)
        if self._trial is None:
            self._untried_s += seconds
            self._note(self._halvings, pace)
            self._interruptions_per_s += _WEIGHT * (
                num_interruptions / seconds - self._interruptions_per_s
            )
            return
        self._pace[self._trial] = pace
        if pace < _GAIN * self._pace[self._halvings]:
            self._halvings = self._trial
        self._untried_s, self._last_trial_s = 0.0, seconds

    def _note(self, halvings: int, pace: float) -> None:
        before = self._pace.get(halvings, pace)
        self._pace[halvings] = before + _WEIGHT * (pace - before)

    @contextmanager
    def threads_for(self, num_tokens: int) -> Iterator[None]:
        """Let torch use the threads of a step within the context, which runs the step."""
        num_threads = self.choose(num_tokens)
        if not self._learns:
            with torch_threads(num_threads):
                yield
            return
        begin_s, interruptions = time.monotonic(), _interruptions()
        with torch_threads(num_threads):
            yield
        self.observe(num_tokens, time.monotonic() - begin_s, _interruptions() - interruptions)


def _interruptions() -> int:
    """How often the kernel took a CPU from a thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Let torch use this many threads within the context, which costs about a microsecond."""
    before = torch.get_num_threads()
    if num_threads == before:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
