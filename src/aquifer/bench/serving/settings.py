"""What the options of `aquifer bench serve` mean together, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aquifer.bench.options import ENGINE
from aquifer.bench.result import check_writable
from aquifer.bench.serving.figures import parse_goodput, parse_metrics, parse_percentiles
from aquifer.bench.serving.load import is_chat
from aquifer.bench.serving.options import CHAT, COMPLETIONS
from aquifer.bench.serving.prompts import spread
from aquifer.bench.workload import LengthRange
from aquifer.errors import ConfigError

_DEFAULT_INPUT_TOKENS = 1024
_DEFAULT_OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Settings:
    """Options that are checked before anything starts.

    Args:
        endpoint: path of the requests.
        inputs: lengths of prompts.
        outputs: lengths of outputs.
        metrics: latencies to print.
        percentiles: percentiles of the latencies.
        goodput_ms: bounds of a good request.
    """

    endpoint: str
    inputs: LengthRange
    outputs: LengthRange
    metrics: list[str]
    percentiles: list[float]
    goodput_ms: dict[str, float]

    @classmethod
    def of(cls, options: SimpleNamespace) -> Settings:
        """Check options.

        Raises:
            ConfigError: one is not allowed, or two contradict each other.
        """
        ratio = options.random_range_ratio
        inputs = _lengths("input", options.input_len, options.random_input_len, ratio)
        outputs = _lengths("output", options.output_len, options.random_output_len, ratio)
        if ratio is not None and not (options.random_input_len or options.random_output_len):
            raise ConfigError(
                "--random-range-ratio is of --random-input-len and --random-output-len; give one "
                "of them, or ranges such as --input-len 100-1024"
            )
        return cls(
            _endpoint(options),
            inputs or LengthRange(_DEFAULT_INPUT_TOKENS, _DEFAULT_INPUT_TOKENS),
            outputs or LengthRange(_DEFAULT_OUTPUT_TOKENS, _DEFAULT_OUTPUT_TOKENS),
            parse_metrics(options.percentile_metrics),
            parse_percentiles(options.metric_percentiles),
            parse_goodput(options.goodput),
        )


def model_of(argument: str | None, option: str | None) -> str | None:
    """The model, given as MODEL or as `--model`; None if it is neither.

    Raises:
        ConfigError: both are given, and differ.
    """
    if argument is not None and option is not None and argument != option:
        raise ConfigError(f"MODEL is {argument!r} and --model is {option!r}; leave out one of them")
    return argument if option is None else option


def url_of(options: SimpleNamespace) -> str | None:
    """The URL of the running server; None to start one.

    Raises:
        ConfigError: it is given in two ways.
    """
    if options.host is None and options.port is None:
        return None if options.base_url is None else str(options.base_url)
    if options.base_url is not None:
        raise ConfigError("--base-url has the host and the port; leave out --host and --port")
    host = options.host or "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{options.port or 8000}"


def _endpoint(options: SimpleNamespace) -> str:
    wants_chat = options.backend == "openai-chat"
    endpoint = options.endpoint or (CHAT if wants_chat else COMPLETIONS)
    if not endpoint.startswith("/") or not endpoint.isascii() or " " in endpoint:
        raise ConfigError(f"--endpoint is {endpoint!r}; write a path, such as {COMPLETIONS}")
    if is_chat(endpoint) != wants_chat:
        fitting = "openai" if wants_chat else "openai-chat"
        raise ConfigError(
            f"--endpoint is {endpoint!r}, which --backend {options.backend} does not use; add "
            f"--backend {fitting}, or leave out --endpoint"
        )
    return str(endpoint)


def _lengths(
    what: str, text: str | None, middle: int | None, ratio: float | None
) -> LengthRange | None:
    if middle is None:
        return None if text is None else LengthRange.parse(text)
    if text is not None:
        raise ConfigError(
            f"--{what}-len and --random-{what}-len both give lengths; leave out one of them"
        )
    return spread(middle, ratio or 0.0)


def refuse_engine_options(engine: Mapping[str, Any]) -> None:
    """Check that no option is set which only a server that is started could have.

    Raises:
        ConfigError: one is set.
    """
    for option in ENGINE:
        if engine[option.name] != option.default:
            raise ConfigError(
                f"{option.flag} is for a server that is started here; leave it out, or start the "
                "running server with it"
            )


def result_file(options: SimpleNamespace, model: str | None) -> Path | None:
    """The file to write, checked; None for none.

    Raises:
        ConfigError: it cannot be written, or options about it contradict each other.
    """
    file: Path | None = options.output
    if options.save_result:
        if file is not None:
            raise ConfigError("--save-result and --output both write the result; leave out one")
        file = (options.result_dir or Path()) / (options.result_filename or _name(options, model))
    elif options.result_dir is not None or options.result_filename is not None:
        raise ConfigError("--result-dir and --result-filename are for --save-result; add it")
    if file is not None:
        check_writable(file, "--output" if file is options.output else "--save-result")
    return file


def _name(options: SimpleNamespace, model: str | None) -> str:
    """The name that vLLM gives to the file, of the model's name as far as it is given."""
    limit = options.max_concurrency
    written = options.served_model_name or model
    parts = [options.backend, f"{options.request_rate}qps"]
    parts += [f"concurrency{limit}"] if limit is not None else []
    parts += [Path(written).name] if written is not None else []
    return "-".join([*parts, datetime.now().strftime("%Y%m%d-%H%M%S")]) + ".json"
