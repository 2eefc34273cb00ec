"""Models, devices and requests of the replays in `models.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from benchmarks.pagedattention.workloads import CONTEXT_TOKENS, WORKLOADS

from aquifer.sim.device import DEVICES, MODELS, DeviceModel, ModelShape
from aquifer.sim.locality import LOCALITIES, TABLE_1, LocalityWorkload, models_by_class
from aquifer.sim.trace import PREFIX_BLOCK_TOKENS, TraceRequest, fit_lengths, read_trace

EIGHT = (
    "qwen-2.5-0.5b",
    "opt-1.3b",
    "qwen-2.5-3b",
    "llama-3.2-3b",
    "opt-6.7b",
    "llama-3-8b",
    "yi-9b",
    "glm-4-9b",
)
"""Eight models of 1 to 19 GB."""

_NUM_OF_EACH = 2000


@dataclass(frozen=True, slots=True)
class Setting:
    """Models on a device.

    Args:
        models: shapes by name.
        device: the device.
        memory_bytes: the pool.
    """

    models: dict[str, ModelShape]
    device: DeviceModel
    memory_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all models together."""
        return sum(model.weight_bytes for model in self.models.values())


def settings() -> dict[str, Setting]:
    """Where the modes are compared.

    "h200" has the bytes of the models divided by 1.3. "l40" is the paper's device with the eight
    models of its Table 1, in nine tenths of 45 GiB.
    """
    eight = {name: MODELS[name] for name in EIGHT}
    table_1 = {name: MODELS[name] for names in TABLE_1.values() for name in names}
    l40 = DEVICES["l40"]
    on_h200 = Setting(eight, DEVICES["h200"], 0)
    return {
        "h200": replace(on_h200, memory_bytes=int(on_h200.weight_bytes / 1.3)),
        "l40": Setting(table_1, l40, int(0.9 * l40.memory_bytes)),
    }


def mixed_settings() -> dict[str, tuple[Setting, float]]:
    """Where models and prefixes share a pool, with requests per second.

    The eight models of 1 to 19 GB have about half their size. The L40 is nearly always busy at the
    higher rate, and two thirds of the time at the lower one. On the H200 little waits for memory at
    the lower rate; at the higher one, requests of several models nearly always run.
    """
    eight = {name: MODELS[name] for name in EIGHT}
    on_h200 = Setting(eight, DEVICES["h200"], 48 * 10**9)
    on_l40 = Setting(eight, DEVICES["l40"], 43 * 10**9)
    return {
        "h200, 0.5/s": (on_h200, 0.5),
        "h200, 1.5/s": (on_h200, 1.5),
        "l40, 0.5/s": (on_l40, 0.5),
        "l40, 0.3/s": (on_l40, 0.3),
    }


def by_class(num_models: int) -> Setting:
    """So many models by the paper's size classes, on L40s."""
    models = {name: MODELS[shape] for name, shape in models_by_class(num_models).items()}
    return Setting(models, DEVICES["l40"], int(0.9 * DEVICES["l40"].memory_bytes))


def lengths(data: Path) -> list[TraceRequest]:
    """Lengths of requests: as many of ShareGPT, GSM8K and Alpaca.

    Outputs of ShareGPT are made up (`benchmarks/pagedattention/workloads.py`). HumanEval, the
    paper's fourth data set, is not at hand.
    """
    random = np.random.default_rng(0)
    gsm8k = fit_lengths(read_trace(data / "gsm8k_lengths.jsonl.gz"), CONTEXT_TOKENS, cut=False)[0]
    mixed: list[TraceRequest] = []
    for requests in (WORKLOADS["sharegpt-like"](data), WORKLOADS["alpaca"](data), gsm8k):
        chosen = random.integers(len(requests), size=_NUM_OF_EACH)
        mixed += [requests[index] for index in chosen.tolist()]
    return mixed


@dataclass(frozen=True, slots=True)
class MixedTrace:
    """Requests of which some are for many models and some share prefixes.

    Phases of equal numbers of requests take turns. In the first kind a request is for one of all
    models, none twice in a row. In the second kind it is for one of two models with long contexts,
    and begins with one of `num_documents` documents of 3072 to 7168 tokens; the k-th most popular
    document has a share in proportion to 1 / k. Models and popularity change with each phase.

    Args:
        models: shapes by name.
        lengths: prompts and outputs; a document comes before the prompt.
        rate: mean number of requests per second.
        num_requests: number of requests.
        phase: requests of a phase.
        num_documents: of each model.
        seed: of all random numbers.
    """

    models: dict[str, ModelShape]
    lengths: Sequence[TraceRequest]
    rate: float
    num_requests: int
    phase: int = 50
    num_documents: int = 40
    seed: int = 0

    def requests(self) -> list[TraceRequest]:
        """The requests, in order of arrival."""
        random = np.random.default_rng(self.seed)
        workload = LocalityWorkload(
            tuple(self.models), self.lengths, self.rate, self.num_requests, seed=self.seed
        )
        requests = workload.requests(LOCALITIES["L1"])
        numbers = {name: number for number, name in enumerate(self.models)}
        able = [name for name, model in self.models.items() if model.max_tokens >= 8192]
        shares = 1 / np.arange(1, self.num_documents + 1)
        shares /= shares.sum()
        for index, request in enumerate(requests):
            phase, place = divmod(index, self.phase)
            if phase % 2 == 0:
                continue
            if place == 0:
                chosen = random.permutation(able)[:2].tolist()
                documents = random.permutation(self.num_documents)
            model = chosen[random.integers(2)]
            document = int(documents[random.choice(self.num_documents, p=shares)])
            num_blocks = 6 + document % 9
            first_id = (numbers[model] * self.num_documents + document) * 16
            num_prefix = num_blocks * PREFIX_BLOCK_TOKENS
            num_outputs = min(request.output_tokens, 256)
            num_own = min(request.prompt_tokens, 8192 - num_prefix - num_outputs)
            requests[index] = replace(
                request,
                model=model,
                prompt_tokens=num_prefix + num_own,
                output_tokens=num_outputs,
                prefix_ids=tuple(range(first_id, first_id + num_blocks)),
            )
        return requests
