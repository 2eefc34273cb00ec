"""The options of the engines of a server, one for each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aquifer.config import EngineConfig
from aquifer.memory.proc import available_host_bytes


def engine_configs(config: EngineConfig, devices: Sequence[str]) -> list[EngineConfig]:
    """The options of the engine of each device.

    Each begins with another model, so that the models that are loaded first are not the same.

    Args:
        config: the options of all.
        devices: their names; if empty, the device of the options is the only one.
    """
    if not devices:
        return [config]
    configs = []
    for index, device in enumerate(devices):
        first = index * len(config.models) // len(devices)
        models = config.models[first:] + config.models[:first]
        configs.append(replace(config, device=device, models=models))
    return [replace(each, host_cache_bytes=_host_cache_bytes(configs)) for each in configs]


def _host_cache_bytes(configs: Sequence[EngineConfig]) -> int | None:
    """The part of one engine in the host memory for weights; None where that has no use."""
    first = configs[0]
    if first.host_cache_bytes is not None:
        return first.host_cache_bytes // len(configs)
    if len(first.models) < 2 or all(config.device == "cpu" for config in configs):
        return None
    return available_host_bytes() // 2 // len(configs)


def device_names(configs: Sequence[EngineConfig]) -> list[str]:
    """Names of the devices, all different; an empty one for the only device."""
    devices = [config.device for config in configs]
    if len(devices) == 1:
        return [""]
    if len(set(devices)) == len(devices):
        return devices
    return [f"{device}:{index}" for index, device in enumerate(devices)]
