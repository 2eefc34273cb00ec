"""Requests that an engine gives up, for another one to run."""

from __future__ import annotations

from tests.engine.life import PAGE_BYTES, Case, Open
from tests.engine.test_loading import make_short


def test_requests_that_have_never_run_are_given_up(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """Those that came first; of one model. The others end as if these had not come."""
    memory_bytes = sizes["llama"][0] + sizes["sparse-kv"][0] + 40 * PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "llama", "b": "sparse-kv"}, max_num_seqs=2)
    short = make_short(cases["llama"])
    for _ in range(6):
        world.send("a", short)
    for _ in range(4):
        world.send("b", make_short(cases["sparse-kv"]))
    while not world.engine.lanes["a"].running:
        world.step()
    ids = [request_id for request_id, sent in world.sent.items() if sent.model == "a"]
    running = {group.request.request_id for group in world.engine.lanes["a"].running}
    waiting = [request_id for request_id in ids if request_id not in running]
    assert waiting
    assert running
    assert world.engine.withdraw("c", 5) == []
    assert world.engine.withdraw("a", 1) == waiting[:1]
    assert world.engine.withdraw("a", 9) == waiting[1:]
    assert world.engine.withdraw("a", 9) == []
    for request_id in waiting:
        del world.sent[request_id]
    world.finish()
    assert all(sent.has_ended and sent.error is None for sent in world.sent.values())
