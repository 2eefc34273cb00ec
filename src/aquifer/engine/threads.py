"""Number of torch's threads for each step, by the size of its matrix products.

A product that takes one core some microseconds is not done sooner by two: to start the second and
to wait for it takes as long. A thread that waits does so in a loop, and so takes a core from the
web process or any other program. When that gets its share, it is often a thread that the others
wait for. So a step gets as many threads as its products are worth, and one if the model is small.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from aquifer.cpus import usable_cpus
from aquifer.weights.store import Parameter

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
    def of_process(cls, option: int | None) -> ThreadLimit:
        """The limit in this process."""
        return cls.of(option, os.environ, torch.get_num_threads(), usable_cpus())


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
