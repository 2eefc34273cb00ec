"""Options of `aquifer bench` and `aquifer replay`: those of the engine, and more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from aquifer.option import Option
from aquifer.options import find_option, options_of

ENGINE = options_of("bench")
"""What `LLM` is opened with."""

OUTPUT = Option("output", Path, None, "Write the result to this JSON file.")
SEED = Option("seed", int, 0, "Seed of the workload and of sampling.", minimum=0)
_TRANSFORMERS = Option(
    "transformers", bool, False, "Also run Transformers' generate, one after the other."
)


def _num_prompts(default: int) -> Option:
    help_text = "Requests, all submitted at the start."
    return Option("num_prompts", int, default, help_text, minimum=1)


def _length(name: str, what: str, default: str) -> Option:
    help_text = f"Tokens of each {what}: 128, or a range 16-256."
    return Option(name, str, default, help_text, unit="tokens")


def _repeats(default: int, help_text: str = "Timed runs; the median counts.") -> Option:
    return Option("repeats", int, default, help_text, minimum=1)


THROUGHPUT = (
    _num_prompts(32),
    _length("input_len", "prompt", "16-256"),
    _length("output_len", "output", "16-256"),
    Option("temperature", float, 0.0, "Sampling temperature; 0 is greedy.", minimum=0),
    *ENGINE,
    SEED,
    _repeats(3),
    _TRANSFORMERS,
    OUTPUT,
)

LATENCY = (
    Option("batch_size", str, "1", "Requests that decode at once, such as 1,32,128."),
    _length("input_len", "prompt", "128"),
    _length("output_len", "output", "128"),
    Option("everything_mapped", bool, False, "Map all KV once the prompts are computed."),
    *ENGINE,
    SEED,
    _repeats(5),
    _TRANSFORMERS,
    OUTPUT,
)

PREFILL = (
    _num_prompts(16),
    _length("input_len", "prompt", "512"),
    *ENGINE,
    SEED,
    _repeats(3),
    OUTPUT,
)

START = (
    *(option for option in ENGINE if option.name != "max_num_batched_tokens"),
    _repeats(2, "Starts; the first may have to compile kernels."),
    OUTPUT,
)

_MAKE_BYTES = Option(
    "make_bytes",
    int,
    None,
    "First write random weights of the model's shapes, of about this size.",
    unit="bytes",
    minimum=1,
    example="16GiB",
    unset="the checkpoint's own weights",
)

LOAD = (
    _MAKE_BYTES,
    Option("from_pinned", bool, False, "Also time loading from page-locked host memory."),
    find_option("revision"),
    find_option("device"),
    find_option("dtype"),
    _repeats(2, "Timed loads; the first may read from disk."),
    OUTPUT,
)

SWITCH = (
    _MAKE_BYTES,
    Option("input_len", int, 512, "Length of the prompt.", unit="tokens", minimum=1),
    *(option for option in ENGINE if option.name != "load_format"),
    SEED,
    _repeats(5, "Requests for each place of the weights."),
    Option(
        "neighbour",
        str,
        None,
        "Also have another process with the model, on this device, and load it from there.",
        unit="name",
        example="cuda:1",
        unset="without",
    ),
    OUTPUT,
)

SOAK = (
    Option("num_requests", int, 20_000, "Random requests of every kind.", minimum=1),
    Option(
        "max_tokens", int, 64, "Most tokens of a prompt and its output.", unit="tokens", minimum=8
    ),
    Option("num_seqs", int, 16, "Sequences that run at once.", minimum=1),
    Option(
        "kv_tokens",
        int,
        None,
        "Tokens that the pool has room for.",
        unit="tokens",
        minimum=1,
        example="192",
        unset="3 times max_tokens",
    ),
    replace(find_option("page_size"), default=16 << 10),
    find_option("preemption_mode"),
    find_option("revision"),
    find_option("device"),
    find_option("load_format"),
    find_option("kv_cache"),
    find_option("block_size"),
    find_option("length_prediction"),
    find_option("bucket_routing_threshold"),
    Option(
        "lengths",
        str,
        "stated",
        "Lengths of outputs: stated (by max_tokens), hidden (most end by a token that is forced at "
        "their end), or shifting (hidden, and four times as long from the middle of the run on).",
        choices=("stated", "hidden", "shifting"),
    ),
    Option(
        "compare",
        int,
        0,
        "Answers whose tokens are compared with those of an engine that has memory for all.",
        minimum=0,
    ),
    SEED,
    OUTPUT,
)

OVERHEAD = (
    Option("num_seqs", int, 256, "Running sequences.", minimum=1),
    Option("num_steps", int, 256, "Decode steps of each round.", minimum=1),
    Option("num_layers", int, 12, "Layers of the KV layout.", minimum=1),
    Option("num_kv_heads", int, 4, "KV heads of the KV layout.", minimum=1),
    Option("head_dim", int, 64, "Head dimension of the KV layout.", minimum=1),
    replace(find_option("page_size"), default=256 << 10),
    OUTPUT,
)

REPLAY = (
    Option(
        "model",
        str,
        ("opt-13b",),
        "A known shape, a folder with a config.json, or NAME=SHAPE; repeatable.",
        unit="shape",
        many=True,
    ),
    Option(
        "device",
        str,
        "a100-40g",
        "Modelled device: a100-40g, a100-80g, l40, 4090 or h200; 4xa100-40g is four of them.",
        unit="device",
    ),
    Option(
        "calibrate",
        Path,
        None,
        "Take the device's speed from a result of bench latency.",
        unit="file",
        unset="the device's nominal speed",
    ),
    Option(
        "kv_cache",
        str,
        "virtual",
        "One or several, by commas: virtual, paged, bucketed, orca-max, orca-pow2, orca-oracle, "
        "static.",
        unit="names",
    ),
    replace(
        find_option("memory"),
        help="Budget of the pool, weights included.",
        unset="nine tenths of the device",
    ),
    Option(
        "weights",
        str,
        "resident",
        "All stay in the pool; or models are loaded for their requests, by tensor or as a whole.",
        choices=("resident", "tensor", "whole"),
    ),
    Option(
        "load_gb_per_s",
        float,
        None,
        "How fast weights are loaded, in GB/s.",
        above=0,
        example="2.2",
        unset="the device's link to the host",
    ),
    Option(
        "workers",
        str,
        None,
        "Replay on a cluster: a number of workers, or their devices, such as 6:l40,2:h200.",
        unit="workers",
        unset="one device",
    ),
    Option(
        "placement",
        str,
        None,
        "Which worker gets a request.",
        choices=("affinity", "least-loaded", "round-robin", "random"),
        unset="affinity",
    ),
    Option(
        "fail",
        str,
        None,
        "Workers that fail, and when they are back: 0@120-180,3@60 (seconds).",
        unit="failures",
    ),
    Option(
        "notice",
        float,
        None,
        "Time until a failure is noticed.",
        unit="seconds",
        minimum=0,
        example="5.0",
        unset="1",
    ),
    Option(
        "report_every",
        float,
        None,
        "Time between the reports of a worker that gets no requests.",
        unit="seconds",
        minimum=0,
        example="0.25",
        unset="0: before each placement",
    ),
    Option(
        "rate",
        float,
        None,
        "Poisson arrivals: requests a second.",
        above=0,
        example="2.0",
        unset="as recorded",
    ),
    Option("rates", str, None, "Several rates, such as 1,2,4."),
    Option("find_rate", bool, False, "Search for the highest rate within the three bounds."),
    Option(
        "latency_bound",
        float,
        0.2,
        "Bound of the mean latency for each output token.",
        unit="seconds",
        minimum=0,
    ),
    Option(
        "ttft_bound",
        float,
        2.0,
        "Bound of the time to first token, 99th percentile.",
        unit="seconds",
        minimum=0,
    ),
    Option(
        "tpot_bound",
        float,
        0.2,
        "Bound of the time per output token after the first, 99th percentile.",
        unit="seconds",
        minimum=0,
    ),
    Option(
        "num_requests",
        int,
        None,
        "Number of requests to replay.",
        minimum=1,
        example="1000",
        unset="all of the trace, once",
    ),
    Option("num_samples", int, 1, "Completions of each prompt.", minimum=1),
    Option("beam_width", int, 0, "Beams of each request; 0 for sampling.", minimum=0),
    Option("enable_prefix_caching", bool, False, "Keep KV for later requests."),
    Option(
        "lengths",
        str,
        "known",
        "Whether requests state their lengths as max_tokens (known), or just end (hidden).",
        choices=("known", "hidden"),
    ),
    Option(
        "length_prediction",
        str,
        "off",
        "Forecast the lengths of outputs: off, prior (by recent outputs) or oracle (as they are).",
        choices=("off", "prior", "oracle"),
    ),
    find_option("preemption_mode"),
    find_option("swap_space"),
    find_option("block_size"),
    find_option("kv_layout"),
    replace(find_option("page_size"), default=2 << 20, minimum=4 << 10),
    find_option("max_model_len"),
    replace(find_option("max_num_seqs"), default=256),
    replace(find_option("max_num_batched_tokens"), default=8192),
    Option("cut", bool, False, "Cut requests that are too long, instead of leaving them out."),
    Option(
        "outputs_of",
        str,
        None,
        "Which outputs to use of a list that has several.",
        unit="name",
    ),
    Option("seed", int, 0, "Seed of the arrivals.", minimum=0),
    OUTPUT,
    Option("save_requests", bool, False, "Write the times of each request to the result too."),
    Option("plot", Path, None, "Write a plot, such as out.png."),
)
