"""Mixture of experts: the choice of experts for each token (router) and their MLPs.

A pair is a token with one of its chosen experts. Pairs are numbered token * top_k + choice. All
shapes of launches depend on shapes of tensors only, and nothing is read back to the host, so that
CUDA graphs can capture a layer.

`experts` runs two products: gate and up with the activation fused, then down. `best_expert_tile`
chooses one of three ways to run them:

- Products of vectors, for few tokens: a program multiplies rows of one expert's weight by the
  vector of one pair. The down product also sums over the experts of its token. 2 kernels.
- Products of tiles, for few pairs: a program multiplies rows of one expert's weight by a tile of
  pairs of that expert. Each program finds the pairs of its tile in the list of all. 3 kernels.
- The same after a counting sort of the pairs by expert, for many pairs. 5 kernels.

An expert's number of pairs is known on the device only, so a launch has programs for the largest
possible number of tiles; those without a tile end at once. The kernels overlap with their
neighbours, see `_triton.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from aquifer.kernels._triton import (
    MIN_DOT,
    await_predecessor,
    constexpr,
    jit,
    jit_once,
    launch_options,
    pow2,
    release_successor,
    runs_triton,
    tensor,
    tl,
)
from aquifer.kernels.activation import activated
from aquifer.kernels.linear import linear_reference

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
"""How gate and up are combined: silu(gate) * up; gelu(gate) * up with the approximation by tanh; or
GPT-OSS's g * sigmoid(1.702 g) * (u + 1), where g = min(gate, 7) and u = up within [-7, 7]. Or
relu(up)^2, for experts without gates."""

CLAMP_LIMIT, CLAMP_SLOPE = 7.0, 1.702
"""Limit and slope of the clamped SwiGLU activation: 7 and 1.702 in the formula above."""


def has_gate(activation: Activation) -> bool:
    """Whether experts with this activation have gates."""
    return activation != "relu2"


_LEAST_KEY = -1e38  # of an expert, by which it is chosen: the sum of two is finite
_MIN_SUM = 1e-20  # added to the sum of the weights before a division, as in DeepSeek-V3

_SEARCH_ELEMENTS = 4096  # of a comparison of all pairs with a tile's places, in registers
_SORT_BLOCK = 2048  # pairs that a program of the sort looks at at once
_SORT_SHARES = 16  # programs of the sort that share an expert, where pairs are many
_SUM_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits become a choice of experts and their weights."""

    scoring: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    """`softmax`: over all experts. `softmax_of_chosen`: over the chosen ones, which are those with
    the largest logits. `sigmoid`: of each logit."""

    normalise: bool = False
    """Whether the weights of a token are divided by their sum."""

    num_groups: int = 1
    """Groups of equal size that experts are divided into, in order of their ids."""

    top_groups: int = 1
    """Groups that a token's experts may come from."""

    group_score: Literal["max", "best_two"] = "max"
    """Score of a group: its best expert's, or the sum of its two best."""

    scale: float = 1.0
    """Factor on the weights."""

    rounds_weights: bool = False
    """Whether the weights are rounded to the dtype of the logits."""

    def __post_init__(self) -> None:
        assert 1 <= self.top_groups <= self.num_groups


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Tiling of the products of experts."""

    pairs: int  # pairs of one expert that a program handles; 1: products of vectors
    rows: int  # rows of the weight: of down, or in equal parts of gate and up
    columns: int  # columns of the weight that are read at once
    num_warps: int
    num_stages: int = 1  # pipeline stages in shared memory; if pairs > 1
    group: int = 1  # tiles of pairs that run through the rows together, to share them in the cache
    sorts: bool = True  # whether pairs are sorted by expert first; if pairs > 1

    def __post_init__(self) -> None:
        assert self.pairs == 1 or (self.pairs >= MIN_DOT and self.rows >= 2 * MIN_DOT)
        assert self.rows >= 2


_VECTOR_TILE = ExpertTile(1, 2, 2048, 4)
_TILES = {
    16: ExpertTile(16, 64, 128, 4, 4),
    32: ExpertTile(32, 64, 128, 4, 4),
    64: ExpertTile(64, 128, 64, 4, 4, group=8),
    128: ExpertTile(128, 256, 64, 8, 3, group=8),
}
"""Default tiles by the number of pairs that a program handles. They need the sort."""

_FLOAT32_TILE = ExpertTile(32, 64, 32, 4, 2)
"""Tile for float32, which tensor cores do not multiply: the products take many registers."""


def route(
    logits: torch.Tensor,
    top_k: int,
    options: Routing,
    bias: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token, and weigh them; computed in float32.

    Args:
        logits: [tokens, experts] of any float dtype; any row stride.
        top_k: experts of a token.
        options: how they are chosen and weighed.
        bias: [experts] float32, added to the scores for the choice only; None to add nothing.
        lengths: [tokens] int64. Tokens of length 0 are padding and choose no experts, so that the
            weights of these need not be read. None if there is no padding.

    Returns:
        (ids of the experts [tokens, top_k] int32, the best one first, and the lowest id first among
        equals; weights [tokens, top_k] float32). Ids are valid whatever the logits are; those of
        padding are -1.
    """
    num_tokens, num_experts = logits.shape
    group_size = num_experts // options.num_groups
    assert group_size * options.num_groups == num_experts
    assert 1 <= top_k <= group_size * options.top_groups
    assert bias is None or bias.shape == (num_experts,)
    assert bias is None or options.scoring != "softmax_of_chosen"
    assert lengths is None or lengths.shape == (num_tokens,)
    if not runs_triton(logits):
        return route_reference(logits, top_k, options, bias, lengths)
    assert logits.stride(1) == 1
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
    assert lengths is None or (lengths.dtype == torch.int64 and lengths.is_contiguous())
    ids = logits.new_empty(num_tokens, top_k, dtype=torch.int32)
    weights = logits.new_empty(num_tokens, top_k, dtype=torch.float32)
    if num_tokens == 0:
        return ids, weights
    groups_pow2, group_pow2 = pow2(options.num_groups), pow2(group_size)
    _route_kernel[(num_tokens,)](
        logits, bias, lengths, ids, weights, logits.stride(0), options.scale,
        num_groups=options.num_groups, group_size=group_size, groups_pow2=groups_pow2,
        group_pow2=group_pow2, top_groups=options.top_groups, top_k=top_k, top_k_pow2=pow2(top_k),
        scoring=options.scoring, group_score=options.group_score, normalise=options.normalise,
        by_logits=_chooses_by_logits(options, bias), rounds_weights=options.rounds_weights,
        least_key=_LEAST_KEY, min_sum=_MIN_SUM, has_bias=bias is not None,
        has_lengths=lengths is not None,
        num_warps=1 if groups_pow2 * group_pow2 <= 512 else 4, **launch_options(logits.device),
    )  # fmt: skip
    return ids, weights


def route_reference(
    logits: torch.Tensor,
    top_k: int,
    options: Routing,
    bias: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` in plain torch."""
    wide = logits.float()
    scores = {
        "softmax": lambda: wide.softmax(-1),
        "softmax_of_chosen": lambda: wide,
        "sigmoid": wide.sigmoid,
    }[options.scoring]()
    key = wide if _chooses_by_logits(options, bias) else scores
    if bias is not None:
        key = key + bias
    key = key.clamp(min=_LEAST_KEY)
    if options.num_groups > 1:
        grouped = key.unflatten(1, (options.num_groups, -1))
        if options.group_score == "max":
            group_scores = grouped.amax(2)
        else:
            group_scores = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
        is_open = torch.zeros_like(group_scores, dtype=torch.bool)
        is_open.scatter_(1, _best(group_scores, options.top_groups), True)
        key = grouped.masked_fill(~is_open.unsqueeze(2), -torch.inf).flatten(1)
    ids = _best(key, top_k)
    weights = scores.gather(1, ids)
    if options.scoring == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if options.normalise:
        weights = weights / (weights.sum(1, keepdim=True) + _MIN_SUM)
    weights = weights * options.scale
    if options.rounds_weights:
        weights = weights.to(logits.dtype).float()
    if lengths is not None:
        ids = ids.masked_fill(lengths.unsqueeze(1) == 0, -1)
    return ids.to(torch.int32), weights


def _best(scores: torch.Tensor, num: int) -> torch.Tensor:
    """Return the indices of the largest of each row; the lowest index first among equals."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :num]


def _chooses_by_logits(options: Routing, bias: torch.Tensor | None) -> bool:
    """Whether the order of the logits is that of the scores.

    It is then used, since it does not depend on how a device rounds the scores.
    """
    is_alone = options.num_groups == 1 or options.group_score == "max"
    return options.scoring == "softmax_of_chosen" or (bias is None and is_alone)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: Activation,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    tile: ExpertTile | None = None,
) -> torch.Tensor:
    """Sum weight * down(activation(gate(x), up(x))) over the chosen experts of each token.

    Without gates (`has_gate`), `gate_up` and its biases have the rows of up alone.

    Rounded to the dtype: gate and up, the activation (silu and gelu before they are multiplied
    too), the down product of each expert. The weighted sum is computed in float32, in order of
    choice, and rounded once. Results do not depend on other tokens except through the tile that is
    chosen for their number.

    Args:
        x: [tokens, hidden]; any row stride.
        gate_up: [experts, 2 width, hidden], contiguous, gate before up.
        down: [experts, hidden, width], contiguous.
        expert_ids: [tokens, top_k] int32. An id that is no expert's, such as -1, chooses none.
        weights: [tokens, top_k] float32.
        activation: how gate and up are combined.
        gate_up_bias: [experts, 2 width], contiguous, or None.
        down_bias: [experts, hidden], contiguous, or None.
        interleaved: rows of gate_up, and its biases, alternate between gate and up.
        tile: on a GPU, replaces `best_expert_tile`; for benchmarks and tests.

    Returns:
        [tokens, hidden], contiguous; zeros for a token without experts.
    """
    num_tokens, hidden = x.shape
    num_experts, _, width = down.shape
    top_k = expert_ids.shape[1]
    up_rows = 2 * width if has_gate(activation) else width
    assert gate_up.shape == (num_experts, up_rows, hidden)
    assert down.shape == (num_experts, hidden, width)
    assert expert_ids.shape == weights.shape == (num_tokens, top_k)
    assert gate_up_bias is None or gate_up_bias.shape == (num_experts, up_rows)
    assert down_bias is None or down_bias.shape == (num_experts, hidden)
    assert x.dtype == gate_up.dtype == down.dtype
    if not runs_triton(x):
        return experts_reference(
            x, gate_up, down, expert_ids, weights, activation, gate_up_bias, down_bias,
            interleaved=interleaved,
        )  # fmt: skip
    assert x.stride(1) == 1
    assert all(
        each is None or each.is_contiguous()
        for each in (gate_up, down, expert_ids, weights, gate_up_bias, down_bias)
    )
    assert expert_ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert 2 * width * hidden < 2**31, "offsets within an expert are 32-bit"
    out = x.new_empty(num_tokens, hidden)
    if num_tokens == 0:
        return out
    layer = _Layer(
        gate_up, down, gate_up_bias, down_bias, expert_ids, weights, activation, interleaved
    )
    if tile is None:
        tile = best_expert_tile(num_tokens, top_k, num_experts)
        if tile.pairs > 1 and x.dtype == torch.float32:
            tile = _FLOAT32_TILE
    if tile.pairs == 1:
        _run_vectors(layer, x, out, tile)
    else:
        _run_tiles(layer, x, out, tile)
    return out


def experts_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: Activation,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
) -> torch.Tensor:
    """`experts` in plain torch: one pair of products for each expert that has tokens."""
    num_tokens, top_k = expert_ids.shape
    num_experts = len(down)
    flat = expert_ids.flatten().long()
    flat = flat.where((flat >= 0) & (flat < num_experts), num_experts)
    products = x.new_zeros(num_tokens * top_k, x.shape[1])
    by_expert = flat.argsort(stable=True).split(flat.bincount(minlength=num_experts + 1).tolist())
    for expert, pairs in enumerate(by_expert[:num_experts]):
        if not len(pairs):
            continue
        both = linear_reference(
            x[pairs // top_k],
            gate_up[expert],
            None if gate_up_bias is None else gate_up_bias[expert],
        )
        if not has_gate(activation):
            between = activated(both, activation)
        else:
            gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=1)
            between = activate_reference(gate, up, activation).contiguous()
        products[pairs] = linear_reference(
            between,
            down[expert],
            None if down_bias is None else down_bias[expert],
        )
    wide = products.unflatten(0, (num_tokens, top_k)).float()
    is_chosen = (flat < num_experts).view(num_tokens, top_k)
    factors = weights.masked_fill(~is_chosen, 0.0).unsqueeze(2)
    total = torch.zeros_like(wide[:, 0])
    for choice in range(top_k):
        total += factors[:, choice] * wide[:, choice]
    return total.to(x.dtype)


def activate_reference(
    gate: torch.Tensor, up: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """Combine gate and up; see `Activation`.

    With silu and gelu each operation is rounded to the dtype as in torch; the clamped activation
    is computed in float32 and rounded once.
    """
    if activation != "clamped_swiglu":
        return activated(gate, activation) * up
    gate_wide = gate.float().clamp(max=CLAMP_LIMIT)
    up_wide = up.float().clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    wide = gate_wide * torch.sigmoid(CLAMP_SLOPE * gate_wide) * (up_wide + 1)
    return wide.to(gate.dtype)


def best_expert_tile(num_tokens: int, top_k: int, num_experts: int) -> ExpertTile:
    """Return the tile that `experts` uses on a GPU.

    Vectors, where pairs of the same expert are so rare that it does not pay to look for them. Else
    tiles of as many pairs as an expert has on average, and half as many more: an expert whose pairs
    fit one tile has its weight read once.
    """
    num_pairs = num_tokens * top_k
    if num_tokens == 1 or num_pairs <= num_experts // 4:
        return _VECTOR_TILE
    tiles = _TILES[min(pow2(-(-3 * num_pairs // (2 * num_experts)), MIN_DOT), 128)]
    if tiles.pairs * pow2(num_pairs) <= _SEARCH_ELEMENTS:
        return _searching(tiles)
    return tiles


def expert_tiles(num_tokens: int, top_k: int, num_experts: int) -> tuple[ExpertTile, ...]:
    """Return the tiles that are worth measuring, `best_expert_tile` among them."""
    num_pairs = num_tokens * top_k
    vectors = (
        _VECTOR_TILE,
        ExpertTile(1, 2, 512, 2),
        ExpertTile(1, 4, 512, 4),
        ExpertTile(1, 4, 1024, 8),
        ExpertTile(1, 8, 512, 4),
    )
    few = (
        _TILES[16],
        ExpertTile(16, 32, 256, 4, 4),
        ExpertTile(16, 64, 256, 4, 3),
        ExpertTile(16, 128, 64, 4, 5),
        ExpertTile(16, 128, 128, 4, 3),
        _TILES[32],
        ExpertTile(32, 128, 64, 4, 4),
        ExpertTile(32, 128, 64, 4, 4, group=2),
    )
    many = (
        _TILES[64],
        ExpertTile(64, 128, 128, 4, 3, group=8),
        ExpertTile(64, 256, 64, 8, 3, group=8),
        _TILES[128],
        ExpertTile(128, 128, 64, 8, 3, group=8),
        ExpertTile(128, 128, 64, 4, 4, group=8),
        ExpertTile(128, 256, 64, 8, 3, group=4),
        ExpertTile(128, 256, 64, 8, 3, group=16),
        ExpertTile(128, 256, 64, 8, 4, group=8),
        ExpertTile(128, 256, 32, 8, 4, group=8),
        ExpertTile(256, 128, 64, 8, 3, group=4),
    )
    candidates: tuple[ExpertTile, ...] = vectors if num_pairs <= 2 * num_experts else ()
    if num_pairs <= 32 * num_experts:
        searching = [
            _searching(tile) for tile in few if tile.pairs * pow2(num_pairs) <= _SEARCH_ELEMENTS
        ]
        candidates += (*searching, *few)
    if num_pairs > 16 * num_experts:
        candidates += many
    return candidates


def _searching(tile: ExpertTile) -> ExpertTile:
    """Return the tile without the sort: each program finds its pairs."""
    return replace(tile, sorts=False)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The tensors of a layer and of its choice; see `experts`."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    expert_ids: torch.Tensor
    weights: torch.Tensor
    activation: Activation
    interleaved: bool

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return len(self.down)

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return self.expert_ids.shape[1]

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and an expert."""
        return self.expert_ids.numel()

    @property
    def width(self) -> int:
        """Elements of gate, and of up."""
        return self.down.shape[2]

    @property
    def gated(self) -> bool:
        """Whether experts have gates."""
        return has_gate(self.activation)

    @property
    def row_step(self) -> int:
        """Rows of gate_up from one of gate to the next."""
        return 2 if self.interleaved and self.gated else 1

    @property
    def up_offset(self) -> int:
        """Rows of gate_up from one of gate to its counterpart of up."""
        return 1 if self.interleaved else self.width


def _run_vectors(layer: _Layer, x: torch.Tensor, out: torch.Tensor, tile: ExpertTile) -> None:
    """Run the kernels for few tokens."""
    num_tokens, hidden = x.shape
    width, options = layer.width, launch_options(x.device)
    activated = x.new_empty(layer.num_pairs, width)
    rows = tile.rows // 2 if layer.gated else tile.rows
    _gate_up_vector_kernel[(-(-width // rows), layer.num_pairs)](
        x, layer.gate_up, layer.gate_up_bias, layer.expert_ids, activated, layer.num_experts,
        width, x.stride(0), layer.up_offset,
        row_step=layer.row_step, top_k=layer.top_k, num_in=hidden, rows=rows,
        columns=min(pow2(hidden, MIN_DOT), tile.columns), gated=layer.gated,
        activation=layer.activation, limit=CLAMP_LIMIT, slope=CLAMP_SLOPE,
        has_bias=layer.gate_up_bias is not None, num_warps=tile.num_warps, **options,
    )  # fmt: skip
    columns = min(pow2(width, MIN_DOT), tile.columns)
    _down_vector_kernel[(-(-hidden // tile.rows), num_tokens)](
        activated, layer.down, layer.down_bias, layer.expert_ids, layer.weights, out,
        layer.num_experts, hidden,
        top_k=layer.top_k, num_in=width, rows=tile.rows, columns=columns,
        parts=-(-width // columns), has_bias=layer.down_bias is not None,
        num_warps=tile.num_warps, **options,
    )  # fmt: skip


def _run_tiles(layer: _Layer, x: torch.Tensor, out: torch.Tensor, tile: ExpertTile) -> None:
    """Run the kernels for tiles of pairs."""
    num_tokens, hidden = x.shape
    num_pairs = layer.num_pairs
    order = tile_experts = None
    num_tiles = num_pairs  # a tile belongs to its first pair
    if tile.sorts:
        # An expert with pairs has at most (pairs - 1) empty places in its last tile.
        num_most = min(num_pairs, layer.num_experts)
        num_tiles = (num_pairs + num_most * (tile.pairs - 1)) // tile.pairs
        order, tile_experts = _sort(layer, tile.pairs, num_tiles)
    activated = x.new_empty(num_pairs, layer.width)
    _run_product(
        x, layer.gate_up, layer.gate_up_bias, activated, layer, tile, num_tiles, order,
        tile_experts, is_first=True,
    )  # fmt: skip
    products = x.new_empty(num_pairs, hidden)
    _run_product(
        activated, layer.down, layer.down_bias, products, layer, tile, num_tiles, order,
        tile_experts, is_first=False,
    )  # fmt: skip
    _sum_kernel[(num_tokens, -(-hidden // _SUM_COLUMNS))](
        products, layer.expert_ids, layer.weights, out, layer.num_experts, hidden,
        top_k=layer.top_k, block=_SUM_COLUMNS, num_warps=4, **launch_options(x.device),
    )  # fmt: skip


def _sort(layer: _Layer, pairs: int, num_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the pairs by expert, and fill each expert's last tile with `num_pairs`.

    Args:
        layer: the layer and its choice.
        pairs: pairs of a tile.
        num_tiles: the largest possible number of tiles.

    Returns:
        (pairs in order [num_tiles * pairs] int32, only defined for tiles that an expert has; expert
        of each tile [num_tiles] int32, or -1).
    """
    num_pairs, num_experts = layer.num_pairs, layer.num_experts
    shares = 1 if num_pairs <= 4 * _SORT_BLOCK else _SORT_SHARES
    counts, order, tile_experts = (
        layer.expert_ids.new_empty(size)
        for size in (shares * num_experts, num_tiles * pairs, num_tiles)
    )
    options = launch_options(layer.expert_ids.device)
    _count_kernel[(num_experts, shares)](
        layer.expert_ids, counts, num_pairs, block=_SORT_BLOCK, num_warps=8, **options
    )
    _order_kernel[(num_experts, shares)](
        layer.expert_ids, counts, order, tile_experts, num_pairs, num_tiles,
        num_experts=num_experts, experts_pow2=pow2(num_experts), shares=shares, pairs=pairs,
        block=_SORT_BLOCK, num_warps=8, **options,
    )  # fmt: skip
    return order, tile_experts


def _run_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    layer: _Layer,
    tile: ExpertTile,
    num_tiles: int,
    order: torch.Tensor | None,
    tile_experts: torch.Tensor | None,
    *,
    is_first: bool,
) -> None:
    """Multiply rows of x by their experts' weights.

    Args:
        x: [tokens, in] in the first product, else [pairs, in].
        weight: [experts, rows, in].
        bias: [experts, rows] or None.
        out: [pairs, rows], or half of the rows if the weight is gate and up; rows of pairs without
            an expert are left.
        layer: the layer and its choice.
        tile: the tiling.
        num_tiles: number of tiles of pairs that programs are launched for.
        order: pairs in order of experts, or None if programs are to find their pairs.
        tile_experts: expert of each tile, or None.
        is_first: the weight is gate and up, or up, to which the activation is applied.
    """
    gated = is_first and layer.gated
    num_in, num_out = x.shape[1], out.shape[1]
    columns = min(pow2(num_in, MIN_DOT), tile.columns)
    rows = tile.rows // 2 if gated else tile.rows
    _product_kernel[(num_tiles * -(-num_out // rows),)](
        x, weight, bias, out, layer.expert_ids, order, tile_experts, layer.num_pairs, num_tiles,
        layer.num_experts, num_out, num_in, x.stride(0), layer.up_offset,
        row_step=layer.row_step if gated else 1, pairs_per_row=layer.top_k if is_first else 1,
        pairs=tile.pairs, rows=rows, columns=columns, group=tile.group,
        search_pairs=0 if tile.sorts else pow2(layer.num_pairs, 64), is_first=is_first, gated=gated,
        activation=layer.activation, limit=CLAMP_LIMIT, slope=CLAMP_SLOPE,
        has_bias=bias is not None, even=num_in % columns == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(x.device),
    )  # fmt: skip


@jit_once(indices=("lengths",))
def _route_kernel(
    logits: tensor,
    bias: tensor,
    lengths: tensor,
    expert_ids: tensor,
    weights: tensor,
    logits_stride: tensor,
    scale: tensor,
    num_groups: constexpr,
    group_size: constexpr,
    groups_pow2: constexpr,
    group_pow2: constexpr,
    top_groups: constexpr,
    top_k: constexpr,
    top_k_pow2: constexpr,
    scoring: constexpr,
    group_score: constexpr,
    normalise: constexpr,
    by_logits: constexpr,
    rounds_weights: constexpr,
    least_key: constexpr,
    min_sum: constexpr,
    has_bias: constexpr,
    has_lengths: constexpr,
    overlaps: constexpr,
) -> None:
    """One program per token. Places are [groups, experts of a group], each padded, in one row."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, groups_pow2 * group_pow2)
    member = place % group_pow2
    expert = place // group_pow2 * group_size + member
    inside = (place // group_pow2 < num_groups) & (member < group_size)
    await_predecessor(overlaps)
    release_successor(overlaps)
    wide = tl.load(logits + token * logits_stride + expert, mask=inside, other=0.0).to(tl.float32)
    wide = tl.where(inside, wide, float("-inf"))
    if scoring == "softmax":
        powers = tl.exp(wide - tl.max(wide, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    elif scoring == "sigmoid":
        scores = tl.sigmoid(wide)
    else:
        scores = wide
    key = wide if by_logits else scores
    if has_bias:
        key += tl.load(bias + expert, mask=inside, other=0.0)
    # What is taken, closed or no expert has less, also where logits are infinite or NaN. Not by a
    # maximum, which may be NaN then.
    key = tl.where(key > least_key, key, least_key)
    key = tl.where(inside, key, float("-inf"))
    if num_groups > 1:
        grouped = tl.reshape(key, [groups_pow2, group_pow2])
        group_scores = tl.max(grouped, axis=1)
        if group_score == "best_two" and group_size > 1:
            first = tl.argmax(grouped, axis=1)
            is_first = tl.arange(0, group_pow2)[None, :] == first[:, None]
            group_scores += tl.max(tl.where(is_first, float("-inf"), grouped), axis=1)
        group = tl.arange(0, groups_pow2)
        is_open = tl.zeros([groups_pow2], tl.int32)
        for _ in range(top_groups):
            best_group = tl.argmax(group_scores, axis=0)
            is_open = tl.where(group == best_group, 1, is_open)
            group_scores = tl.where(group == best_group, float("-inf"), group_scores)
        grouped = tl.where(is_open[:, None] != 0, grouped, float("-inf"))
        key = tl.reshape(grouped, [groups_pow2 * group_pow2])
    choice = tl.arange(0, top_k_pow2)
    ids = tl.zeros([top_k_pow2], tl.int32)
    chosen = tl.full([top_k_pow2], float("-inf"), tl.float32)
    for index in range(top_k):
        best_place = tl.argmax(key, axis=0)
        is_best = place == best_place
        best_expert = tl.sum(tl.where(is_best, expert, 0), axis=0)
        ids = tl.where(choice == index, best_expert, ids)
        score = tl.sum(tl.where(is_best, scores, 0.0), axis=0)
        chosen = tl.where(choice == index, score, chosen)
        key = tl.where(is_best, float("-inf"), key)
    is_choice = choice < top_k
    if scoring == "softmax_of_chosen":
        powers = tl.exp(chosen - tl.max(chosen, axis=0))
        chosen = powers / tl.sum(powers, axis=0)
    if normalise:
        chosen = chosen / (tl.sum(tl.where(is_choice, chosen, 0.0), axis=0) + min_sum)
    chosen *= scale
    if rounds_weights:
        chosen = chosen.to(logits.dtype.element_ty).to(tl.float32)
    if has_lengths:
        ids = tl.where(tl.load(lengths + token) == 0, -1, ids)
    tl.store(expert_ids + token * top_k + choice, ids, mask=is_choice)
    tl.store(weights + token * top_k + choice, chosen, mask=is_choice)


@jit
def _gate_up_vector_kernel(
    x: tensor,
    weight: tensor,
    bias: tensor,
    expert_ids: tensor,
    out: tensor,
    num_experts: tensor,
    width: tensor,
    x_stride: tensor,
    up_offset: tensor,
    row_step: constexpr,
    top_k: constexpr,
    num_in: constexpr,
    rows: constexpr,
    columns: constexpr,
    gated: constexpr,
    activation: constexpr,
    limit: constexpr,
    slope: constexpr,
    has_bias: constexpr,
    overlaps: constexpr,
) -> None:
    """Each program handles `rows` rows of gate and as many of up for one pair; or rows of up."""
    pair = tl.program_id(1)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)[None, :]
    inside = row < width
    x_row = x + (pair // top_k).to(tl.int64) * x_stride
    await_predecessor(overlaps)
    expert = tl.load(expert_ids + pair)
    if (expert < 0) | (expert >= num_experts):
        return
    first = expert.to(tl.int64) * width
    if gated:
        first *= 2
    gate_rows = weight + first * num_in + (row * row_step)[:, None] * num_in  # of up, without gates
    up_rows = gate_rows + up_offset * num_in
    gate_w = _rows_tile(gate_rows, column, inside, num_in, columns)
    up_w = gate_w
    if gated:
        up_w = _rows_tile(up_rows, column, inside, num_in, columns)
    v = tl.load(x_row + column, mask=column < num_in, other=0.0).to(tl.float32)
    gate_sums = tl.zeros([rows, columns], tl.float32)
    up_sums = tl.zeros([rows, columns], tl.float32)
    for start in range(columns, num_in, columns):
        place = start + column
        next_gate_w = _rows_tile(gate_rows, place, inside, num_in, columns)
        next_up_w = next_gate_w
        if gated:
            next_up_w = _rows_tile(up_rows, place, inside, num_in, columns)
        gate_sums += gate_w.to(tl.float32) * v
        if gated:
            up_sums += up_w.to(tl.float32) * v
        gate_w = next_gate_w
        up_w = next_up_w
        v = tl.load(x_row + place, mask=place < num_in, other=0.0).to(tl.float32)
    gate_sums += gate_w.to(tl.float32) * v
    release_successor(overlaps)
    gate = tl.sum(gate_sums, axis=1)
    dtype = out.dtype.element_ty
    if has_bias:
        gate_bias = bias + first + row * row_step
        gate += tl.load(gate_bias, mask=inside, other=0.0).to(tl.float32)
    if gated:
        up_sums += up_w.to(tl.float32) * v
        up = tl.sum(up_sums, axis=1)
        if has_bias:
            up += tl.load(gate_bias + up_offset, mask=inside, other=0.0).to(tl.float32)
        result = _activated(gate.to(dtype), up.to(dtype), activation, limit, slope)
    else:
        result = _squared(gate.to(dtype))
    tl.store(out + pair.to(tl.int64) * width + row, result, mask=inside)


@jit
def _down_vector_kernel(
    activated: tensor,
    weight: tensor,
    bias: tensor,
    expert_ids: tensor,
    weights: tensor,
    out: tensor,
    num_experts: tensor,
    num_out: tensor,
    top_k: constexpr,
    num_in: constexpr,
    rows: constexpr,
    columns: constexpr,
    parts: constexpr,
    has_bias: constexpr,
    overlaps: constexpr,
) -> None:
    """Each program handles `rows` rows of the weights of all experts of one token.

    A row has `parts` tiles of columns. The next tile is loaded while one is multiplied.

    Pre-condition: the predecessor does not write `expert_ids`, of which the first is read before
    the wait.
    """
    token = tl.program_id(1)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)[None, :]
    inside = row < num_out
    offsets = row[:, None] * num_in
    end = (token + 1) * top_k  # of the token's pairs
    expert = tl.load(expert_ids + token * top_k, cache_modifier=".cg")
    is_chosen = (expert >= 0) & (expert < num_experts)
    weight_rows = weight + expert.to(tl.int64) * num_out * num_in + offsets
    num_rows = tl.where(is_chosen, num_out, 0)  # nothing is loaded for an absent expert
    w = _rows_tile(weight_rows, column, row < num_rows, num_in, columns)
    await_predecessor(overlaps)
    total = tl.zeros([rows], tl.float32)
    sums = tl.zeros([rows, columns], tl.float32)
    for step in range(top_k * parts):
        pair = token * top_k + step // parts
        following = step + 1
        # After the last step, no tile is loaded.
        next_pair = token * top_k + following // parts
        next_expert = tl.load(expert_ids + next_pair, mask=next_pair < end, other=-1)
        next_is_chosen = (next_expert >= 0) & (next_expert < num_experts)
        weight_rows = weight + next_expert.to(tl.int64) * num_out * num_in + offsets
        next_place = following % parts * columns + column
        next_num_rows = tl.where(next_is_chosen, num_out, 0)
        next_w = _rows_tile(weight_rows, next_place, row < next_num_rows, num_in, columns)
        place = step % parts * columns + column
        v_row = activated + pair.to(tl.int64) * num_in
        num_columns = tl.where(num_rows > 0, num_in, 0)
        v = tl.load(v_row + place, mask=place < num_columns, other=0.0)
        sums += w.to(tl.float32) * v.to(tl.float32)
        if following % parts == 0:
            product = tl.sum(sums, axis=1)
            if has_bias:
                expert_bias = bias + expert.to(tl.int64) * num_out
                own = tl.load(expert_bias + row, mask=row < num_rows, other=0.0)
                product += own.to(tl.float32)
            factor = tl.load(weights + pair, mask=num_rows > 0, other=0.0)
            total += factor * product.to(out.dtype.element_ty).to(tl.float32)
            sums = tl.zeros([rows, columns], tl.float32)
        w = next_w
        expert = next_expert
        num_rows = next_num_rows
    release_successor(overlaps)
    result = total.to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * num_out + row, result, mask=inside)


@jit
def _rows_tile(
    rows_begin: tensor, place: tensor, inside: tensor, num_in: constexpr, columns: constexpr
) -> tensor:
    """Load [rows, columns] of a weight; zeros for rows that are not inside."""
    mask = inside[:, None]
    if num_in % columns != 0:
        mask = mask & (place < num_in)
    return tl.load(rows_begin + place, mask=mask, other=0.0)


@jit
def _activated(
    gate: tensor, up: tensor, activation: constexpr, limit: constexpr, slope: constexpr
) -> tensor:
    """Combine gate and up, rounded like `activate_reference`."""
    wide = gate.to(tl.float32)
    up_wide = up.to(tl.float32)
    if activation == "clamped_swiglu":
        wide = tl.minimum(wide, limit)
        up_wide = tl.minimum(tl.maximum(up_wide, -limit), limit)
        wide = wide * tl.sigmoid(slope * wide) * (up_wide + 1.0)
    else:
        if activation == "silu":
            wide = wide * tl.sigmoid(wide)
        else:
            # (1 + tanh(z)) / 2 = sigmoid(2 z), where z = sqrt(2 / pi) (x + 0.044715 x**3)
            wide = wide * tl.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
        wide = wide.to(gate.dtype).to(tl.float32) * up_wide
    return wide.to(gate.dtype)


@jit
def _squared(up: tensor) -> tensor:
    """relu(up)^2, rounded."""
    wide = tl.maximum(up.to(tl.float32), 0.0)
    return (wide * wide).to(up.dtype)


@jit_once(counts=("num_pairs",))
def _count_kernel(
    expert_ids: tensor, counts: tensor, num_pairs: tensor, block: constexpr, overlaps: constexpr
) -> None:
    """Each program counts one expert's pairs in its share of all; counts are [shares, experts]."""
    expert = tl.program_id(0)
    share = tl.cdiv(num_pairs, tl.num_programs(1) * block) * block
    begin = tl.program_id(1) * share
    await_predecessor(overlaps)
    release_successor(overlaps)
    found = tl.zeros([block], tl.int32)
    for start in range(begin, tl.minimum(begin + share, num_pairs), block):
        pair = start + tl.arange(0, block)
        ids = tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1)
        found += (ids == expert).to(tl.int32)
    tl.store(counts + tl.program_id(1) * tl.num_programs(0) + expert, tl.sum(found, axis=0))


@jit_once(counts=("num_pairs", "num_tiles"))
def _order_kernel(
    expert_ids: tensor,
    counts: tensor,
    order: tensor,
    tile_experts: tensor,
    num_pairs: tensor,
    num_tiles: tensor,
    num_experts: constexpr,
    experts_pow2: constexpr,
    shares: constexpr,
    pairs: constexpr,
    block: constexpr,
    overlaps: constexpr,
) -> None:
    """Each program puts one expert's pairs of its share of all into the expert's tiles.

    Pairs of an expert stay in order. The program of the expert's last share also fills the last
    tile, and names the expert for its tiles; that of expert 0 marks the tiles that are left.
    """
    expert = tl.program_id(0)
    own_share = tl.program_id(1)
    share = tl.cdiv(num_pairs, shares * block) * block
    begin = own_share * share
    each = tl.arange(0, experts_pow2)
    other_share = tl.arange(0, shares)
    await_predecessor(overlaps)
    release_successor(overlaps)
    found = tl.load(
        counts + other_share[:, None] * num_experts + each[None, :],
        mask=(each < num_experts)[None, :],
        other=0,
    )
    sizes = tl.sum(found, axis=0)  # of all experts
    tiles = (sizes + pairs - 1) // pairs
    first_tile = tl.sum(tl.where(each < expert, tiles, 0), axis=0)
    is_own = each == expert
    size = tl.sum(tl.where(is_own, sizes, 0), axis=0)
    earlier = tl.where(other_share[:, None] < own_share, found, 0)
    num_before = tl.sum(tl.where(is_own, tl.sum(earlier, axis=0), 0), axis=0)
    own_order = order + first_tile * pairs
    for start in range(begin, tl.minimum(begin + share, num_pairs), block):
        pair = start + tl.arange(0, block)
        ids = tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1)
        is_found = ids == expert
        rank = num_before + tl.cumsum(is_found.to(tl.int32), axis=0) - 1
        tl.store(own_order + rank, pair, mask=is_found)
        num_before += tl.sum(is_found.to(tl.int32), axis=0)
    if own_share == shares - 1:
        own_tiles = (size + pairs - 1) // pairs
        place = size + tl.arange(0, pairs)
        nothing = tl.zeros([pairs], tl.int32) + num_pairs
        tl.store(own_order + place, nothing, mask=place < own_tiles * pairs)
        for start in range(0, own_tiles, block):
            tile = start + tl.arange(0, block)
            name = tl.zeros([block], tl.int32) + expert
            tl.store(tile_experts + first_tile + tile, name, mask=tile < own_tiles)
        if expert == 0:
            for start in range(tl.sum(tiles, axis=0), num_tiles, block):
                tile = start + tl.arange(0, block)
                none = tl.full([block], -1, tl.int32)
                tl.store(tile_experts + tile, none, mask=tile < num_tiles)


@jit_once(counts=("num_pairs", "num_tiles"))
def _product_kernel(
    x: tensor,
    weight: tensor,
    bias: tensor,
    out: tensor,
    expert_ids: tensor,
    order: tensor,
    tile_experts: tensor,
    num_pairs: tensor,
    num_tiles: tensor,
    num_experts: tensor,
    num_out: tensor,
    num_in: tensor,
    x_stride: tensor,
    up_offset: tensor,
    row_step: constexpr,
    pairs_per_row: constexpr,
    pairs: constexpr,
    rows: constexpr,
    columns: constexpr,
    group: constexpr,
    search_pairs: constexpr,
    is_first: constexpr,
    gated: constexpr,
    activation: constexpr,
    limit: constexpr,
    slope: constexpr,
    has_bias: constexpr,
    even: constexpr,
    overlaps: constexpr,
) -> None:
    """Each program multiplies a tile of rows of an expert's weight by a tile of its pairs.

    The weight is the left factor, as in `linear`. With `gated`, a tile has `rows` rows of gate and
    the corresponding rows of up.

    Programs of `group` tiles of pairs take turns at each tile of rows, so that tiles of one expert
    share its rows in the L2 cache.
    """
    group_programs = group * tl.cdiv(num_out, rows)
    first_tile = tl.program_id(0) // group_programs * group
    group_tiles = tl.minimum(num_tiles - first_tile, group)
    within_group = tl.program_id(0) % group_programs
    tile = first_tile + within_group % group_tiles
    row = within_group // group_tiles * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    if is_first:
        await_predecessor(overlaps)
        expert, pair = _find_pairs(
            expert_ids, order, tile_experts, tile, num_pairs, pairs, search_pairs
        )
    else:
        # These were written before the predecessor, which is the first product.
        expert, pair = _find_pairs(
            expert_ids, order, tile_experts, tile, num_pairs, pairs, search_pairs
        )
        await_predecessor(overlaps)
    if (expert < 0) | (expert >= num_experts):
        return
    inside = (row < num_out)[:, None]
    present = (pair < num_pairs)[None, :]
    first_row = expert.to(tl.int64) * num_out
    if gated:
        first_row *= 2
    weight_tile = weight + first_row * num_in + (row * row_step)[:, None] * num_in + column[None, :]
    up_tile = weight_tile + up_offset * num_in
    x_tile = x + (pair // pairs_per_row).to(tl.int64)[None, :] * x_stride + column[:, None]
    sums = tl.zeros([rows, pairs], tl.float32)
    up_sums = tl.zeros([rows, pairs], tl.float32)
    for start in range(0, num_in, columns):
        w_mask = inside
        x_mask = present
        if not even:
            within = start + column < num_in
            w_mask = inside & within[None, :]
            x_mask = present & within[:, None]
        v = tl.load(x_tile + start, mask=x_mask, other=0.0)
        w = tl.load(weight_tile + start, mask=w_mask, other=0.0)
        sums = tl.dot(w, v, sums, input_precision="ieee")
        if gated:
            w = tl.load(up_tile + start, mask=w_mask, other=0.0)
            up_sums = tl.dot(w, v, up_sums, input_precision="ieee")
    release_successor(overlaps)
    dtype = out.dtype.element_ty
    if has_bias:
        bias_row = bias + first_row + row * row_step
        sums += tl.load(bias_row, mask=row < num_out, other=0.0).to(tl.float32)[:, None]
    result = sums.to(dtype)
    if gated:
        if has_bias:
            up_row = bias_row + up_offset
            up_sums += tl.load(up_row, mask=row < num_out, other=0.0).to(tl.float32)[:, None]
        result = _activated(result, up_sums.to(dtype), activation, limit, slope)
    elif is_first:
        result = _squared(result)
    out_tile = out + pair.to(tl.int64)[None, :] * num_out + row[:, None]
    tl.store(out_tile, result, mask=inside & present)


@jit
def _find_pairs(
    expert_ids: tensor,
    order: tensor,
    tile_experts: tensor,
    tile: tensor,
    num_pairs: tensor,
    pairs: constexpr,
    search_pairs: constexpr,
) -> tuple[tensor, tensor]:
    """Return the expert of a tile, or -1, and its pairs [pairs], the last of which are `num_pairs`.

    Without a sort (`search_pairs`, at least the number of pairs, is not 0) there is a tile for each
    pair. It has an expert if the pair is its expert's first, or follows a multiple of `pairs`
    others of its expert, and then has the expert's pairs from this on.

    All is read through the L2 cache, so that it may be read before the wait.
    """
    place = tl.arange(0, pairs)
    if search_pairs == 0:
        expert = tl.load(tile_experts + tile, cache_modifier=".cg")
        pair = tl.load(order + tile * pairs + place, cache_modifier=".cg")
    else:
        each = tl.arange(0, search_pairs)
        ids = tl.load(expert_ids + each, mask=each < num_pairs, other=-1, cache_modifier=".cg")
        expert = tl.load(expert_ids + tile, cache_modifier=".cg")
        is_same = ids == expert
        num_before = tl.sum((is_same & (each < tile)).to(tl.int32), axis=0)
        rank = tl.cumsum(is_same.to(tl.int32), axis=0) - 1 - num_before  # 0 for the tile's pair
        is_at = is_same[None, :] & (rank[None, :] == place[:, None])
        pair = tl.min(tl.where(is_at, each[None, :], num_pairs), axis=1)
        expert = tl.where(num_before % pairs == 0, expert, -1)
    return expert, pair


@jit
def _sum_kernel(
    products: tensor,
    expert_ids: tensor,
    weights: tensor,
    out: tensor,
    num_experts: tensor,
    n: tensor,
    top_k: constexpr,
    block: constexpr,
    overlaps: constexpr,
) -> None:
    """Each program sums the weighted products of one token, in order of choice."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < n
    await_predecessor(overlaps)
    release_successor(overlaps)
    total = tl.zeros([block], tl.float32)
    for choice in tl.static_range(top_k):
        pair = token * top_k + choice
        expert = tl.load(expert_ids + pair)
        is_chosen = (expert >= 0) & (expert < num_experts)
        factor = tl.load(weights + pair, mask=is_chosen, other=0.0)
        num_columns = tl.where(is_chosen, n, 0)
        product = tl.load(products + pair * n + column, mask=column < num_columns, other=0.0)
        total += factor * product.to(tl.float32)
    tl.store(out + token * n + column, total.to(out.dtype.element_ty), mask=inside)
