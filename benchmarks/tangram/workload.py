"""Models, requests and KV of the replay in `regions.py`.

Sizes of models are those of Tangram (section 5.1): 30 % have 1 to 3 billion parameters, 60 % 4 to
13, 10 % 14 to 30, in float16. Shapes are those of the families that the paper names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

FLOAT16_BYTES = 2
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. `num_projections` is 3 in a gated MLP (gate, up, down), 2 without."""

    name: str
    num_layers: int
    hidden_size: int
    mlp_size: int
    kv_size: int  # num_kv_heads * head_dim
    vocab_size: int
    num_projections: int
    is_tied: bool  # the output layer is the embedding

    def tensor_bytes(self) -> list[int]:
        """Bytes of each tensor: matrices one by one, as in a checkpoint, and one for small tensors.

        Norms and biases are one tensor, as in Aquifer's weights; `small` is about what they take.
        """
        hidden = self.hidden_size
        layer = [hidden * hidden, hidden * self.kv_size, hidden * self.kv_size, hidden * hidden]
        layer += [hidden * self.mlp_size] * self.num_projections
        embeddings = [self.vocab_size * hidden] * (1 if self.is_tied else 2)
        small = (2 * self.num_layers + 1) * hidden
        elements = [*embeddings, *(layer * self.num_layers), small]
        return [count * FLOAT16_BYTES for count in elements]

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block: keys and values of 16 tokens in all layers."""
        return BLOCK_TOKENS * 2 * self.num_layers * self.kv_size * FLOAT16_BYTES


MODELS = (
    Shape("opt-1.3b", 24, 2048, 8192, 2048, 50272, 2, True),
    Shape("llama-3b", 28, 3072, 8192, 1024, 128256, 3, True),
    Shape("qwen-3b", 36, 2048, 11008, 256, 151936, 3, True),
    Shape("opt-6.7b", 32, 4096, 16384, 4096, 50272, 2, True),
    Shape("qwen-7b", 28, 3584, 18944, 512, 152064, 3, False),
    Shape("llama-7b", 32, 4096, 11008, 4096, 32000, 3, False),
    Shape("llama-8b", 32, 4096, 14336, 1024, 128256, 3, False),
    Shape("yi-9b", 48, 4096, 11008, 512, 64000, 3, False),
    Shape("opt-13b", 40, 5120, 20480, 5120, 50272, 2, True),
    Shape("gpt-20b", 44, 6144, 24576, 6144, 50432, 2, False),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One request of the trace: an instance of a model with a batch of sequences.

    `lengths_tokens` [sequences, 2] has the prompt and the output of each.
    """

    arrival_s: float
    model: int
    lengths_tokens: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """Requests for the models, in the order of arrival.

    Popularity is skewed: the k-th most popular model gets a share of requests in proportion to
    1 / k. Ranks are drawn anew in each phase, so that popularity drifts and each model is popular
    at some time. Sequences have prompts and outputs that are log-normal, with means of
    about 160 and 340 tokens (ShareGPT in PagedAttention, Fig. 11), of at most 2048 tokens together.

    Args:
        num_runs: number of requests.
        batch_size: sequences of each.
        interval_s: mean time between two requests; intervals are exponential.
        phase_runs: requests in a phase.
        seed: of all random numbers.
    """

    num_runs: int = 500
    batch_size: int = 8
    interval_s: float = 20.0
    phase_runs: int = 50
    seed: int = 0

    @cached_property
    def runs(self) -> list[Run]:
        """The requests."""
        random = np.random.default_rng(self.seed)
        arrivals = np.cumsum(random.exponential(self.interval_s, self.num_runs))
        shares = 1 / np.arange(1, len(MODELS) + 1)
        shares /= shares.sum()
        runs = []
        for i, arrival_s in enumerate(arrivals.tolist()):
            if i % self.phase_runs == 0:
                ranked = random.permutation(len(MODELS))
            prompts = random.lognormal(np.log(160) - 0.5, 1.0, self.batch_size)
            outputs = random.lognormal(np.log(340) - 0.32, 0.8, self.batch_size)
            lengths = np.stack((prompts.clip(4, 1024), outputs.clip(4, 1024)), 1).astype(np.int64)
            model = int(ranked[random.choice(len(MODELS), p=shares)])
            runs.append(Run(arrival_s, model, lengths))
        return runs


def block_demand(run: Run) -> list[int]:
    """KV blocks that a batch takes from memory, in the order of its steps: [number, ...].

    The first number is that of the prompts. Then all sequences decode together. Blocks of a
    sequence that has ended go to the instance's free list, from which later ones are taken first
    (section 3.3), so only a new maximum takes from memory.
    """
    prompts, outputs = run.lengths_tokens.T
    steps = np.arange(int(outputs.max()) + 1)[:, None]
    lengths = np.where(steps <= outputs, prompts + steps, 0)  # [steps, sequences]
    most = np.maximum.accumulate((-(-lengths // BLOCK_TOKENS)).sum(1))
    taken = np.diff(most, prepend=0)
    return [int(count) for count in taken[taken > 0]]
