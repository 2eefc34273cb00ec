"""How mixers are split over ranks: by heads, or by channels, and columns of the last product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aquifer.models.mixers.base import Mixer
from aquifer.models.mixers.gated_delta import GatedDelta
from aquifer.models.mixers.mamba1 import Mamba1
from aquifer.models.mixers.mamba2 import Mamba2
from aquifer.parallel.share import CannotSplitError, Range, Share, part_of
from aquifer.weights.parameters import Parameter

_WHOLE = ("dt_layernorm.weight", "b_layernorm.weight", "c_layernorm.weight")


@dataclass(frozen=True, slots=True)
class MixerSplit:
    """What one rank has of a mixer.

    Args:
        mixer: as the rank computes it.
        in_rows: its rows of the first product.
        conv_rows: of the convolution.
        columns: of the last product, and of others by which results of ranks add up.
        share: of the rank.
        norm_is_whole: whether its norm is the same for all heads.
    """

    mixer: Mixer
    in_rows: Sequence[Range]
    conv_rows: Sequence[Range]
    columns: Range
    share: Share
    norm_is_whole: bool = False

    def shard(self, parameter: Parameter, place: str) -> Parameter:
        """The rank's part of a parameter.

        Args:
            parameter: the whole one.
            place: its name within the mixer.
        """
        match place:
            case "in_proj.weight" | "in_proj.bias":
                return part_of(parameter, 0, self.in_rows)
            case "conv1d.weight" | "conv1d.bias":
                return part_of(parameter, 0, self.conv_rows)
            case "out_proj.weight" | "x_proj.weight":
                return part_of(parameter, 1, [self.columns])
            case "out_proj.bias":
                return self.share.of_rank_0(parameter, 0)
        if place in _WHOLE or (place == "norm.weight" and self.norm_is_whole):
            return parameter
        # Of each head or channel.
        return part_of(parameter, 0, [self.share.even(parameter.shape[0])])


def split_mixer(whole: Mixer, share: Share) -> MixerSplit:
    """What one rank has of a mixer.

    Raises:
        CannotSplitError: it cannot be split over so many ranks.
    """
    match whole:
        case Mamba2():
            return _split_mamba2(whole, share)
        case Mamba1():
            own = replace(whole, width=share.count(whole.width, "Mamba channels"))
            columns = share.even(whole.width)
            in_rows = share.in_turn((whole.width, 1), (whole.width, 1))
            return MixerSplit(own, in_rows, [columns], columns, share)
        case GatedDelta():
            return _split_gated_delta(whole, share)
    raise CannotSplitError(f"layers of the kind {type(whole).__name__}")


def _split_mamba2(whole: Mamba2, share: Share) -> MixerSplit:
    own = replace(
        whole,
        num_heads=share.count(whole.num_heads, "Mamba heads"),
        num_groups=share.count_or_one(whole.num_groups, "groups of Mamba heads"),
        norm_groups=whole.num_groups,
    )
    heads, groups = (whole.width, 1), (whole.num_groups, whole.state_size)
    in_rows = share.in_turn(heads, heads, groups, groups, (whole.num_heads, 1))
    conv_rows = share.in_turn(heads, groups, groups)
    return MixerSplit(own, in_rows, conv_rows, share.even(whole.width), share)


def _split_gated_delta(whole: GatedDelta, share: Share) -> MixerSplit:
    own = replace(
        whole,
        num_key_heads=share.count(whole.num_key_heads, "key heads of linear attention"),
        num_value_heads=share.count(whole.num_value_heads, "value heads of linear attention"),
    )
    values, gates = (whole.width, 1), (whole.num_value_heads, 1)
    keys = (whole.num_key_heads, whole.key_dim)
    in_rows = share.in_turn(keys, keys, values, values, gates, gates)
    conv_rows = share.in_turn(keys, keys, values)
    return MixerSplit(own, in_rows, conv_rows, share.even(whole.width), share, norm_is_whole=True)
