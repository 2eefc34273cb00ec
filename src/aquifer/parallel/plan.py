"""The plan of the part of a model that one rank has."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from aquifer.cache.base import StateLayout
from aquifer.errors import ConfigError
from aquifer.models import Model, ModelPlan, Planner
from aquifer.models.collectives import Collectives
from aquifer.models.decoder import Decoder
from aquifer.models.decoder_plan import DecoderPlan
from aquifer.parallel.share import CannotSplitError
from aquifer.parallel.split import DecoderSplit
from aquifer.weights.checkpoint import Checkpoint

_MOST_RANKS = 64


class ShardedPlan:
    """`ModelPlan` of one rank's part of a decoder.

    Args:
        whole: the plan of the whole decoder.
        collectives: the ranks.

    Raises:
        CannotSplitError: it cannot be split over them.
    """

    def __init__(self, whole: DecoderPlan, collectives: Collectives) -> None:
        split = DecoderSplit(whole.spec, collectives.rank, collectives.size)
        self._collectives = collectives
        self._spec = split.spec
        self.vocab_size = whole.vocab_size
        self.max_model_len = whole.max_model_len
        self.kv_limits = whole.kv_limits
        self.has_reusable_kv = whole.has_reusable_kv
        self.kv_layout = split.spec.kv_layout(whole.kv_layout.dtype)
        self.parameters = [split.shard(parameter) for parameter in whole.parameters]
        self.num_parameters = whole.num_parameters

    def state_layout(self, dtype: torch.dtype | None = None) -> StateLayout | None:
        """See `ModelPlan.state_layout`."""
        return self._spec.state_layout(self.kv_layout.dtype, dtype or self.kv_layout.dtype)

    def build(self, tensors: Mapping[str, torch.Tensor]) -> Model:
        """See `ModelPlan.build`."""
        return Decoder(self._spec, self.kv_layout, tensors, collectives=self._collectives)


def sharding(planner: Planner, collectives: Collectives) -> Planner:
    """A planner of the parts that a rank has of the models that another one plans."""
    return partial(_plan_shard, planner, collectives)


def _plan_shard(
    planner: Planner, collectives: Collectives, checkpoint: Checkpoint, dtype: torch.dtype | None
) -> ModelPlan:
    """Plan one rank's part of a checkpoint's model.

    Raises:
        ConfigError: it cannot be split over the ranks.
    """
    whole, size = planner(checkpoint, dtype), collectives.size
    if not isinstance(whole, DecoderPlan):
        raise ConfigError(
            f"{checkpoint.architecture} is not computed by Aquifer's own decoder, and only that is "
            f"split over devices; leave out --tensor-parallel-size"
        )
    try:
        return ShardedPlan(whole, collectives)
    except CannotSplitError as error:
        sizes = ", ".join(map(str, _possible_sizes(whole)))
        raise ConfigError(
            f"{checkpoint.path} cannot be split over {size} devices: {error}; give a "
            f"--tensor-parallel-size that works: {sizes}"
        ) from error


def _possible_sizes(plan: DecoderPlan) -> list[int]:
    """Numbers of ranks over which a decoder can be split."""
    sizes = [1]
    for size in range(2, _MOST_RANKS + 1):
        try:
            split = DecoderSplit(plan.spec, 0, size)
            for parameter in plan.parameters:
                split.shard(parameter)
        except CannotSplitError:
            continue
        sizes.append(size)
    return sizes
