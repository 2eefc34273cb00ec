"""The command line: serve, run, info, bench, replay.

Everything heavy is imported inside the commands, so that `--help` and `--version` are quick.
"""

from __future__ import annotations

import contextlib
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import yaml
from rich.console import Console
from rich.table import Table

from aquifer import __version__
from aquifer.bench.cli import app as bench_app
from aquifer.bench.cli import replay
from aquifer.config import BUNDLED_MODELS, EngineConfig, ModelSpec, format_size, parse_size
from aquifer.errors import AquiferError, ConfigError, EngineError, RequestError

if TYPE_CHECKING:
    from aquifer.engine.llm import LLM
    from aquifer.engine.request import SamplingParams
    from aquifer.memory.driver.base import Driver

_REPEATS = 200  # of each driver call that `info` measures
_INTERRUPTED = 130  # the exit code that shells give to a command ended by Ctrl-C

app = typer.Typer(
    help="Aquifer serves language models from one pool of memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.command("replay")(replay)


def main() -> NoReturn:
    """Run the command line; our own errors end in one line and exit code 2 (options) or 1."""
    try:
        app()
    except AquiferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    sys.exit(0)


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


def _read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Take the options that the file sets as defaults, so that the command line wins."""
    if file is None:
        return None
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold options, one a line, like 'port: 8000'")
    known = {str(p.name) for p in context.command.params} - {"config", "help"}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        name = "models" if name == "model" else name
        if name not in known:
            raise ConfigError(f"{file}: unknown key {key!r}; there is {', '.join(sorted(known))}")
        values[name] = [value] if name == "models" and isinstance(value, str) else value
    context.default_map = values
    return file


_ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Path of a checkpoint, or 'demo'.")
]
_Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
_MaxModelLen = Annotated[
    str | None,
    typer.Option(metavar="TOKENS", help="Longest context, such as 32K; default: the model's."),
]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda (the first GPU) or cuda:N.")]
_LoadFormat = Annotated[str, typer.Option(help="auto, or dummy for random weights.")]
_MaxNumBatchedTokens = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Of one step, prompts and outputs together; default: 2048, or 8192 on a GPU.",
    ),
]
_Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The pool's whole budget, weights included, such as 4G; default: the weights plus "
        "a quarter of free memory, or a part of the GPU.",
    ),
]
_GpuMemoryUtilization = Annotated[
    float, typer.Option(metavar="PART", help="That part of the GPU's memory, without --memory.")
]
_KvCache = Annotated[str, typer.Option(help="virtual (contiguous) or paged (blocks).")]
_PageSize = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Of a physical page, such as 64K; default: the device's."),
]
_BlockSize = Annotated[int, typer.Option(help="Tokens of a block of the paged cache.")]
_Seed = Annotated[int | None, typer.Option(help="For requests that bring none.")]
_ChatTemplate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Jinja file used in place of the model's own template."),
]


@app.command("serve")
def _serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="What to serve: PATH, NAME=PATH, or 'demo'; several share one pool.",
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="AQUIFER_API_KEY",
            help="What clients must send as bearer token: a key, or several separated by commas.",
        ),
    ] = None,
    device: _Device = "auto",
    load_format: _LoadFormat = "auto",
    dtype: _Dtype = "auto",
    max_model_len: _MaxModelLen = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Sequences of one model that run at once.")
    ] = 256,
    max_num_batched_tokens: _MaxNumBatchedTokens = None,
    max_num_waiting: Annotated[
        int, typer.Option(help="Requests that may wait before new ones get 429.")
    ] = 1024,
    memory: _Memory = None,
    gpu_memory_utilization: _GpuMemoryUtilization = 0.9,
    kv_cache: _KvCache = "virtual",
    page_size: _PageSize = None,
    block_size: _BlockSize = 16,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Keep the KV of what was computed for later prompts that begin alike.",
        ),
    ] = True,
    prefix_cache_salt_by_key: Annotated[
        bool,
        typer.Option(
            "--prefix-cache-salt-by-key",
            help="Requests find only prefixes of requests with the same API key.",
        ),
    ] = False,
    swap_space: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Host memory for the KV of preempted sequences; 0 for none."
        ),
    ] = "4GiB",
    preemption_mode: Annotated[
        str,
        typer.Option(
            help="swap (the KV to the host), recompute (it later), or auto for the cheaper one."
        ),
    ] = "auto",
    chat_template: _ChatTemplate = None,
    seed: _Seed = None,
    shutdown_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="For running requests, after the signal to stop."),
    ] = 10.0,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=_read_config,
            is_eager=True,
            help="YAML file that sets any of these options; the command line wins.",
        ),
    ] = None,
) -> None:
    """Serve models over HTTP, as OpenAI's API."""
    from aquifer.engine.progress import LoadingBar
    from aquifer.serve.server import ServerConfig, serve

    engine_config = EngineConfig(
        models=tuple(map(ModelSpec.parse, models)),
        device=device,
        load_format=load_format,
        dtype=dtype,
        memory_bytes=_size("memory", memory),
        gpu_memory_utilization=gpu_memory_utilization,
        page_bytes=_size("page-size", page_size),
        kv_cache=kv_cache,
        block_size=block_size,
        max_model_len=_size("max-model-len", max_model_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_size("max-num-batched-tokens", max_num_batched_tokens),
        max_num_waiting=max_num_waiting,
        enable_prefix_caching=enable_prefix_caching,
        prefix_cache_salt_by_key=prefix_cache_salt_by_key,
        swap_space_bytes=_given_size("swap-space", swap_space),
        preemption_mode=preemption_mode,  # type: ignore[arg-type]  # checked there
        seed=seed,
    )
    server_config = ServerConfig(
        host, port, api_key or None, _read_template(chat_template), shutdown_timeout
    )
    with LoadingBar() as bar:

        def on_ready(url: str) -> None:
            bar.stop()
            print(f"Aquifer is ready on {url}", flush=True)

        serve(
            engine_config,
            server_config,
            on_progress=bar.update,
            on_ready=on_ready,
            on_death=_print_death,
        )


@app.command("run")
def _run(
    model: _ModelArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(help="What to say; default: standard input, or a conversation."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the text as it is, without chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default: what the model recommends, or 1.")
    ] = None,
    seed: _Seed = None,
    device: _Device = "auto",
    load_format: _LoadFormat = "auto",
    dtype: _Dtype = "auto",
    max_model_len: _MaxModelLen = None,
    max_num_batched_tokens: _MaxNumBatchedTokens = None,
    memory: _Memory = None,
    gpu_memory_utilization: _GpuMemoryUtilization = 0.9,
    kv_cache: _KvCache = "virtual",
    page_size: _PageSize = None,
    block_size: _BlockSize = 16,
    chat_template: _ChatTemplate = None,
) -> None:
    """Talk to a model in the terminal."""
    from aquifer.engine.llm import LLM
    from aquifer.engine.request import SamplingParams
    from aquifer.serve.models import sampling_defaults

    values = sampling_defaults(ModelSpec.parse(model).path)
    if temperature is not None:
        values["temperature"] = temperature
    params = SamplingParams(**values, max_tokens=max_tokens, seed=seed)
    with LLM(
        model,
        device=device,
        load_format=load_format,
        memory=memory,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache=kv_cache,
        dtype=dtype,
        page_size=page_size,
        block_size=block_size,
        max_model_len=_size("max-model-len", max_model_len),
        max_num_batched_tokens=_size("max-num-batched-tokens", max_num_batched_tokens),
        chat_template=_read_template(chat_template),
    ) as llm:
        is_chat = not raw and llm.tokenizer is not None and llm.tokenizer.chat_template is not None
        if prompt is None and sys.stdin.isatty():
            _converse(llm, params, is_chat)
            return
        text = sys.stdin.read() if prompt is None else prompt
        _, is_whole = _say(llm, [_message("user", text)] if is_chat else text, params)
    if not is_whole:
        raise typer.Exit(_INTERRUPTED)


@app.command("info")
def _info() -> None:
    """Show the devices, what their driver's calls cost, and versions."""
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
    """What there is to say of one device, a row each."""
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
    """Seconds that each call takes for one page, the median of many."""
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


# ---- helpers


def _size(option: str, text: str | None) -> int | None:
    """A number that may be written like 32K, or nothing."""
    return None if text is None else _given_size(option, text)


def _given_size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"--{option}: {error}") from error


def _read_template(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {file}: {error}") from error


def _print_death(error: EngineError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _converse(llm: LLM, params: SamplingParams, is_chat: bool) -> None:
    """Read lines and answer them until /bye or the end of the input."""
    print("/bye leaves; Ctrl-C stops an answer.", file=sys.stderr)
    history: list[dict[str, str]] = []
    while True:
        try:
            line = input(">>> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/bye":
            return
        if not line:
            continue
        history.append(_message("user", line))
        try:
            answer, _ = _say(llm, history if is_chat else line, params)
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)
            history.pop()
        else:
            history.append(_message("assistant", answer))


def _say(llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams) -> tuple[str, bool]:
    """Print an answer as it comes; (its text, whether Ctrl-C let it come to its end)."""
    pieces: list[str] = []
    stream = llm.stream(prompt, params)
    with _interrupts_counted() as interrupts, contextlib.closing(stream):
        for delta in stream:
            print(delta.text, end="", flush=True)
            pieces.append(delta.text)
            if interrupts:
                break
    print()
    return "".join(pieces), not interrupts


@contextlib.contextmanager
def _interrupts_counted() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising it, which could hit the engine in the middle of a step."""
    seen: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        seen.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)
