"""Time to load a checkpoint's weights onto a device."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from aquifer.errors import ConfigError, InvariantError
from aquifer.memory.driver import open_driver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.models import plan_model
from aquifer.weights.checkpoint import Checkpoint, read_config
from aquifer.weights.loader import Stretch, plan_stretches, scatter
from aquifer.weights.parameters import Parameter, Placement
from aquifer.weights.store import WeightStore

_SHARD_BYTES = 4 << 30
_PINNED_BYTES = 1 << 30  # one allocation of page-locked memory; torch rounds to powers of two
_NUM_READERS = 8
_SLACK_BYTES = 256 << 20  # room in the pool beside the weights
_HOST_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Seconds to load a checkpoint's weights into their pages on the device."""

    device: str
    num_bytes: int  # as stored
    pages_s: float  # to create and map the weights' pages
    load_s: list[float]  # from files, for each repeat
    pinned_s: list[float]  # from pinned (page-locked) memory; empty if not requested
    read_s: float | None  # to pin memory and read the files into it; None if not requested


def measure_load(
    path: Path, device: str, dtype: torch.dtype | None, repeats: int, *, from_pinned: bool
) -> LoadTimes:
    """Load a checkpoint repeatedly, and time each load.

    Args:
        path: path of the checkpoint.
        device: "auto", "cpu" or "cuda".
        dtype: dtype to convert to; None for the checkpoint's own.
        repeats: number of loads. The first may read the files from disk, and allocates the
            loader's buffers.
        from_pinned: then read all weights into pinned memory, and time only the copies from there.

    Raises:
        ConfigError: there is no such checkpoint, or `from_pinned` without a GPU.
        DriverError: the device has too little memory.
    """
    checkpoint = Checkpoint.open(path)
    parameters = plan_model(checkpoint, dtype).parameters
    with ExitStack() as resources:
        driver = open_driver(device)
        resources.callback(driver.close)
        if from_pinned and driver.device.type != "cuda":
            raise ConfigError("--from-pinned needs a GPU; on the host, weights need no copy")
        placed_bytes = Placement.plan(parameters, driver.default_page_bytes).num_bytes
        pool = PagePool(driver, placed_bytes + _SLACK_BYTES)
        resources.callback(pool.close)
        start = time.perf_counter()
        store = WeightStore(pool, Owner("bench", Kind.WEIGHTS), parameters)
        resources.callback(store.close)
        if not store.populate():
            raise InvariantError("the pool was made to hold the weights")
        pages_s = time.perf_counter() - start
        load_s = [_timed(lambda: store.load(checkpoint)) for _ in range(repeats)]
        pinned_s: list[float] = []
        read_s = None
        if from_pinned:
            expected = _sums(store)
            stretches = _stretches(checkpoint, store)
            start = time.perf_counter()
            pinned = _read_pinned(stretches)
            read_s = time.perf_counter() - start
            for tensor in store.tensors.values():
                tensor.zero_()
            torch.cuda.synchronize()
            pinned_s = [_timed(lambda: _place(pinned, stretches)) for _ in range(repeats)]
            if _sums(store) != expected:
                raise InvariantError("weights loaded from pinned memory differ from the files'")
    return LoadTimes(str(driver.device), checkpoint.num_bytes, pages_s, load_s, pinned_s, read_s)


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _sums(store: WeightStore) -> dict[str, int]:
    """Compute a checksum of each parameter's bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        name: int(tensor.view(bits[tensor.dtype.itemsize]).sum(dtype=torch.int64))
        for name, tensor in store.tensors.items()
    }


def _stretches(checkpoint: Checkpoint, store: WeightStore) -> list[Stretch]:
    return plan_stretches(store.jobs(checkpoint), _PINNED_BYTES)


def _read_pinned(stretches: Sequence[Stretch]) -> list[torch.Tensor]:
    """Read the bytes of each stretch into pinned memory."""

    def read(stretch: Stretch) -> torch.Tensor:
        pinned = torch.empty(stretch.num_bytes, dtype=torch.uint8, pin_memory=True)
        stretch.read(pinned)
        return pinned

    with ThreadPoolExecutor(_NUM_READERS) as threads:
        return list(threads.map(read, stretches))


def _place(pinned: Sequence[torch.Tensor], stretches: Sequence[Stretch]) -> None:
    for source, stretch in zip(pinned, stretches, strict=True):
        scatter(source, stretch)
    torch.cuda.synchronize()


@contextmanager
def made_checkpoint(model: Path, num_bytes: int) -> Iterator[Path]:
    """Create a temporary checkpoint of random weights with a model's shapes.

    It is in memory (/dev/shm) if it fits there. Its number of layers is chosen to come nearest to
    `num_bytes`. The folder is deleted on exit.

    Raises:
        ConfigError: the model's configuration does not count layers.
    """
    config = read_config(model).values
    if "num_hidden_layers" not in config:
        raise ConfigError(
            f"{model / 'config.json'} has no num_hidden_layers to change; use a model that has it"
        )
    # 10 % for rounding to whole layers and for the file system.
    fits = _HOST_MEMORY.is_dir() and shutil.disk_usage(_HOST_MEMORY).free > 1.1 * num_bytes
    with tempfile.TemporaryDirectory(dir=_HOST_MEMORY if fits else None) as name:
        folder = Path(name)

        def parameters_of(num_layers: int) -> Sequence[Parameter]:
            entries = {k: v for k, v in config.items() if k != "layer_types"}
            entries["num_hidden_layers"] = num_layers
            (folder / "config.json").write_text(json.dumps(entries))
            return plan_model(Checkpoint.without_tensors(folder)).parameters

        one, two = (sum(map(_stored_bytes, parameters_of(n))) for n in (1, 2))
        num_layers = max(round((num_bytes - one) / (two - one)) + 1, 1)
        _write(folder, parameters_of(num_layers))
        yield folder


def _stored_bytes(parameter: Parameter) -> int:
    """Bytes of the stored tensors that fill a parameter."""
    return sum(
        math.prod(source.stored_shape(parameter))
        * source.form.stored_dtype(parameter.dtype).itemsize
        for source in parameter.sources
    )


def _fill_random(values: torch.Tensor) -> torch.Tensor:
    """Fill a stored tensor; bytes with such as are small scales, if they are scales."""
    return values.normal_(0, 0.02) if values.is_floating_point() else values.random_(96, 128)


def _write(folder: Path, parameters: Sequence[Parameter]) -> None:
    """Write random tensors for all sources of the parameters, in files of a few gigabytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def finish_shard() -> None:
        file = f"model-{len(set(weight_map.values())):05}.safetensors"
        save_file(shard, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for parameter in parameters:
        for source in parameter.sources:
            shape = source.stored_shape(parameter)
            dtype = source.form.stored_dtype(parameter.dtype)
            values = torch.empty(shape, dtype=dtype, device=device)
            shard[source.name] = _fill_random(values).cpu()
            if sum(tensor.nbytes for tensor in shard.values()) >= _SHARD_BYTES:
                finish_shard()
    if shard:
        finish_shard()
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    if device == "cuda":
        torch.cuda.empty_cache()
