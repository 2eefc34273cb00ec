"""The options of the engines of a server, one for each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aquifer.config import EngineConfig
from aquifer.errors import ConfigError
from aquifer.memory.proc import available_host_bytes


def engine_configs(config: EngineConfig, devices: Sequence[str]) -> list[EngineConfig]:
    """The options of the engine of each device.

    Each begins with another model, so that the models that are loaded first are not the same. With
    tensor parallel, an engine has a group of neighbouring devices, and its options the first one.

    Args:
        config: the options of all.
        devices: their names; if empty, the device of the options is the only one.

    Raises:
        ConfigError: the devices cannot be taken in groups.
    """
    if not devices:
        return [config]
    configs = []
    firsts = _first_of_groups(devices, config.tensor_parallel_size)
    for index, device in enumerate(firsts):
        first = index * len(config.models) // len(firsts)
        models = config.models[first:] + config.models[:first]
        configs.append(replace(config, device=device, models=models))
    on_cpu = all(each.device == "cpu" for each in configs)
    share = host_cache_share(config, len(configs), on_cpu=on_cpu)
    return [replace(each, host_cache_bytes=share) for each in configs]


def lend_weights(configs: Sequence[EngineConfig]) -> bool:
    """Whether engines lend weights to each other.

    Raises:
        ConfigError: they are told to, and there is one only.
    """
    first, *others = configs
    if not others and first.peer_weights:
        raise ConfigError("peer_weights needs several devices; name them with --devices")
    return bool(others) and can_lend_weights(first)


def can_lend_weights(config: EngineConfig) -> bool:
    """Whether an engine may lend weights to others of its machine: it is not told not to."""
    has_pages = config.tensor_parallel_size == 1 and config.bucket_memory_bytes is None
    return has_pages and config.peer_weights is not False


def _first_of_groups(devices: Sequence[str], size: int) -> Sequence[str]:
    """The first device of each tensor-parallel group.

    Raises:
        ConfigError: there are devices left over, or a group is not of neighbours.
    """
    if size == 1:
        return devices
    if len(devices) % size:
        raise ConfigError(
            f"devices has {len(devices)}, which are no groups of {size} (tensor_parallel_size); "
            f"name {size}, {2 * size} or another multiple"
        )
    firsts = devices[::size]
    for first, index in zip(firsts, range(0, len(devices), size), strict=True):
        kind, _, number = first.partition(":")
        group = (
            [first] * size if kind == "cpu" else [f"{kind}:{int(number) + i}" for i in range(size)]
        )
        if list(devices[index : index + size]) != group:
            raise ConfigError(
                f"devices has {','.join(devices[index : index + size])} for one group; with "
                f"tensor_parallel_size {size}, give neighbours, such as {','.join(group)}"
            )
    return firsts


def host_cache_share(config: EngineConfig, num_engines: int, *, on_cpu: bool) -> int | None:
    """The part of one engine in the host memory for weights; None where that has no use.

    Args:
        config: the options of all engines of this machine.
        num_engines: how many there are.
        on_cpu: whether all run on the CPU.
    """
    if config.host_cache_bytes is not None:
        return config.host_cache_bytes // num_engines
    if config.tensor_parallel_size > 1 or len(config.models) < 2 or on_cpu:
        return None
    return available_host_bytes() // 2 // num_engines


def device_names(configs: Sequence[EngineConfig]) -> list[str]:
    """Names of the devices, all different; an empty one for the only device."""
    devices = [config.device for config in configs]
    if len(devices) == 1:
        return [""]
    if len(set(devices)) == len(devices):
        return devices
    return [f"{device}:{index}" for index, device in enumerate(devices)]
