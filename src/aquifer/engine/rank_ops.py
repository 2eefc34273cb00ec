"""What rank 0 of a tensor-parallel group tells the others to do, as values that pickle.

All ranks have the same models, pages and addresses, and run the same steps in the same order. Rank
0 decides (`aquifer.engine.leader`); the others execute (`aquifer.engine.rank`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from aquifer.cache.group_tensors import GroupedShape
from aquifer.cache.journal import KVOp
from aquifer.cache.tensors import KVShape
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.step_input import StepInput
from aquifer.errors import ConfigError, DriverError
from aquifer.memory.pool import PoolSize
from aquifer.models import Planner
from aquifer.weights.store import WeightOp


@dataclass(frozen=True, slots=True)
class OpenPool:
    """Open a device and its pool. Answered with a `RankError` or None."""

    config: EngineConfig
    planner: Planner  # of whole models
    size: PoolSize  # of rank 0's


@dataclass(frozen=True, slots=True)
class RegisterModel:
    """Register a model: addresses for its weights and KV. Answered with a `RankError` or None."""

    spec: ModelSpec
    shape: KVShape | GroupedShape
    max_seqs: int
    num_slots: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """Groups of a model's weights got pages, or lost them."""

    model: str
    op: WeightOp


@dataclass(frozen=True, slots=True)
class KVChanged:
    """Something happened to the KV cache of a model."""

    model: str
    op: KVOp


@dataclass(frozen=True, slots=True)
class FillWeights:
    """Load the contents of some groups of weights, beside steps of other models.

    Answered with `Filled`, as something else may be asked meanwhile.
    """

    model: str
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BuildModel:
    """Build a model over its weights, which are there."""

    model: str


@dataclass(frozen=True, slots=True)
class WarmUpModel:
    """Run everything once that steps may run, and capture steps."""

    model: str
    num_tokens: int
    has_kv: bool
    captures: bool


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """Run a step.

    `num_threads` is the number of torch's threads on rank 0. With another number, products could
    be rounded otherwise, and experts chosen otherwise.
    """

    step: StepInput
    num_threads: int


@dataclass(frozen=True, slots=True)
class TakeSwapMemory:
    """Begin to take the host memory to which preempted KV is moved: it will soon be needed."""


@dataclass(frozen=True, slots=True)
class RemoveModel:
    """Give everything of a model back."""

    model: str


@dataclass(frozen=True, slots=True)
class ClosePool:
    """Give everything back, and wait for another `OpenPool`. Answered with None."""


@dataclass(frozen=True, slots=True)
class RankError:
    """An error that is rank 0's to raise."""

    where: str  # rank and device
    error: ConfigError | DriverError


@dataclass(frozen=True, slots=True)
class Filled:
    """Groups of weights are loaded, or could not be."""

    error: RankError | None


RankOp: TypeAlias = (
    OpenPool
    | RegisterModel
    | WeightsChanged
    | KVChanged
    | FillWeights
    | BuildModel
    | WarmUpModel
    | LaunchStep
    | TakeSwapMemory
    | RemoveModel
    | ClosePool
)
