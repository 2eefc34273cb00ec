"""Budget and page size of the pool, computed from the device's figures before anything is taken.

On a GPU the budget is a part of the whole device and includes everything: weights, KV, and what the
process holds outside of pages (`Driver.overhead_bytes`). KV gets what the others leave. On the CPU
the budget holds weights and KV alone; by default it is the weights and a quarter of free memory.
Weights that do not fit together take turns.

All figures are the device's and this process's own. None is a difference between two readings of
the whole device's memory, so engines that start at the same time do not count each other's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aquifer.config import EngineConfig
from aquifer.errors import ConfigError
from aquifer.memory.driver.base import Driver
from aquifer.memory.pool import PagePool, PoolSize
from aquifer.sizes import format_size

_SLACK = 1.1
"""Factor on the least memory for the value that an error proposes, so that there is room for KV."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device, and this process's part of it. Sizes are in bytes.

    Args:
        name: name of the device in errors.
        is_gpu: whether the budget is a part of the whole device.
        total_bytes: memory for all processes together.
        available_bytes: memory that is free now.
        overhead_bytes: memory that this process holds outside of pages.
        granularity_bytes: every page size is a multiple of it.
        default_page_bytes: the page size where none was chosen.
        max_mappings: pages that may be mapped at once, or None for any number.
    """

    name: str
    is_gpu: bool
    total_bytes: int
    available_bytes: int
    overhead_bytes: int
    granularity_bytes: int
    default_page_bytes: int
    max_mappings: int | None

    @classmethod
    def of(cls, driver: Driver) -> DeviceMemory:
        """Read the figures from a driver, which has no pages yet."""
        return cls(
            name=str(driver.device),
            is_gpu=driver.device.type != "cpu",
            total_bytes=driver.total_bytes(),
            available_bytes=driver.available_bytes(),
            overhead_bytes=driver.overhead_bytes(),
            granularity_bytes=driver.granularity_bytes,
            default_page_bytes=driver.default_page_bytes,
            max_mappings=driver.max_mappings,
        )


def make_pool(
    config: EngineConfig,
    driver: Driver,
    weight_bytes: Sequence[int] = (),
    placed_bytes: Callable[[int], Sequence[int]] = lambda page_bytes: (),
) -> PagePool:
    """The pool of an engine, empty, with the process's overhead accounted for.

    Args:
        config: the engine's options.
        driver: the device's; it has no pages yet.
        weight_bytes: size of the weights of each model, not rounded to pages.
        placed_bytes: returns the bytes of all pages under those of each, given the page size.

    Raises:
        ConfigError: the memory does not suffice, or an option does not fit the device.
    """
    device = DeviceMemory.of(driver)
    page_bytes = choose_page_bytes(config, device, weight_bytes)
    budget_bytes = pool_budget(config, device, placed_bytes(page_bytes))
    pool = PagePool(driver, budget_bytes, page_bytes, guards=config.guard_pages)
    pool.account_overhead(device.overhead_bytes)
    return pool


def make_pool_like(size: PoolSize, driver: Driver) -> PagePool:
    """A pool on another device that has room for all pages of one of this size.

    What the process holds outside of pages is not a part of its budget: rank 0, which alone decides
    which pages there are, leaves room for its own, and that of the other ranks is alike.

    Args:
        size: of the other pool.
        driver: the device's; it has no pages yet.

    Raises:
        ConfigError: the device has less free memory.
        DriverError: the device refused.
    """
    device = DeviceMemory.of(driver)
    most_bytes = device.available_bytes + device.overhead_bytes
    if device.is_gpu and size.budget_bytes > most_bytes:
        raise ConfigError(
            f"{device.name} has {format_size(most_bytes)} of {format_size(device.total_bytes)} "
            f"left, and each device of the group is to give {format_size(size.budget_bytes)}; free "
            "more of it, or give a lower --memory or --gpu-memory-utilization"
        )
    return PagePool(driver, size.budget_bytes, size.page_bytes, guards=size.has_guards)


def choose_page_bytes(
    config: EngineConfig, device: DeviceMemory, weight_bytes: Sequence[int]
) -> int:
    """Choose the page size: as configured, or the device's own, doubled until all can be mapped.

    Args:
        config: the engine's options.
        device: the device.
        weight_bytes: size of the weights of each model, not rounded to pages.

    Raises:
        ConfigError: the size in the options does not fit the device.
    """
    budget_bytes = _wanted_bytes(config, device, weight_bytes)
    page_bytes = config.page_bytes or device.default_page_bytes
    if page_bytes % device.granularity_bytes:
        raise ConfigError(
            f"page size {page_bytes} is not a multiple of {device.granularity_bytes}, which this "
            "device requires"
        )
    most_pages = device.max_mappings or budget_bytes
    while config.page_bytes is None and budget_bytes // page_bytes > most_pages:
        page_bytes *= 2
    if budget_bytes // page_bytes > most_pages:
        raise ConfigError(
            f"a budget of {format_size(budget_bytes)} in pages of {format_size(page_bytes)} is "
            f"more than the {most_pages} pages that this system lets a process map; give a larger "
            "--page-size"
        )
    return page_bytes


def choose_prompt_page(config: EngineConfig, pool: PagePool) -> int | None:
    """Choose the size of the pages for what a prompt fills; None for the pool's own.

    Raises:
        ConfigError: the size in the options is no multiple of the page size.
    """
    page_bytes = pool.page_bytes
    large_bytes = config.prompt_page_bytes
    if large_bytes is None:
        large_bytes = pool.driver.large_page_bytes // page_bytes * page_bytes
    elif large_bytes % page_bytes:
        raise ConfigError(
            f"prompt_page_size is {format_size(large_bytes)}; it must be a multiple of the page "
            f"size, {format_size(page_bytes)}"
        )
    return large_bytes if large_bytes > page_bytes else None


def pool_budget(config: EngineConfig, device: DeviceMemory, weight_bytes: Sequence[int]) -> int:
    """The pool's whole budget in bytes.

    It need not hold the weights of all models at once, but those of each.

    Args:
        config: the engine's options.
        device: the device.
        weight_bytes: size of the weights of each model in whole pages.

    Raises:
        ConfigError: it does not hold the weights of one (on a GPU: and the overhead), or the device
            has less than that to give.
    """
    placed_bytes = max(weight_bytes, default=0)
    if device.is_gpu:
        return _gpu_budget(config, device, placed_bytes)
    if config.memory_bytes is not None and placed_bytes > config.memory_bytes:
        raise ConfigError(
            f"the weights take {format_size(placed_bytes)}, more than the "
            f"{format_size(config.memory_bytes)} of --memory; give at least "
            f"{format_size(placed_bytes * _SLACK)}"
        )
    if max(placed_bytes, config.memory_bytes or 0) > device.available_bytes:
        is_default = config.memory_bytes is None
        wanted = "the weights take" if is_default else "--memory is"
        less = "serve a smaller model" if is_default else "give less"
        raise ConfigError(
            f"{wanted} {format_size(config.memory_bytes or placed_bytes)} and this machine has "
            f"{format_size(device.available_bytes)} free; end other programs, or {less}"
        )
    return _wanted_bytes(config, device, weight_bytes)


def _gpu_budget(config: EngineConfig, device: DeviceMemory, placed_bytes: int) -> int:
    budget_bytes = _wanted_bytes(config, device, [placed_bytes])
    least_bytes = placed_bytes + device.overhead_bytes
    # What the process holds already is a part of the budget.
    most_bytes = device.available_bytes + device.overhead_bytes
    takes = (
        f"the weights take {format_size(placed_bytes)} and the process itself "
        f"{format_size(device.overhead_bytes)}"
    )
    gives = f"{device.name} has {format_size(most_bytes)} of {format_size(device.total_bytes)} left"
    if least_bytes > most_bytes:
        raise ConfigError(f"{takes}, and {gives}; free more of it, or serve less on it")
    is_share = config.memory_bytes is None
    option = f"--gpu-memory-utilization {config.gpu_memory_utilization}" if is_share else "--memory"
    if least_bytes > budget_bytes:
        enough_bytes = min(int(least_bytes * _SLACK), most_bytes)
        raise ConfigError(
            f"{takes}, more than the {format_size(budget_bytes)} of {option}; give at least "
            f"{_option_value(is_share, device, enough_bytes)}"
        )
    if budget_bytes > most_bytes:
        raise ConfigError(
            f"{option} asks for {format_size(budget_bytes)}, and {gives} for this process; give at "
            f"most {_option_value(is_share, device, most_bytes)}"
        )
    return budget_bytes


def _wanted_bytes(config: EngineConfig, device: DeviceMemory, weight_bytes: Sequence[int]) -> int:
    """The budget as configured or by default, not checked yet."""
    if config.memory_bytes is not None:
        return config.memory_bytes
    if device.is_gpu:
        return int(config.gpu_memory_utilization * device.total_bytes)
    all_bytes = sum(weight_bytes)
    if all_bytes > device.available_bytes:  # they take turns
        all_bytes = max(*weight_bytes, device.available_bytes // 2)
    kept_bytes = int((config.bucket_memory_bytes or 0) * _SLACK)
    return all_bytes + max(device.available_bytes // 4, kept_bytes)


def _option_value(is_share: bool, device: DeviceMemory, num_bytes: int) -> str:
    """A number of bytes as the value of an option, rounded down."""
    if is_share:
        return f"{math.floor(num_bytes / device.total_bytes * 10_000) / 10_000:g}"
    return f"{num_bytes >> 20}M"
