"""Roofline model of the time of a step, from the model's shape and the device, phase by phase.

    step = overhead
         + max(weights / bandwidth, matrix products / rate)          all tokens of the step together
         + KV of the sequences that decode / bandwidth               their attention
         + max(KV of the chunks' prefixes / bandwidth, operations / rate)   the chunks' attention
         + bytes copied on the device, read and written / bandwidth
         + bytes moved to the host and back / link bandwidth

Bandwidth and rate are the device's, each times an efficiency, which `aquifer.sim.calibration` takes
from a measured run. Overhead is the constant cost of a step. Communication between the parts of a
tensor-parallel device is not modelled, and copies of single blocks (copy-on-write) are not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from aquifer.cache.base import KVLayout, LayerKV, StateLayout
from aquifer.config import BUNDLED_MODELS
from aquifer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that determine its time and memory.

    Sliding windows are ignored, and every expert of a mixture of experts counts.

    Args:
        name: the name or folder by which the model was chosen.
        kv_layout: layout of one token's KV.
        body_parameters: elements of all matrices but embedding and head, used by every token.
        head_parameters: elements of the head, used by tokens that are sampled from.
        tensor_bytes: bytes of each parameter, as they are placed in memory, in order of use.
        attention_operations: operations for each pair of a token and one that it attends to, over
            all layers.
        max_tokens: the longest context.
        state_layout: layout of one sequence's recurrent state; None if no layer has any.
    """

    name: str
    kv_layout: KVLayout
    body_parameters: int
    head_parameters: int
    tensor_bytes: tuple[int, ...]
    attention_operations: float
    max_tokens: int
    state_layout: StateLayout | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state."""
        return 0 if self.state_layout is None else self.state_layout.num_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(self.tensor_bytes)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a step reads: body and head. Rows of an embedding are neglected."""
        return (self.body_parameters + self.head_parameters) * self.kv_layout.dtype.itemsize

    @classmethod
    def dense(
        cls,
        name: str,
        *,
        num_layers: int,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        feed_forward_matrices: int,
        feed_forward: int,
        vocab_size: int,
        tied: bool,
        max_tokens: int,
    ) -> ModelShape:
        """Make the shape of a dense decoder in 16 bits, with heads of hidden / num_heads.

        Matrices of which the products are computed together are one parameter: those of queries,
        keys and values, and those that a gated MLP begins with. Norms and biases are left out.
        """
        head_dim = hidden // num_heads
        kv_dim = num_kv_heads * head_dim
        layer = [
            hidden * (hidden + 2 * kv_dim),
            hidden * hidden,
            (feed_forward_matrices - 1) * hidden * feed_forward,
            hidden * feed_forward,
        ]
        table = vocab_size * hidden
        elements = [table, *(layer * num_layers), *([] if tied else [table])]
        layout = KVLayout((LayerKV(num_kv_heads, head_dim, head_dim),) * num_layers, torch.float16)
        return cls(
            name=name,
            kv_layout=layout,
            body_parameters=num_layers * sum(layer),
            head_parameters=table,
            tensor_bytes=tuple(2 * count for count in elements),
            attention_operations=layout.attention_operations(num_heads),
            max_tokens=max_tokens,
        )

    @classmethod
    def of_checkpoint(cls, path: Path) -> ModelShape:
        """Read a checkpoint's config.json; its weights need not exist.

        Raises:
            ConfigError: config.json is missing or incomplete.
        """
        from aquifer.models import plan_model
        from aquifer.models.base import num_elements
        from aquifer.weights.checkpoint import Checkpoint

        checkpoint = Checkpoint.without_tensors(path)
        plan = plan_model(checkpoint)
        parameters = plan.parameters
        matrices = [p for p in parameters if len(p.shape) > 1]
        tables = [math.prod(p.shape) for p in matrices if p.shape[0] == plan.vocab_size]
        num_heads = checkpoint.config.get("num_attention_heads") or checkpoint.config.get("n_head")
        return cls(
            name=path.name,
            kv_layout=plan.kv_layout,
            body_parameters=num_elements(matrices) - sum(tables),
            head_parameters=tables[-1] if tables else 0,
            tensor_bytes=tuple(p.num_bytes for p in parameters),
            attention_operations=plan.kv_layout.attention_operations(num_heads),
            max_tokens=plan.max_model_len,
            state_layout=plan.state_layout(),
        )


def _opt(name: str, num_layers: int, hidden: int, num_heads: int) -> ModelShape:
    return ModelShape.dense(
        name,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        feed_forward_matrices=2,
        feed_forward=4 * hidden,
        vocab_size=50272,
        tied=True,
        max_tokens=2048,
    )


def _gated(
    name: str,
    num_layers: int,
    hidden: int,
    heads: tuple[int, int],
    feed_forward: int,
    vocab_size: int,
    max_tokens: int,
    *,
    tied: bool = False,
) -> ModelShape:
    """A decoder with a gated MLP; `heads` are those of queries, and those of keys and values."""
    return ModelShape.dense(
        name,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        feed_forward_matrices=3,
        feed_forward=feed_forward,
        vocab_size=vocab_size,
        tied=tied,
        max_tokens=max_tokens,
    )


_GPT_NEOX_20B = ModelShape.dense(
    "gpt-neox-20b",
    num_layers=44,
    hidden=6144,
    num_heads=64,
    num_kv_heads=64,
    feed_forward_matrices=2,
    feed_forward=24576,
    vocab_size=50432,
    tied=False,
    max_tokens=2048,
)

MODELS = {
    shape.name: shape
    for shape in (
        _opt("opt-13b", 40, 5120, 40),
        _opt("opt-66b", 64, 9216, 72),
        _opt("opt-175b", 96, 12288, 96),
        _gated("llama-13b", 40, 5120, (40, 40), 13824, 32000, 2048),
        # The same with a longer context, for traces with longer requests.
        _gated("llama-2-13b", 40, 5120, (40, 40), 13824, 32000, 4096),
        _gated("llama-3-8b", 32, 4096, (32, 8), 14336, 128256, 8192),
        _opt("opt-1.3b", 24, 2048, 32),
        _opt("opt-6.7b", 32, 4096, 32),
        _gated("llama-3.2-3b", 28, 3072, (24, 8), 8192, 128256, 8192, tied=True),
        _gated("qwen-2.5-0.5b", 24, 896, (14, 2), 4864, 151936, 8192, tied=True),
        _gated("qwen-2.5-3b", 36, 2048, (16, 2), 11008, 151936, 8192, tied=True),
        _gated("yi-9b", 48, 4096, (32, 4), 11008, 64000, 4096),
        _gated("glm-4-9b", 40, 4096, (32, 2), 13696, 151552, 8192),
        _GPT_NEOX_20B,
    )
}
"""Named shapes: those of PagedAttention's evaluation (Table 1, section 6.4), those of Tangram's
(Table 1), and some more in between."""


def find_model(text: str) -> ModelShape:
    """Find a shape by its name, or read it from a folder with a config.json or a bundled model.

    Raises:
        ConfigError: the text is neither a name nor such a folder.
    """
    if text in MODELS:
        return MODELS[text]
    path = BUNDLED_MODELS.get(text, Path(text).expanduser())
    if (path / "config.json").is_file():
        return ModelShape.of_checkpoint(path)
    raise ConfigError(
        f"--model {text!r} is neither a folder with a config.json nor one of "
        f"{', '.join((*BUNDLED_MODELS, *MODELS))}"
    )


def distinct(shapes: Mapping[str, ModelShape]) -> dict[str, ModelShape]:
    """The first model of each shape. Shapes are told apart as objects: to compare them takes long.

    Equal ones may be given twice.
    """
    first: dict[int, str] = {}
    for name, shape in shapes.items():
        first.setdefault(id(shape), name)
    return {name: shapes[name] for name in first.values()}


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Speed and memory of a device, or of several that share a model's layers evenly.

    Args:
        name: the name by which the device was chosen.
        memory_bytes: total memory.
        bandwidth: memory bandwidth, bytes per second.
        operations_per_s: rate of floating-point operations of matrix products in 16 bits.
        link_bandwidth: bandwidth to the host and back, bytes per second.
        overhead_s: constant cost of a step.
        memory_efficiency: the part of `bandwidth` that kernels reach.
        compute_efficiency: the part of `operations_per_s` that kernels reach.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    operations_per_s: float
    link_bandwidth: float
    overhead_s: float
    memory_efficiency: float
    compute_efficiency: float

    def times(self, count: int) -> DeviceModel:
        """Model `count` devices in parallel, without the communication between them."""
        return replace(
            self,
            name=f"{count}x{self.name}",
            memory_bytes=count * self.memory_bytes,
            bandwidth=count * self.bandwidth,
            operations_per_s=count * self.operations_per_s,
            link_bandwidth=count * self.link_bandwidth,
        )


DEVICES = {
    device.name: device
    for device in (
        # From data sheets. The efficiencies are those of good kernels on such devices; the overhead
        # is that of a Python loop that waits for every step.
        DeviceModel("a100-40g", 40 << 30, 1.555e12, 312e12, 25e9, 2e-3, 0.8, 0.6),
        DeviceModel("a100-80g", 80 << 30, 2.039e12, 312e12, 25e9, 2e-3, 0.8, 0.6),
        DeviceModel("l40", 45 << 30, 0.864e12, 181e12, 25e9, 2e-3, 0.8, 0.6),
        DeviceModel("4090", 24 << 30, 1.008e12, 165e12, 25e9, 2e-3, 0.8, 0.6),
        # Measured: bandwidth of a copy, rate of a large matrix product. Fitted by `calibrate` to
        # benchmarks/gpu/llama-3-8b-latency-virtual.json: the rest.
        DeviceModel("h200", 150_109_880_320, 4.289e12, 787e12, 55.4e9, 0.0, 0.78, 0.76),
    )
}


def find_device(text: str, option: str = "--device") -> DeviceModel:
    """Find a device, or several of one kind, by name: "a100-40g", "4xa100-40g".

    Args:
        text: the name.
        option: the option that it was given with, for the error.

    Raises:
        ConfigError: the name is unknown.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(.+)", text)
    if match is None or match[2] not in DEVICES:
        raise ConfigError(
            f"{option} {text!r} is unknown; known are {', '.join(DEVICES)}, and 4xNAME for four"
        )
    device = DEVICES[match[2]]
    return device.times(int(match[1])) if match[1] else device


@dataclass(frozen=True, slots=True)
class StepWork:
    """Amount of work in one step."""

    num_tokens: int  # tokens of all sequences
    num_sampled: int  # tokens that are sampled from
    decode_kv_tokens: int  # cached tokens read by sequences that decode
    chunk_kv_tokens: int = 0  # cached tokens read by chunks of prompts
    chunk_pairs: int = 0  # pairs of a chunk's token and one that it attends to
    copied_bytes: int = 0  # copied within the device's memory
    moved_bytes: int = 0  # copied between device and host
    num_seqs: int = 0  # sequences, of which the state is read and written


@dataclass(frozen=True, slots=True)
class StepModel:
    """Modelled times of the steps of one model on one device, in seconds."""

    model: ModelShape
    device: DeviceModel

    @property
    def _bandwidth(self) -> float:
        return self.device.bandwidth * self.device.memory_efficiency

    @property
    def _rate(self) -> float:
        return self.device.operations_per_s * self.device.compute_efficiency

    def seconds(self, work: StepWork) -> float:
        """Time of one step."""
        token_bytes = self.model.kv_layout.token_bytes
        attention_s = work.decode_kv_tokens * token_bytes / self._bandwidth
        if work.chunk_pairs:
            attention_s += max(
                work.chunk_kv_tokens * token_bytes / self._bandwidth,
                work.chunk_pairs * self.model.attention_operations / self._rate,
            )
        moving_s = 2 * work.copied_bytes / self._bandwidth
        moving_s += work.moved_bytes / self.device.link_bandwidth
        products_s = self._products_s(work.num_tokens, work.num_sampled)
        return products_s + attention_s + self._state_s(work.num_seqs) + moving_s

    def decode_seconds(
        self, num_seqs: int, kv_tokens: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Times of steps in which all sequences decode one token; equal to those of `seconds`.

        Args:
            num_seqs: sequences in each step.
            kv_tokens: [num_steps], cached tokens that all sequences together read.
        """
        kv_s = kv_tokens * self.model.kv_layout.token_bytes / self._bandwidth
        fixed_s = self._products_s(num_seqs, num_seqs) + self._state_s(num_seqs)
        return np.asarray(fixed_s + kv_s)

    def prefill_seconds(self, start: float, count: float) -> float:
        """Time that prompt tokens [start, start + count) add to a compute-bound step.

        Both may be fractions: this is the cost to restore a block (`aquifer.cache.prefix`).
        """
        pairs = count * (start + count / 2)
        operations = 2.0 * self.model.body_parameters * count
        return (operations + self.model.attention_operations * pairs) / self._rate

    def _state_s(self, num_seqs: int) -> float:
        """Time to read and write the state of each sequence of a step."""
        layout = self.model.state_layout
        return 0.0 if layout is None else num_seqs * layout.traffic_bytes / self._bandwidth

    def _products_s(self, num_tokens: int, num_sampled: int) -> float:
        model = self.model
        operations = 2.0 * (
            model.body_parameters * num_tokens + model.head_parameters * num_sampled
        )
        return self.device.overhead_s + max(
            model.read_bytes / self._bandwidth, operations / self._rate
        )


class StepModels(dict[str, StepModel]):
    """How long steps take on a device, by model; made when a model is asked for first.

    Args:
        models: shapes by name.
        device: the device.
    """

    def __init__(self, models: Mapping[str, ModelShape], device: DeviceModel) -> None:
        super().__init__()
        self._models = models
        self._device = device

    def __missing__(self, name: str) -> StepModel:
        """Make what there is none of yet."""
        steps = self[name] = StepModel(self._models[name], self._device)
        return steps
