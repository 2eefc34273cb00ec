"""`aquifer bench serve`: a load on a server over HTTP, as `vllm bench serve` measures it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from aquifer.bench.result import gpus, save
from aquifer.bench.serving.figures import figures_of
from aquifer.bench.serving.load import Load, Run, arrival_times, is_chat, send
from aquifer.bench.serving.options import SERVE
from aquifer.bench.serving.prompts import UNKNOWN_VOCAB_SIZE, RequestMaker, vocab_size_of
from aquifer.bench.serving.report import passes_table, result_lines
from aquifer.bench.serving.server import server_arguments, serving
from aquifer.bench.serving.settings import (
    Settings,
    model_of,
    refuse_engine_options,
    result_file,
    url_of,
)
from aquifer.bench.serving.target import Target
from aquifer.bench.workload import Workload
from aquifer.config import ModelSpec
from aquifer.errors import ConfigError, EngineError
from aquifer.hub import locate
from aquifer.parameters import values_for, with_options
from aquifer.progress import counting_bar

if TYPE_CHECKING:
    from aquifer.text import Tokenizer

_BOUND = re.compile(r"[a-z0-9]+:")
_REFRESH_HZ = 1  # the bar is drawn in the client's process


class ServeCommand(TyperCommand):
    """The command, which takes several values after `--goodput`, as vLLM's does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments in which the flag stands before each of the values that follow it."""
        spread_out: list[str] = []
        follows = False
        for argument in args:
            follows = spread_out[-1:] == ["--goodput"] or (follows and bool(_BOUND.match(argument)))
            if follows and spread_out[-1] != "--goodput":
                spread_out.append("--goodput")
            spread_out.append(argument)
        return super().parse_args(ctx, spread_out)


@with_options(SERVE)
def serve(
    options: SimpleNamespace,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model to start a server with; of a running server, the name that it has there.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure a load of concurrent streams on an OpenAI-compatible server, over HTTP.

    With --base-url, --host or --port it is a server that runs already; else `aquifer serve MODEL`
    is started on this machine. Options and figures are those of `vllm bench serve`.
    """
    model = model_of(name, options.model)
    settings = Settings.of(options)
    url = url_of(options)
    engine = values_for("bench", options)
    if url is None and model is None:
        raise ConfigError(
            "there is no server to measure; give --base-url of a running one, or a MODEL to start "
            "one with"
        )
    if url is not None:
        refuse_engine_options(engine)
    file = result_file(options, model)
    api_key = options.api_key or os.environ.get("OPENAI_API_KEY") or None
    with contextlib.ExitStack() as resources:
        folder, server = None, {}
        if url is None:
            assert model is not None
            weights = options.load_format != "dummy"
            (found,) = locate([ModelSpec.parse(model)], options.revision, weights=weights)
            folder = found.path
            url = resources.enter_context(serving(model, server_arguments(engine)))
            server = {**engine, "server_gpus": gpus()}
        target = Target.reach(url, api_key)
        served = _served_name(target, options.served_model_name, model)
        if folder is None or options.tokenizer is not None:
            folder = _folder(options.tokenizer, model or served)
        maker = _maker(settings, options, served, folder)
        passes = _measure(target, maker, settings, options)
    figures = {
        "benchmark": "serve",
        "backend": options.backend,
        "base_url": target.url,
        "endpoint": settings.endpoint,
        "model_id": served,
        **server,
        **{key: _plain(getattr(options, key)) for key in ("ignore_eos", "temperature", "seed")},
        "input_len": f"{settings.inputs.lowest}-{settings.inputs.highest}",
        "output_len": f"{settings.outputs.lowest}-{settings.outputs.highest}",
        "goodput": settings.goodput_ms or None,
        "num_warmups": options.num_warmups,
        **passes[-1],
        "passes": passes,
    }
    console = Console()
    if len(passes) > 1:
        console.print(passes_table(passes, max(settings.percentiles)))
    if file is not None:
        save(file, figures, command=_command(options.api_key))
        console.print(f"written to {file}", soft_wrap=True)


def _measure(
    target: Target, maker: RequestMaker, settings: Settings, options: SimpleNamespace
) -> list[dict[str, Any]]:
    """Run warm-up and passes, and print each; returns their figures."""
    limit = options.max_concurrency
    if options.num_warmups:
        bodies = maker.bodies(options.passes, options.num_warmups)
        arrivals_s = [0.0] * len(bodies)
        run = send(target, Load(settings.endpoint, bodies, arrivals_s, limit))
        _check_answered(run, maker)
    arrivals = arrival_times(
        options.num_prompts, options.request_rate, options.burstiness, options.seed
    )
    passes = []
    for number in range(options.passes):
        load = Load(settings.endpoint, maker.bodies(number), arrivals.tolist(), limit)
        with counting_bar(refresh_hz=_REFRESH_HZ) as progress:
            task = progress.add_task("requests", total=options.num_prompts)
            run = send(target, load, lambda: progress.advance(task))  # noqa: B023
        _check_answered(run, maker)
        figures = {
            "num_prompts": options.num_prompts,
            "request_rate": _plain(options.request_rate),
            "burstiness": _plain(options.burstiness),
            "max_concurrency": limit,
            **figures_of(run, settings.percentiles, settings.goodput_ms),
        }
        title = "Serving Benchmark Result"
        if options.passes > 1:
            title += f", pass {number + 1} of {options.passes}"
        for line in result_lines(figures, settings.metrics, settings.percentiles, title):
            print(line)
        passes.append(figures)
    return passes


def _check_answered(run: Run, maker: RequestMaker) -> None:
    if not run.streams:
        message = run.failures[0].message
        if maker.guesses_vocabulary and "token id" in message.lower():
            message += "; give the model's folder or its ORG/NAME with --tokenizer"
        raise EngineError(f"no request succeeded: {message}")


def _maker(
    settings: Settings, options: SimpleNamespace, served: str, folder: Path | None
) -> RequestMaker:
    tokenizer = _tokenizer(folder) if is_chat(settings.endpoint) else None
    vocab_size = UNKNOWN_VOCAB_SIZE if folder is None else vocab_size_of(folder)
    workload = Workload.random(
        options.num_prompts, settings.inputs, settings.outputs, vocab_size, options.seed
    )
    fields: dict[str, Any] = {"model": served}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    if options.temperature is not None:
        fields["temperature"] = options.temperature
    return RequestMaker(workload, vocab_size, settings.endpoint, fields, tokenizer)


def _folder(tokenizer: str | None, model: str) -> Path | None:
    """The folder with the running server's model; None if it is not on this machine.

    Args:
        tokenizer: the option; it may be on the hub.
        model: MODEL, or the served name.

    Raises:
        ConfigError: the option names no model.
    """
    if tokenizer is not None:
        (found,) = locate([ModelSpec.parse(tokenizer)], weights=False)
        return found.path
    path = ModelSpec.parse(model).path
    return path if (path / "config.json").is_file() else None


def _tokenizer(folder: Path | None) -> Tokenizer:
    from aquifer.text import Tokenizer

    tokenizer = None if folder is None else Tokenizer.load(folder)
    if tokenizer is None:
        raise ConfigError(
            "prompts of a chat are made with the model's tokenizer, which is not on this machine; "
            "give its folder or its ORG/NAME with --tokenizer, or measure completions"
        )
    return tokenizer


def _served_name(target: Target, wanted: str | None, model: str | None) -> str:
    """The name for the requests' `model`, if need be the first of the server's list."""
    listed = target.model_names()
    name = wanted or model
    if listed is None:
        if name is None:
            raise ConfigError(f"{target.url} has no list of models; give the MODEL's name")
        return name
    if not listed:
        raise ConfigError(f"{target.url} serves no model; load one")
    if name is None:
        return listed[0]
    names = [name]
    if wanted is None:
        spec = ModelSpec.parse(name)
        names += [spec.name, *spec.aliases]
    found = [candidate for candidate in names if candidate in listed]
    if not found:
        raise ConfigError(
            f"{target.url} has no model {name!r}; it has {', '.join(listed)}: give one of these "
            "with --served-model-name"
        )
    return found[0]


def _plain(value: Any) -> Any:
    """A value for JSON, which has no infinite numbers."""
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def _command(api_key: str | None) -> str:
    """The command line of this process, without the key."""
    return shlex.join(["aquifer", *_without(sys.argv[1:], api_key)])


def _without(arguments: Sequence[str], secret: str | None) -> Iterator[str]:
    for argument in arguments:
        yield argument if secret is None else argument.replace(secret, "...")
