"""The command line: serve, run, compile, info, bench, replay, and commands to a running server.

Heavy packages are imported inside the commands, so that `--help` and `--version` are quick, and a
wrong option or path is reported at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from aquifer import __version__
from aquifer.chat import converse, message, say
from aquifer.config import BUNDLED_MODELS, EngineConfig, field_values, parse_models
from aquifer.cpus import limit_spinning
from aquifer.errors import AquiferError, ConfigError
from aquifer.garbage import collect_nothing_at_exit
from aquifer.hub import locate
from aquifer.option import Option
from aquifer.options import OPTIONS, options_of
from aquifer.parameters import PRECEDENCE, ModelArgument, values_for, with_options
from aquifer.sizes import format_size

if TYPE_CHECKING:
    from aquifer.memory.driver.base import Driver

_REPEATS = 200  # calls of each driver function that `info` measures
_INTERRUPTED = 130  # the exit code that shells give to a command ended by Ctrl-C


class _Commands(TyperGroup):
    """The commands; those that measure, replay and predict are imported when they are needed.

    A server starts sooner without them.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        self._import_others()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None if there is none of this name."""
        if cmd_name not in self.commands:
            self._import_others()
        return super().get_command(ctx, cmd_name)

    def _import_others(self) -> None:
        from aquifer.bench.cli import app as bench_app
        from aquifer.bench.replay_command import replay
        from aquifer.cluster_cli import app as cluster_app
        from aquifer.predict_cli import app as predict_app

        others = typer.Typer()
        others.command("replay")(replay)
        others.add_typer(bench_app, name="bench")
        others.add_typer(cluster_app, name="cluster")
        others.add_typer(predict_app, name="predict")
        self.commands.update(typer.main.get_group(others).commands)


app = typer.Typer(
    cls=_Commands,
    help="Aquifer serves language models from one pool of memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> NoReturn:
    """Run the command line; Aquifer's own errors print one line and exit with 2 (options) or 1."""
    limit_spinning()
    collect_nothing_at_exit()
    try:
        try:
            app()
        finally:
            _write_buffered()
    except AquiferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        what = error.filename or "the output"
        print(f"error: {what} could not be written: {error.strerror}", file=sys.stderr)
        _discard_output()
        sys.exit(1)
    sys.exit(0)


def _write_buffered() -> None:
    """Write the buffered output now, since later an error could not be told.

    Raises:
        OSError: it cannot be written, for another reason than that its reader is gone.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    """Have what is buffered go nowhere when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"aquifer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


_CHAT_OPTIONS = (
    Option("raw", bool, False, "Complete the text as it is, without the chat template."),
    Option("max_tokens", int, 512, "Most tokens of an answer.", unit="tokens", minimum=1),
    Option(
        "temperature",
        float,
        None,
        "Sampling temperature; 0 is greedy.",
        minimum=0,
        example="0.7",
        unset="what the model recommends, or 1",
    ),
)


@app.command("serve", epilog=f"{PRECEDENCE}, and the environment over the file of --config.")
@with_options(options_of("serve"), environment=True, config_file=True)
def _serve(options: SimpleNamespace) -> None:
    """Serve models over HTTP, with OpenAI's API."""
    from aquifer.serving import configurations, with_progress

    engine_config, server_config = configurations(options)
    if server_config.workers is not None:
        from aquifer.cluster.front import serve_on_this_machine

        with_progress(serve_on_this_machine, engine_config, server_config)
        return

    from aquifer.serve.server import serve

    with_progress(serve, engine_config, server_config)


@app.command("run", epilog=f"{PRECEDENCE}.")
@with_options((*_CHAT_OPTIONS, *options_of("run")), environment=True)
def _run(
    model: ModelArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(help="What to say; default: standard input, or a conversation."),
    ] = None,
    *,
    options: SimpleNamespace,
) -> None:
    """Talk to a model in the terminal."""
    from aquifer.engine.params import SamplingParams
    from aquifer.llm import LLM
    from aquifer.serve.models import sampling_defaults

    with LLM(model, **values_for("run", options)) as llm:
        values = sampling_defaults(llm.path)
        if options.temperature is not None:
            values["temperature"] = options.temperature
        params = SamplingParams(**values, max_tokens=options.max_tokens, seed=options.seed)
        is_chat = (
            not options.raw
            and llm.tokenizer is not None
            and llm.tokenizer.chat_template is not None
        )
        if prompt is None and sys.stdin.isatty():
            converse(llm, params, is_chat)
            return
        text = sys.stdin.read() if prompt is None else prompt
        _, is_whole = say(llm, [message("user", text)] if is_chat else text, params)
    if not is_whole:
        raise typer.Exit(_INTERRUPTED)


_COMPILE_OPTIONS = tuple(
    option
    for option in OPTIONS
    if option.name
    in (
        "models",
        "revision",
        "device",
        "tensor_parallel_size",
        "dtype",
        "state_dtype",
        "memory",
        "gpu_memory_utilization",
        "page_size",
        "kv_cache",
        "kv_layout",
        "block_size",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
    )
)
"""Those of `serve` that kernels depend on. Of a server's file the others may be there too."""


@app.command("compile", epilog=f"{PRECEDENCE}, and the environment over the file of --config.")
@with_options(_COMPILE_OPTIONS, environment=True, config_file=True)
def _compile(options: SimpleNamespace) -> None:
    """Compile the GPU kernels that models need, so that `serve` with the same options finds them.

    It needs a GPU and no weights. --config may be the server's own file. Kernels are kept in
    TRITON_CACHE_DIR, or ~/.triton/cache, by GPU type, source code, and versions of Triton and its
    compiler.
    """
    if not options.models:
        raise ConfigError("no model given; write aquifer compile PATH")
    if options.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {options.tensor_parallel_size}; kernels are compiled ahead "
            "for models on one device only, so leave it out, or start the server"
        )
    values = field_values(EngineConfig, vars(options)) | {"load_format": "dummy"}
    named = locate(parse_models(options.models), options.revision, weights=False)
    config = EngineConfig(named, **values)

    from aquifer.engine.engine import Engine
    from aquifer.kernels import compilations, kernel_folder
    from aquifer.memory.driver import open_driver
    from aquifer.progress import LoadingBar

    with contextlib.closing(open_driver(config.device)) as driver:
        if driver.device.type == "cpu":
            raise ConfigError(
                "kernels are compiled for a GPU, and this device is the CPU; run it on a machine "
                "with one, with --device cuda"
            )
    begun_s = time.perf_counter()
    with LoadingBar() as bar:
        for model in config.models:  # one after the other, as all may not fit
            Engine.open(replace(config, models=(model,)), bar.update).close()
    seconds = time.perf_counter() - begun_s
    print(f"{compilations.count} kernels are ready after {seconds:.1f} s, in {kernel_folder()}")


_Url = Annotated[str, typer.Option(metavar="URL", help="Address of the server.")]
_Key = Annotated[
    str | None,
    typer.Option(metavar="KEY", envvar="AQUIFER_API_KEY", help="Its API key, if it has one."),
]
_ServedModel = Annotated[str, typer.Argument(metavar="MODEL", help="Name of a served model.")]
_Addition = Annotated[
    str, typer.Argument(metavar="MODEL", help="PATH, NAME=PATH or ORG/NAME, as for `serve`.")
]
_LOCAL_URL = "http://127.0.0.1:8000"


@app.command("ps")
def _ps(url: _Url = _LOCAL_URL, api_key: _Key = None) -> None:
    """Show the models of a running server: state, memory, requests."""
    from aquifer.operate import fetch_memory, table_of

    Console().print(table_of(fetch_memory(url, api_key)))


@app.command("load")
def _load(model: _ServedModel, url: _Url = _LOCAL_URL, api_key: _Key = None) -> None:
    """Have a running server load a model, and wait until it is loaded."""
    _manage("load", model, url, api_key)


@app.command("unload")
def _unload(model: _ServedModel, url: _Url = _LOCAL_URL, api_key: _Key = None) -> None:
    """Have a running server give back the memory of a model's weights."""
    _manage("unload", model, url, api_key)


@app.command("pin")
def _pin(model: _ServedModel, url: _Url = _LOCAL_URL, api_key: _Key = None) -> None:
    """Have a running server load a model and keep it, whatever else is asked for."""
    _manage("pin", model, url, api_key)


@app.command("unpin")
def _unpin(model: _ServedModel, url: _Url = _LOCAL_URL, api_key: _Key = None) -> None:
    """Let the weights of a model that was pinned give way again."""
    _manage("unpin", model, url, api_key)


@app.command("add")
def _add(model: _Addition, url: _Url = _LOCAL_URL, api_key: _Key = None) -> None:
    """Have a running server serve another model; it is loaded at its first request."""
    from aquifer.operate import add

    done = add(url, api_key, model)
    print(f"{done['name']} is served, from {done['path']}")


@app.command("remove")
def _remove(model: _ServedModel, url: _Url = _LOCAL_URL, api_key: _Key = None) -> None:
    """Have a running server serve a model no more; its requests end with an error."""
    from aquifer.operate import remove

    remove(url, api_key, model)
    print(f"{model} is removed")


def _manage(verb: str, model: str, url: str, api_key: str | None) -> None:
    from aquifer.operate import manage

    done = manage(url, api_key, verb, model)
    print(
        f"{done['name']} is {done['status']}: {done['weights_resident']} of "
        f"{done['weights_total']} of its weights are in the pool"
        + (", pinned" if done["pinned"] else "")
    )


@app.command("info")
def _info() -> None:
    """Show the devices, what their driver's calls cost, and versions."""
    from importlib import metadata

    import torch

    table = Table(show_header=False, box=None)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in ("cpu", *(f"cuda:{index}" for index in range(num_gpus))):
        try:
            _add_device(table, device)
        except AquiferError as error:  # a package is missing, or the GPU is taken
            table.add_row("device", f"{device} cannot be used: {error}")
        table.add_row()
    table.add_row("aquifer", __version__)
    table.add_row("python", platform.python_version())
    for package in ("torch", "transformers"):
        table.add_row(package, metadata.version(package))
    for name, path in BUNDLED_MODELS.items():
        table.add_row(f"bundled model {name}", str(path) if path.is_dir() else "not there")
    Console().print(table)


def _add_device(table: Table, device: str) -> None:
    """Add rows that describe one device."""
    from aquifer.memory.driver import open_driver
    from aquifer.memory.driver.cuda import CudaDriver

    with contextlib.closing(open_driver(device)) as driver:
        table.add_row("device", f"{driver.device} ({driver.name} driver)")
        if isinstance(driver, CudaDriver):
            table.add_row("product", driver.product)
            table.add_row(
                "driver version", f"{_nvidia_version()}, up to CUDA {driver.cuda_version}"
            )
        table.add_row("memory in all", format_size(driver.total_bytes()))
        table.add_row("memory available", format_size(driver.available_bytes()))
        if overhead_bytes := driver.overhead_bytes():
            table.add_row("memory of this process", format_size(overhead_bytes))
        table.add_row("page size", format_size(driver.default_page_bytes))
        table.add_row("page granularity", format_size(driver.granularity_bytes))
        for call, seconds in _measure_driver(driver).items():
            table.add_row(f"{call} one page", f"{seconds * 1e6:.1f} us (median of {_REPEATS})")


def _nvidia_version() -> str:
    """The version of the NVIDIA driver that the system has loaded."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


def _measure_driver(driver: Driver) -> dict[str, float]:
    """Median seconds of each driver call for one page."""
    page_bytes = driver.default_page_bytes
    address = driver.reserve(page_bytes)
    seconds: dict[str, list[float]] = {"create": [], "map": [], "unmap": [], "release": []}

    def timed(name: str, start_s: float) -> None:
        seconds[name].append(time.perf_counter() - start_s)

    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        handles = driver.create(page_bytes, 1)
        timed("create", start_s)
        start_s = time.perf_counter()
        driver.map(address, handles)
        timed("map", start_s)
        start_s = time.perf_counter()
        driver.unmap(address, page_bytes, 1)
        timed("unmap", start_s)
        start_s = time.perf_counter()
        driver.release(handles)
        timed("release", start_s)
    driver.free(address, page_bytes)
    return {name: statistics.median(values) for name, values in seconds.items()}
