"""Every option, in one table: `OPTIONS`.

The command line, `LLM(...)`, YAML keys, environment variables, fields of `EngineConfig` and
`ServerConfig`, and README's table are made from it or compared with it. A new option is an entry
here or in a part of it (`aquifer.memory_options`), a field of one of these, a key of `LLMOptions`
if `LLM` has it, and a run of tools/options_table.py.
"""

from __future__ import annotations

from typing import Any

from aquifer.memory_options import MEMORY_OPTIONS
from aquifer.option import DTYPES, Option, Scope

OPTIONS: tuple[Option, ...] = (
    Option(
        "models",
        str,
        (),
        "Models to serve: PATH, NAME=PATH, a folder of models, ORG/NAME of the Hugging Face hub, "
        "or 'demo'.",
        unit="model",
        scopes=("serve",),
        many=True,
        is_argument=True,
    ),
    Option(
        "served_model_name",
        str,
        (),
        "Name of the only model in the API; repeat it for further names of the same model.",
        scopes=("serve",),
        field="models",
        unset="its path, or the last part of it",
        many=True,
    ),
    Option(
        "revision",
        str,
        None,
        "Branch, tag or commit of the model, if it is from the Hugging Face hub.",
        scopes=("serve", "run", "bench", "llm"),
        field="models",
        unset="its default branch",
    ),
    Option("host", str, "127.0.0.1", "Address to listen on.", unit="address", scopes=("serve",)),
    Option(
        "port",
        int,
        8000,
        "Port to listen on; 0 for a free one.",
        scopes=("serve",),
        minimum=0,
        maximum=65535,
    ),
    Option(
        "api_server_count",
        int,
        1,
        "Processes that serve HTTP: text to tokens, and back. One carries some 100 000 tokens/s.",
        unit="processes",
        scopes=("serve",),
        minimum=1,
        maximum=64,
    ),
    Option(
        "api_key",
        str,
        None,
        "Bearer token that clients must send: one key, or several separated by commas.",
        scopes=("serve",),
        unset="clients need none",
    ),
    Option(
        "api_key_for_all",
        bool,
        False,
        "Require the API key for /metrics, /version and the API's documents too, not for /health.",
        scopes=("serve",),
    ),
    Option(
        "allowed_origins",
        str,
        None,
        "Web origins that browsers may call the API from (CORS), separated by commas; * for any.",
        scopes=("serve",),
        example="https://chat.example.org",
        unset="none",
    ),
    Option(
        "allowed_methods",
        str,
        None,
        "HTTP methods that pages of these origins may use, separated by commas.",
        scopes=("serve",),
        example="GET,POST",
        unset="all",
    ),
    Option(
        "allowed_headers",
        str,
        None,
        "Request headers that pages of these origins may send, separated by commas.",
        scopes=("serve",),
        example="Authorization,Content-Type",
        unset="all",
    ),
    Option(
        "allow_credentials",
        bool,
        False,
        "Let browsers send cookies, such as a proxy's, with requests of pages of these origins.",
        scopes=("serve",),
    ),
    Option(
        "enable_tokenizer_info_endpoint",
        bool,
        False,
        "Serve /tokenizer_info: the tokenizer's configuration and the chat template.",
        scopes=("serve",),
    ),
    Option(
        "log_level",
        str,
        "info",
        "Least level of the messages on standard error: debug, info, warning or error.",
        scopes=("serve",),
        choices=("debug", "info", "warning", "error"),
    ),
    Option(
        "disable_log_stats",
        bool,
        False,
        "Do not log throughput, queue and cache every 10 s while there is traffic.",
        scopes=("serve",),
    ),
    Option(
        "enable_log_requests",
        bool,
        False,
        "Log each request: id, length of the prompt, parameters, and how it ended.",
        scopes=("serve",),
    ),
    Option(
        "max_log_len",
        int,
        None,
        "Characters, or token ids, of each prompt to log with --enable-log-requests.",
        scopes=("serve",),
        minimum=1,
        example="200",
        unset="prompts are not logged",
    ),
    Option(
        "device",
        str,
        "auto",
        "auto (a GPU if there is one, else the CPU), cpu, cuda (the first GPU) or cuda:N.",
        scopes=("serve", "run", "bench", "llm"),
        choices=("auto", "cpu", "cuda", "cuda:N"),
    ),
    Option(
        "devices",
        str,
        None,
        "Several devices to serve on, separated by commas; each is cuda:N or cpu, has a process of "
        "its own, and --memory is that of each. Any model may run on any of them, or on several.",
        scopes=("serve",),
        example="cuda:0,cuda:1",
        unset="the one of --device",
    ),
    Option(
        "workers",
        int,
        None,
        "Serve as a cluster on Ray, with so many workers: each has an engine process, and --memory "
        "is that of each; 0 for as many as there is room for (each GPU, or each node without one).",
        scopes=("serve",),
        minimum=0,
        maximum=1024,
        example="2",
        unset="no cluster",
    ),
    Option(
        "placement",
        str,
        "affinity",
        "The device that gets a request: affinity (where its first token is expected first), "
        "least-loaded, round-robin or random.",
        scopes=("serve",),
        choices=("affinity", "least-loaded", "round-robin", "random"),
    ),
    Option(
        "tensor_parallel_size",
        int,
        1,
        "Devices that each model is split over: that of --device and those after it, each with a "
        "process of its own. --memory is that of each. With --devices, these are taken in groups.",
        unit="devices",
        scopes=("serve", "run", "bench", "llm"),
        minimum=1,
        maximum=64,
        example="2",
        short="-tp",
    ),
    Option(
        "load_format",
        str,
        "auto",
        "auto (the checkpoint's weights) or dummy (random ones; config.json is enough).",
        scopes=("serve", "run", "bench", "llm"),
        choices=("auto", "dummy"),
    ),
    Option(
        "dtype",
        str,
        "auto",
        "auto (the checkpoint's own), float32, bfloat16 or float16.",
        scopes=("serve", "run", "bench", "llm"),
        choices=DTYPES,
    ),
    Option(
        "state_dtype",
        str,
        "auto",
        "Precision of recurrent state: auto (that of the weights), float32, bfloat16 or float16.",
        scopes=("serve", "run", "bench", "llm"),
        choices=DTYPES,
    ),
    Option(
        "threads",
        int,
        None,
        "CPU threads that run each step; on a GPU, what the GPU leaves to the CPU.",
        scopes=("serve", "run", "bench", "llm"),
        minimum=1,
        maximum=1024,
        example="4",
        unset="OMP_NUM_THREADS, or else by the size of each step, up to the CPUs of the process",
    ),
    Option(
        "max_model_len",
        int,
        None,
        "Longest context: prompt and output of one sequence.",
        unit="tokens",
        scopes=("serve", "run", "llm"),
        minimum=1,
        example="32K",
        unset="what the model allows",
    ),
    Option(
        "max_num_seqs",
        int,
        None,
        "Sequences of one model that run at once.",
        scopes=("serve", "llm"),
        minimum=1,
        example="256",
        unset="256, or 512 on a GPU",
    ),
    Option(
        "max_num_batched_tokens",
        int,
        None,
        "Tokens of one step, prompts and outputs together; longer prompts are read in chunks.",
        unit="tokens",
        scopes=("serve", "run", "bench", "llm"),
        minimum=1,
        example="2048",
        unset="2048, or 8192 on a GPU",
    ),
    Option(
        "max_prefill_ms",
        int,
        None,
        "Most milliseconds of a step that go to prompts while other requests decode, which get no "
        "token meanwhile; 0 for no limit.",
        unit="milliseconds",
        scopes=("serve", "run", "bench", "llm"),
        minimum=0,
        example="20",
        unset="no limit; 40 in a server on a GPU",
    ),
    Option(
        "max_num_waiting",
        int,
        1024,
        "Requests that may wait; more are refused with status 429.",
        scopes=("serve",),
        minimum=1,
    ),
    Option(
        "max_share_by_key",
        float,
        0.5,
        "Most of the waiting requests, and of the memory for pinned prefixes, that one of several "
        "API keys may have.",
        unit="fraction",
        scopes=("serve",),
        above=0,
        maximum=1,
    ),
    Option(
        "express_share",
        float,
        0.05,
        "Most of the time for steps that only API keys with few requests take part in, beside one "
        "with many.",
        unit="fraction",
        scopes=("serve",),
        minimum=0,
        maximum=0.5,
    ),
    *MEMORY_OPTIONS,
    Option(
        "chat_template",
        str,
        None,
        "Jinja template used in place of the model's own: a file, or in Python its text.",
        unit="file",
        scopes=("serve", "run", "llm"),
        unset="the model's own",
    ),
    Option(
        "trust_request_chat_template",
        bool,
        False,
        "Accept chat templates from clients; they are rendered in a process of their own.",
        scopes=("serve",),
    ),
    Option(
        "seed",
        int,
        None,
        "Seed for requests that have none.",
        scopes=("serve", "run", "llm"),
        example="0",
        unset="a different one at each start",
    ),
    Option(
        "shutdown_timeout",
        float,
        10.0,
        "Time for running requests to finish after the signal to stop.",
        unit="seconds",
        scopes=("serve",),
        field="shutdown_timeout_s",
        minimum=0,
    ),
)
"""The table. Its order is that of the help, of `LLM`'s signature and of README."""


def options_of(scope: Scope) -> tuple[Option, ...]:
    """The options that an interface has."""
    return tuple(option for option in OPTIONS if scope in option.scopes)


def find_option(name: str) -> Option:
    """The option of that name."""
    return next(option for option in OPTIONS if option.name == name)


def default_of(name: str) -> Any:
    """The default of the option of that name."""
    return find_option(name).default
