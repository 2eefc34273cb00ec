"""The metrics: what they count, their guide, and the board that shows them."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from tests.serve.running import ROOT, RunningServer, eventually

from aquifer.serve.metrics import TokenHistogram

COMPLETIONS = "/v1/completions"
BOARD = ROOT / "contrib" / "grafana" / "aquifer.json"
_ROW = re.compile(r"^\| `(aquifer:\w+)` \| (\w+) \| ([\w ]+) \|([^|]*)\|", re.MULTILINE)


def _exposition(server: RunningServer) -> str:
    status, text, _ = server.call("GET", "/metrics")
    assert status == 200
    return str(text)


def _samples(server: RunningServer, model: str = "tiny") -> dict[str, float]:
    """The sums and counts of a model's histograms and its counters of tokens, by sample name."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(_exposition(server))
        for sample in family.samples
        if sample.labels == {"model_name": model}
    }


def _differences(server: RunningServer, body: dict[str, Any], status: int) -> dict[str, float]:
    """What a request to the model "tiny" adds to each sample that it changes."""
    before = _samples(server)
    assert server.call("POST", COMPLETIONS, {"model": "tiny", **body})[0] == status
    after = _samples(server)
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def test_histograms_count_requests_completions_and_steps(idle_server: RunningServer):
    body = {"prompt": "hello", "n": 2, "max_tokens": 3, "ignore_eos": True}
    added = _differences(idle_server, body, 200)
    for name, count, total in (
        ("request_prompt_tokens", 1, 5),
        ("request_generation_tokens", 2, 6),
        ("request_max_num_generation_tokens", 1, 3),
        ("request_params_n", 1, 2),
        ("request_params_max_tokens", 1, 3),
    ):
        assert added[f"aquifer:{name}_count"] == count, name
        assert added[f"aquifer:{name}_sum"] == total, name
    for name in ("request_inference_time", "request_queue_time", "request_prefill_time"):
        assert added[f"aquifer:{name}_seconds_count"] == 2, name
    assert (
        added["aquifer:request_inference_time_seconds_sum"]
        > (added["aquifer:request_prefill_time_seconds_sum"])
    )
    assert added["aquifer:inter_token_latency_seconds_count"] == 4
    # The last token of the prompt, and each generated token but the last, run in each completion.
    assert added["aquifer:iteration_tokens_total_sum"] == 4 + 2 * 3
    assert added["aquifer:prompt_tokens_total"] == 5
    assert added["aquifer:generation_tokens_total"] == 6


def test_a_histogram_of_tokens_is_one_of_prometheus():
    bounds, values = (0.25, 0.5, 1.0, 8.0), (0.0, 0.25, 0.375, 0.5, 0.75, 8.0, 11.0, 500.0)
    theirs = CollectorRegistry()
    histogram = Histogram("x", "help", ["model"], buckets=bounds, registry=theirs).labels("a")
    ours = TokenHistogram(bounds)
    for value in values:
        histogram.observe(value)
        ours.observe(value)
    for value in values:
        histogram.observe(value)
    ours.observe_between(4.0, list(accumulate(values, initial=4.0))[1:])
    family = HistogramMetricFamily("x", "help", labels=["model"])
    ours.add_to(family, ["a"])
    (expected,) = theirs.collect()
    samples = [sample for sample in expected.samples if sample.name != "x_created"]
    found = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in family.samples}
    assert found == {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


def test_a_request_without_max_tokens_has_no_such_parameter(idle_server: RunningServer):
    before = _samples(idle_server)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stop": ["a", "e"]}
    assert idle_server.call("POST", "/v1/chat/completions", chat)[0] == 200
    after = _samples(idle_server)
    name = "aquifer:request_params_max_tokens_count"
    assert after[name] == before[name]
    name = "aquifer:request_params_n_count"
    assert after[name] == before[name] + 1


def test_what_is_refused_is_not_counted(idle_server: RunningServer):
    assert _differences(idle_server, {"prompt": "x", "max_tokens": 0}, 400) == {}
    assert _differences(idle_server, {"prompt": "x", "max_tokens": 10**6}, 400) == {}


def test_an_abort_counts_tokens_and_no_times(idle_server: RunningServer):
    before = _samples(idle_server)
    stream = idle_server.openai().completions.create(
        model="tiny", prompt="x", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    stream.close()
    name = "aquifer:request_generation_tokens_count"
    eventually(lambda: _samples(idle_server)[name] == before[name] + 1, "the abort is counted")
    after = _samples(idle_server)
    name = "aquifer:e2e_request_latency_seconds_count"
    assert after[name] == before[name]
    assert _finished(idle_server, "abort") >= 1


def _finished(server: RunningServer, reason: str) -> float:
    labels = {"model_name": "tiny", "finished_reason": reason}
    return next(
        sample.value
        for family in text_string_to_metric_families(_exposition(server))
        for sample in family.samples
        if sample.name == "aquifer:request_success_total" and sample.labels == labels
    )


# ---- documents


@pytest.fixture
def exposed(idle_server: RunningServer) -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels of each metric, by name."""
    found = {}
    for family in text_string_to_metric_families(_exposition(idle_server)):
        if family.type == "gauge" and family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, frozenset(labels))
    return found


def test_the_guide_has_each_metric(exposed: dict[str, tuple[str, frozenset[str]]]):
    guide = (ROOT / "docs" / "guide" / "metrics.md").read_text()
    rows = {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, _, labels in _ROW.findall(guide)
    }
    assert rows == exposed


def test_vllm_has_the_same_histograms(exposed: dict[str, tuple[str, frozenset[str]]]):
    histograms = {name for name, (kind, _) in exposed.items() if kind == "histogram"}
    assert histograms == {
        f"aquifer:{name}"
        for name in (
            "e2e_request_latency_seconds",
            "inter_token_latency_seconds",
            "iteration_tokens_total",
            "request_decode_time_seconds",
            "request_generation_tokens",
            "request_inference_time_seconds",
            "request_max_num_generation_tokens",
            "request_params_max_tokens",
            "request_params_n",
            "request_prefill_time_seconds",
            "request_prompt_tokens",
            "request_queue_time_seconds",
            "request_time_per_output_token_seconds",
            "time_to_first_token_seconds",
        )
    }


def test_the_board_shows_metrics_that_there_are(
    exposed: dict[str, tuple[str, frozenset[str]]], idle_server: RunningServer
):
    board = json.loads(BOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    expressions += [
        variable["query"]["query"]
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    ]
    samples = {
        sample.name
        for family in text_string_to_metric_families(_exposition(idle_server))
        for sample in family.samples
    }
    for expression in expressions:
        names = re.findall(r"aquifer:\w+", expression)
        assert names, expression
        assert set(names) <= samples, expression
        for name in names:
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            kind, labels = exposed[family if family in exposed else name]
            given = re.findall(r"(\w+)=~", expression) + re.findall(r"by \(([^)]*)\)", expression)
            used = {label.strip() for part in given for label in part.split(",")}
            assert used <= labels | {"instance"} | ({"le"} if kind == "histogram" else set())
    everything = " ".join(expressions)
    for name in (
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "generation_tokens_total",
        "num_requests_running",
        "num_requests_waiting",
        "pool_bytes",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "engine_restarts_total",
    ):
        assert f"aquifer:{name}" in everything
