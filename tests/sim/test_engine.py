"""A replay and the engine decide alike: by steps, with the same requests in the same memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.checkpoints import tiny_llama

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.params import Request, SamplingParams
from aquifer.memory.owners import Kind, Owner
from aquifer.sim.config import ReplayConfig
from aquifer.sim.device import DeviceModel, ModelShape
from aquifer.sim.replay import replay
from aquifer.sim.trace import TraceRequest

PAGE_BYTES = 4096
CONTEXT_TOKENS, MAX_SEQS, STEP_TOKENS = 512, 24, 64
# A step takes a second, whatever it has to do.
DEVICE = DeviceModel("steps", 1 << 40, 1e30, 1e30, 1e30, 1.0, 1.0, 1.0)


def _requests(seed: int, count: int) -> list[TraceRequest]:
    """Requests that arrive at whole seconds, somewhat more than can be served at once."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.geometric(0.25, count) - 1)
    return [
        TraceRequest(float(at), int(random.integers(1, 90)), int(random.integers(2, 120)))
        for at in arrivals.tolist()
    ]


class _Steps:
    """An engine on the CPU whose clock counts steps."""

    def __init__(self, folder: Path, kv_cache: str, kv_pages: int) -> None:
        config = EngineConfig(
            (ModelSpec("m", folder),),
            device="cpu",
            memory_bytes=16 << 20,
            page_bytes=PAGE_BYTES,
            prompt_page_bytes=PAGE_BYTES if kv_cache == "virtual" else None,
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=False,
            kv_cache=kv_cache,
            preemption_mode="recompute",
            seed=0,
            threads=1,
        )
        self.engine = Engine.open(config)
        self.num_steps = 0
        self.engine.on_launch = self._on_launch
        pool = self.engine.pool
        taken = pool.acquire(Owner("other", Kind.WEIGHTS), pool.free_bytes // PAGE_BYTES - kv_pages)
        assert taken is not None
        self._taken = taken

    def _on_launch(self, model: str, num_tokens: int) -> None:
        self.num_steps += 1

    def serve(self, requests: list[TraceRequest]) -> list[tuple[int, int]]:
        """When each request got its first token, and its last one."""
        engine, waiting, now = self.engine, list(enumerate(requests)), 0
        times: dict[int, list[int]] = {}
        while waiting or engine.has_work:
            while waiting and (waiting[0][1].arrival_s or 0) <= now:
                number, each = waiting.pop(0)
                params = SamplingParams(
                    temperature=0, max_tokens=each.output_tokens, ignore_eos=True
                )
                prompt = [7 + (number + i) % 100 for i in range(each.prompt_tokens)]
                engine.add(Request(str(number), "m", prompt, params, 0.0))
            if not engine.has_work:
                now = int(waiting[0][1].arrival_s or 0)
                continue
            before = self.num_steps
            outputs = engine.step()
            now += self.num_steps - before
            for output in outputs:
                assert output.error is None
                times.setdefault(int(output.request_id), []).append(now)
        return [(times[number][0], times[number][-1]) for number in range(len(requests))]

    def close(self) -> None:
        self.engine.pool.release(self._taken)
        self.engine.close()


@pytest.mark.parametrize("kv_cache", ["virtual", "paged"])
@pytest.mark.parametrize("kv_pages", [400, 60])
def test_the_same_requests_run_in_the_same_steps(
    tmp_path: Path, kv_cache: str, kv_pages: int
) -> None:
    """With room for all, and with so little that requests wait and are preempted."""
    requests = _requests(kv_pages, 28)
    folder = tiny_llama(tmp_path / "m")
    steps = _Steps(folder, kv_cache, kv_pages)
    try:
        times = steps.serve(requests)
        num_preemptions = sum(steps.engine.stats().num_preemptions.values())
    finally:
        steps.close()
    model = ModelShape.of_checkpoint(folder)
    weight_pages = -(-model.weight_bytes // PAGE_BYTES)
    config = ReplayConfig(
        {"m": model},
        DEVICE,
        kv_cache,
        memory_bytes=(weight_pages + kv_pages) * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        preemption_mode="recompute",
    )
    result = replay(config, requests)
    assert result.kv_budget_bytes == kv_pages * PAGE_BYTES
    assert [(r.first_token_s, r.finished_s) for r in result.records] == times
    assert (result.num_steps, result.num_preemptions) == (steps.num_steps, num_preemptions)
    assert (num_preemptions > 0) == (kv_pages == 60)
