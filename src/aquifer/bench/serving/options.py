"""Options of `aquifer bench serve`, as `vllm bench serve` names them."""

from __future__ import annotations

import math
from pathlib import Path

from aquifer.bench.options import ENGINE, OUTPUT
from aquifer.bench.serving.figures import METRICS
from aquifer.option import Option

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_SERVER = (
    Option("model", str, None, "The same as MODEL.", unset="MODEL"),
    Option(
        "base_url",
        str,
        None,
        "Measure the server that runs there.",
        unit="url",
        example="http://127.0.0.1:8000",
        unset="start one",
    ),
    Option("host", str, None, "Host of a running server.", unset="127.0.0.1 with --port"),
    Option(
        "port",
        int,
        None,
        "Port of a running server.",
        minimum=1,
        maximum=65535,
        example="8000",
        unset="8000 with --host",
    ),
    Option(
        "backend",
        str,
        "openai",
        "openai or vllm (completions of token ids), or openai-chat (conversations).",
        choices=("openai", "vllm", "openai-chat"),
    ),
    Option("endpoint", str, None, "Path of the requests.", unit="path", unset="by the backend"),
    Option("api_key", str, None, "Key of the server.", unset="OPENAI_API_KEY"),
    Option(
        "served_model_name",
        str,
        None,
        "Name in the requests.",
        unit="name",
        unset="MODEL, or the first of /v1/models",
    ),
    Option(
        "tokenizer",
        str,
        None,
        "Folder of the model or its ORG/NAME; makes chat prompts and bounds token ids.",
        unit="path",
        unset="MODEL",
    ),
)

_LOAD = (
    Option("num_prompts", int, 1000, "Number of requests.", minimum=1),
    Option(
        "request_rate",
        float,
        math.inf,
        "Requests a second; inf sends all at once.",
        above=0,
        may_be_infinite=True,
        example="12",
    ),
    Option(
        "burstiness",
        float,
        1.0,
        "Shape of the gamma distribution of times between requests; 1 is a Poisson process.",
        above=0,
        may_be_infinite=True,
    ),
    Option(
        "max_concurrency",
        int,
        None,
        "Most requests at once; others wait.",
        minimum=1,
        example="64",
        unset="no limit",
    ),
    Option(
        "input_len",
        str,
        None,
        "Tokens of each prompt: 1024, or a range 100-1024.",
        unit="tokens",
        unset="1024",
    ),
    Option(
        "output_len",
        str,
        None,
        "Tokens of each output: 128, or a range 100-1024.",
        unit="tokens",
        unset="128",
    ),
    Option(
        "dataset_name",
        str,
        "random",
        "Kind of prompts; there are only random ones.",
        choices=("random",),
    ),
    Option(
        "random_input_len",
        int,
        None,
        "As --input-len, with --random-range-ratio.",
        unit="tokens",
        minimum=1,
        example="1024",
        unset="--input-len",
    ),
    Option(
        "random_output_len",
        int,
        None,
        "As --output-len, with --random-range-ratio.",
        unit="tokens",
        minimum=1,
        example="128",
        unset="--output-len",
    ),
    Option(
        "random_range_ratio",
        float,
        None,
        "Lengths lie between 1 - ratio and 1 + ratio times those of --random-...-len.",
        minimum=0,
        maximum=1,
        example="0.5",
        unset="0",
    ),
    Option("seed", int, 0, "Seed of lengths, prompts and arrivals.", minimum=0),
    Option("ignore_eos", bool, True, "Generate all tokens of --output-len."),
    Option(
        "temperature",
        float,
        None,
        "Sampling temperature; 0 is greedy.",
        minimum=0,
        example="0",
        unset="the server's",
    ),
    Option("num_warmups", int, 0, "Requests before the first pass that do not count.", minimum=0),
    Option("passes", int, 1, "Passes of the same load, each with other tokens.", minimum=1),
)

_RESULT = (
    Option(
        "goodput",
        str,
        (),
        "Bounds of a good request in ms, of ttft, tpot and e2el: ttft:500 tpot:50.",
        unit="name:ms",
        many=True,
    ),
    Option("percentile_metrics", str, ",".join(METRICS), "Latencies that are printed."),
    Option("metric_percentiles", str, "99", "Percentiles of the latencies, such as 50,90,99."),
    Option("save_result", bool, False, "Write the result to a JSON file."),
    Option("result_dir", Path, None, "Folder of that file.", unset="this folder"),
    Option(
        "result_filename",
        str,
        None,
        "Name of that file.",
        unset="by backend, rate, model and time",
    ),
    OUTPUT,
)

SERVE = (*_SERVER, *_LOAD, *_RESULT, *ENGINE)
