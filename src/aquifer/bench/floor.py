"""Lower bounds of run time: measured peak rates of the machine, and the work that a model needs."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aquifer.bench.workload import Workload
from aquifer.models import plan_model
from aquifer.models.base import num_elements
from aquifer.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from aquifer.llm import LLM

_BYTES = 512 << 20  # several times any cache
_COPY_BYTES = 4 << 30  # the same on a GPU
_PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}  # rows and columns of the matrices multiplied
_REPEATS = 8


def read_bandwidth() -> float:
    """Measure the memory read bandwidth of all threads, in bytes/s; the best of several runs."""
    data = torch.ones(_BYTES // 4)
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - start)
    return _BYTES / min(seconds)


def device_copy_bandwidth() -> float:
    """Measure the copy bandwidth of the current GPU, in bytes/s read plus written; the median.

    Not captured in a CUDA graph: there, a copy uses a copy engine, which is slower than the SMs.
    """
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    target.copy_(source)
    for event in events:
        event.record()
        target.copy_(source)
    torch.cuda.synchronize()
    times_ms = [float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)]
    return 2e3 * _COPY_BYTES / statistics.median(times_ms)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the rate of a large matrix product, in FLOP/s; the median of several."""
    size = _PRODUCT_SIZE[device.type]
    # Random numbers, because products of zeros draw less power and run at a higher clock.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return float(2 * size**3 / statistics.median(seconds[1:]))


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates of a device."""

    bytes_per_s: float
    operations_per_s: float  # floating-point, of matrix products

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Rates:
        """Measure an idle device; a GPU must have 8 GiB free."""
        if device.type != "cuda":
            return cls(read_bandwidth(), matmul_rate(device, dtype))
        with torch.cuda.device(device):
            rates = cls(device_copy_bandwidth(), matmul_rate(device, dtype))
            torch.cuda.empty_cache()
        return rates


@dataclass(frozen=True, slots=True)
class Cost:
    """Least work that a model's tokens need, in any implementation.

    Sliding windows are not taken into account: where a model has them, its attention takes less.
    Tokens are taken to choose experts uniformly and independently. Of a model that is split over
    devices, it is the work of one of them, without what is whole on each and without collectives.
    """

    body_parameters: int  # all matrices except embedding, head and experts: used by every token
    head_parameters: int  # tokens that are sampled from meet these too
    expert_parameters: int  # matrices of all experts that tokens choose from
    expert_share: float  # share of these that one token chooses
    parameter_bytes: int  # bytes of one parameter
    kv_bytes_per_token: int
    state_traffic_bytes: int  # of recurrent state, read and written for each token that decodes
    attention_operations: float  # per pair of a query token and a key token, over all layers

    @classmethod
    def of(cls, llm: LLM) -> Cost:
        """Derive the cost from the shapes of the loaded model."""
        (info,) = llm.engine.models.values()
        is_dummy = llm.engine.config.load_format == "dummy"
        checkpoint = (Checkpoint.without_tensors if is_dummy else Checkpoint.open)(info.path)
        dtype: torch.dtype = getattr(torch, info.dtype)
        plan = plan_model(checkpoint, dtype)
        matrices = [each for each in plan.parameters if len(each.shape) > 1]
        experts = [each for each in matrices if each.used_share < 1]
        num_expert_parameters = num_elements(experts)
        num_chosen = sum(math.prod(each.shape) * each.used_share for each in experts)
        # The embedding, of which a step reads few rows, and the head; or one tied tensor.
        tables = [math.prod(each.shape) for each in matrices if each.shape[0] == info.vocab_size]
        state_dtype = llm.engine.config.state_dtype
        state = plan.state_layout(None if state_dtype == "auto" else getattr(torch, state_dtype))
        num_heads = checkpoint.config.get("num_attention_heads")
        size = llm.engine.config.tensor_parallel_size
        return cls(
            body_parameters=(num_elements(matrices) - num_expert_parameters - sum(tables)) // size,
            head_parameters=(tables[-1] if tables else 0) // size,
            expert_parameters=num_expert_parameters // size,
            expert_share=num_chosen / num_expert_parameters if experts else 0.0,
            parameter_bytes=dtype.itemsize,
            kv_bytes_per_token=info.kv_bytes_per_token,
            state_traffic_bytes=0 if state is None else state.traffic_bytes // size,
            attention_operations=plan.kv_layout.attention_operations(num_heads) / size,
        )

    def weight_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that one step of `num_tokens` tokens reads, in the mean."""
        chosen = self.expert_parameters * (1 - (1 - self.expert_share) ** num_tokens)
        return (self.body_parameters + self.head_parameters + chosen) * self.parameter_bytes

    def step_s(self, workload: Workload, rates: Rates) -> float:
        """Compute the floor of a decode step of all requests, the mean over their outputs.

        A step reads the weights once, and the KV of each request's context; of the state of each,
        it reads and writes what its layout says.
        """
        num_steps = max(max(workload.output_lengths) - 1, 1)
        kv_bytes = workload.num_attended_tokens / num_steps * self.kv_bytes_per_token
        state_bytes = len(workload.prompts) * self.state_traffic_bytes
        num_bytes = self.weight_bytes(len(workload.prompts)) + kv_bytes + state_bytes
        return num_bytes / rates.bytes_per_s

    def prefill_s(self, prompt_lengths: Sequence[int], rates: Rates) -> float:
        """Compute the floor of prefill: the prompts' matrix products and causal attention."""
        used = self.body_parameters + self.expert_parameters * self.expert_share
        operations = 2.0 * used * sum(prompt_lengths)
        operations += 2.0 * self.head_parameters * len(prompt_lengths)
        operations += self.attention_operations * sum(n * n / 2 for n in prompt_lengths)
        return operations / rates.operations_per_s

    def total_s(self, workload: Workload, rates: Rates) -> float:
        """Compute the floor of a whole workload, with all requests running from the start.

        Prefill runs at the rate of matrix products. Then there are as many decode steps as the
        longest output has tokens: each reads the weights once, and the KV of the requests that
        still run. Two simplifications: no request waits, which is more than an engine can do;
        and prefill and decode do not overlap, which is somewhat less.
        """
        decode_bytes = sum(
            self.weight_bytes(sum(length > step for length in workload.output_lengths))
            for step in range(max(workload.output_lengths))
        )
        decode_bytes += workload.num_attended_tokens * self.kv_bytes_per_token
        decode_bytes += sum(workload.output_lengths) * self.state_traffic_bytes
        prompts_s = self.prefill_s([len(prompt) for prompt in workload.prompts], rates)
        return prompts_s + decode_bytes / rates.bytes_per_s
