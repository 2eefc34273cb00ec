"""Figures of `aquifer bench serve`, by hand; and its requests and lines."""

from __future__ import annotations

import json

import pytest
from tests.checkpoints import VOCAB_SIZE, tiny_llama

from aquifer.bench.serving.figures import (
    figures_of,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
)
from aquifer.bench.serving.load import Run
from aquifer.bench.serving.options import CHAT, COMPLETIONS
from aquifer.bench.serving.prompts import RequestMaker, spread, text_of, vocab_size_of
from aquifer.bench.serving.report import passes_table, result_lines
from aquifer.bench.serving.stream import Failure, Stream
from aquifer.bench.workload import LengthRange, Workload
from aquifer.errors import ConfigError
from aquifer.text import Tokenizer

LONG = Stream(10, 5, 10.0, [10.5, 10.6, 11.0])  # 5 tokens in 3 events
SHORT = Stream(20, 3, 10.1, [10.4, 12.0])
SINGLE = Stream(30, 1, 11.0, [11.25])
FAILED = Failure("HTTP 503: busy", 503)
RUN = Run([LONG, SHORT, SINGLE], [FAILED, FAILED, Failure("gone")], 4.0, 0.002, 0.4)


def test_figures_by_hand() -> None:
    result = figures_of(RUN, [50, 99])
    assert (result["completed"], result["failed"]) == (3, 3)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (60, 9)
    assert result["duration"] == 4.0
    assert result["request_throughput"] == pytest.approx(3 / 4)
    assert result["output_throughput"] == pytest.approx(9 / 4)
    assert result["total_token_throughput"] == pytest.approx(69 / 4)
    assert result["mean_ttft_ms"] == pytest.approx((500 + 300 + 250) / 3)
    assert result["median_ttft_ms"] == result["p50_ttft_ms"] == pytest.approx(300)
    assert result["p99_ttft_ms"] == pytest.approx(300 + 0.98 * 200)
    # 0.5 s for 4 further tokens, and 1.6 s for 2; the single token has none.
    assert result["mean_tpot_ms"] == pytest.approx((125 + 800) / 2)
    assert result["std_tpot_ms"] == pytest.approx((800 - 125) / 2)
    assert result["mean_itl_ms"] == pytest.approx((100 + 400 + 1600) / 3)
    assert result["mean_e2el_ms"] == pytest.approx((1000 + 1900 + 250) / 3)
    assert result["median_worst_gap_ms"] == pytest.approx((400 + 1600) / 2)
    assert result["p99_worst_gap_ms"] == pytest.approx(400 + 0.99 * 1200)
    assert result["max_send_lag_ms"] == pytest.approx(2)
    assert result["client_cpu_share"] == pytest.approx(0.1)
    assert result["error_counts"] == {"HTTP 503: busy": 2, "gone": 1}
    assert result["request_goodput"] is None


def test_peaks_by_hand() -> None:
    result = figures_of(RUN)
    # From 10 s on, 5/3 tokens for each event of the first stream and 3/2 of the second:
    # [10, 11) has 2 and 1 events, [11, 12) 1 and the single token, [12, 13) 1 of the second.
    assert result["max_output_tokens_per_s"] == pytest.approx(2 * 5 / 3 + 3 / 2)
    # The first ends when the third begins, so they do not run at once.
    assert result["max_concurrent_requests"] == 2


def test_a_pass_of_single_tokens_has_no_times_between_them() -> None:
    result = figures_of(Run([SINGLE], [], 1.0))
    assert result["mean_tpot_ms"] == result["p99_itl_ms"] == result["p99_worst_gap_ms"] == 0


@pytest.mark.parametrize(
    ("bounds", "num_good"),
    [
        (["ttft:301"], 2),
        (["ttft:499", "tpot:200"], 1),
        (["tpot:126"], 2),
        (["tpot:0"], 1),
        (["e2el:1000.001 ttft:500"], 2),
        (["ttft:1000", "tpot:1000", "e2el:5000"], 3),
    ],
)
def test_goodput_counts_requests_that_keep_every_bound(bounds: list[str], num_good: int) -> None:
    result = figures_of(RUN, goodput_ms=parse_goodput(bounds))
    assert result["request_goodput"] == pytest.approx(num_good / 4)


def test_options_are_parsed_or_refused() -> None:
    assert parse_goodput(["ttft:500", "tpot:50 e2el:1e3"]) == {"ttft": 500, "tpot": 50, "e2el": 1e3}
    assert parse_metrics("ttft, e2el") == ["ttft", "e2el"]
    assert parse_percentiles("50,99.9") == [50, 99.9]
    for wrong in ("ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "itl:5", "500"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_goodput([wrong])
    for wrong in ("", "ttft,x"):
        with pytest.raises(ConfigError, match="--percentile-metrics"):
            parse_metrics(wrong)
    for wrong in ("", "x", "-1", "100.5", "nan"):
        with pytest.raises(ConfigError, match="--metric-percentiles"):
            parse_percentiles(wrong)


# --- lines -----------------------------------------------------------------------------------


def test_lines_are_those_of_vllm() -> None:
    settings = {"max_concurrency": 8, "request_rate": 2.0}
    figures = {**settings, **figures_of(RUN, goodput_ms={"ttft": 301})}
    lines = list(result_lines(figures, ["ttft", "worst_gap"], [99]))
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert "Successful requests:                     3         " in lines
    assert "Request goodput (req/s):                 0.50      " in lines
    assert "---------------Time to First Token----------------" in lines
    assert "P99 TTFT (ms):                           496.00    " in lines
    assert "P99 Worst Gap (ms):                      1588.00   " in lines
    assert lines[-3:] == [
        "=" * 50,
        "2 failed: HTTP 503: busy",
        "1 failed: gone",
    ]
    labels = [line.partition(":")[0] for line in lines if line[0].isupper()]
    assert labels[:13] == [
        "Successful requests",
        "Failed requests",
        "Maximum request concurrency",
        "Request rate configured (RPS)",
        "Benchmark duration (s)",
        "Total input tokens",
        "Total generated tokens",
        "Request throughput (req/s)",
        "Request goodput (req/s)",
        "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)",
        "Peak concurrent requests",
        "Total token throughput (tok/s)",
    ]
    assert not any("TPOT" in line for line in lines)


def test_what_is_not_set_has_no_line() -> None:
    figures = {"max_concurrency": None, "request_rate": "inf", **figures_of(RUN)}
    text = "\n".join(result_lines(figures, ["ttft"], [99], "Again"))
    assert "= Again =" in text
    assert not any(word in text for word in ("concurrency", "configured", "goodput"))


def test_many_errors_are_cut() -> None:
    run = Run([LONG], [Failure(f"error {number}") for number in range(12)], 1.0)
    *_, last = result_lines(figures_of(run), [], [])
    assert last == "and 2 other errors"


def test_passes_have_a_row_each() -> None:
    assert passes_table([figures_of(RUN)] * 3, 99).row_count == 3


# --- requests --------------------------------------------------------------------------------


def _maker(endpoint: str, tokenizer: Tokenizer | None = None) -> RequestMaker:
    workload = Workload.random(4, LengthRange(5, 9), LengthRange(2, 6), VOCAB_SIZE, seed=1)
    return RequestMaker(workload, VOCAB_SIZE, endpoint, {"model": "m"}, tokenizer)


def test_completions_have_the_token_ids() -> None:
    workload = Workload.random(4, LengthRange(5, 9), LengthRange(2, 6), VOCAB_SIZE, seed=1)
    bodies = [json.loads(body) for body in _maker(COMPLETIONS).bodies(0)]
    assert [body["prompt"] for body in bodies] == workload.prompts
    assert [body["max_tokens"] for body in bodies] == workload.output_lengths
    for body in bodies:
        assert (body["model"], body["stream"]) == ("m", True)
        assert body["stream_options"] == {"include_usage": True}


def test_each_variant_has_the_lengths_and_other_tokens() -> None:
    variants = [[json.loads(b) for b in _maker(COMPLETIONS).bodies(v)] for v in range(3)]
    first = [body["prompt"] for body in variants[0]]
    for number, bodies in enumerate(variants):
        assert [body["max_tokens"] for body in bodies] == [b["max_tokens"] for b in variants[0]]
        expected = [[(token + number) % VOCAB_SIZE for token in prompt] for prompt in first]
        assert [body["prompt"] for body in bodies] == expected
    assert len(_maker(COMPLETIONS).bodies(0, 9)) == 9
    assert len(_maker(COMPLETIONS).bodies(0, 2)) == 2


def test_chats_have_text_of_about_so_many_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_llama(tmp_path_factory.mktemp("chat") / "tiny")
    assert vocab_size_of(folder) == VOCAB_SIZE
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    (body, *_) = [json.loads(body) for body in _maker(CHAT, tokenizer).bodies(0)]
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert "max_completion_tokens" in body
    assert "prompt" not in body
    ids = list(range(6, VOCAB_SIZE, 3))
    again = tokenizer.encode(text_of(tokenizer, ids), add_special_tokens=False)
    assert len(ids) / 2 < len(again) <= 1.1 * len(ids)


def test_vocabularies_are_read_from_the_configuration(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text('{"text_config": {"vocab_size": 77}}')
    assert vocab_size_of(folder) == 77
    for content in ("", "[]", "{}", '{"vocab_size": 0}', '{"vocab_size": "x"}'):
        (folder / "config.json").write_text(content)
        with pytest.raises(ConfigError, match="vocab_size"):
            vocab_size_of(folder)


def test_ratios_make_ranges() -> None:
    assert spread(100, 0.0) == LengthRange(100, 100)
    assert spread(100, 0.25) == LengthRange(75, 125)
    assert spread(3, 0.5) == LengthRange(1, 5)
    assert spread(1, 1.0) == LengthRange(1, 2)
