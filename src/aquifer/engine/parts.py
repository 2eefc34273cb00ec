"""What an engine is made of beside its models: device, pool, scheduler and background threads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aquifer.cache.swap import SwapSpace
from aquifer.config import EngineConfig
from aquifer.engine.assembly import Assembly
from aquifer.engine.leader import Leader
from aquifer.engine.mapping import map_ahead
from aquifer.engine.policies import Policies
from aquifer.engine.step_limits import StepLimits
from aquifer.errors import ConfigError
from aquifer.kernels import start_compiler
from aquifer.memory.budget import make_pool
from aquifer.memory.driver import make_current, open_driver
from aquifer.memory.driver.base import Driver
from aquifer.memory.mapper import BackgroundMapper
from aquifer.memory.meter import OverheadMeter
from aquifer.memory.pool import PagePool
from aquifer.memory.proc import available_host_bytes
from aquifer.memory.stock import PageStocker
from aquifer.memory_options import PREDICTION_USES
from aquifer.sizes import format_size
from aquifer.weights.fingerprint import cache_folder
from aquifer.weights.host_cache import HostCache
from aquifer.weights.lender import Lender
from aquifer.weights.loans import LoanBook
from aquifer.weights.neighbours import Neighbours
from aquifer.weights.parameters import Parameter, placed_bytes
from aquifer.weights.reuse import ReuseStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine; closing `resources` closes them all."""

    limits: StepLimits
    assembly: Assembly
    stocker: PageStocker
    meter: OverheadMeter
    reuse: ReuseStore
    leader: Leader | None
    resources: ExitStack

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        parameters: Sequence[Sequence[Parameter]],
        driver: Driver | None,
        policies: Policies | None,
        leader: Leader | None,
    ) -> EngineParts:
        """Open the device and a pool for models with these parameters.

        Args:
            config: the engine's options.
            parameters: of each model of the configuration.
            driver: used in place of the device's own.
            policies: the decisions; None for the default ones.
            leader: the other ranks of the engine, which it owns; None for none.

        Raises:
            ConfigError: the memory does not suffice, or an option does not fit the device.
            DriverError: the device refused memory.
        """
        for each in config.without_effect():
            _log.warning("%s", each)
        with ExitStack() as resources:
            if leader is not None:
                resources.callback(leader.close)
            if driver is None:
                driver = open_driver(
                    config.device if leader is None else leader.device,
                    is_plain=config.bucket_memory_bytes is not None,
                    exports=config.neighbours is not None,
                )
                resources.callback(driver.close)
            make_current(driver.device)
            if driver.device.type == "cuda":
                start_compiler(driver.device)
            weight_bytes = [sum(part.num_bytes for part in parts) for parts in parameters]
            pool = make_pool(config, driver, weight_bytes, partial(placed_bytes, parameters))
            resources.callback(pool.close)
            if leader is not None:
                leader.open(config, pool)
            if map_ahead(config, driver) == "background":
                pool.mapper = BackgroundMapper(pool.pages, pool.gate)
                resources.callback(pool.mapper.close)
            limits = StepLimits.of(config, driver.device.type)
            swaps = config.preemption_mode != "recompute"
            space = SwapSpace(
                config.swap_space_bytes if swaps else 0,
                driver.device,
                on_begin=None if leader is None else leader.take_swap_memory,
            )
            resources.callback(space.close)
            assembly = Assembly(
                pool,
                limits.max_batched_tokens,
                swap_space=space,
                restore_mode=config.preemption_mode,
                express_share=config.express_share,
                max_prefill_s=limits.max_prefill_s,
                policies=policies,
                prediction_uses=config.prediction_uses or PREDICTION_USES,
                groups_by_bucket=config.bucket_grouping,
            )
            host_cache = HostCache(_host_cache_bytes(config, driver), driver.device)
            resources.callback(host_cache.close)
            loans, neighbours = _open_neighbours(config.neighbours, pool, resources)
            reuse = ReuseStore(host_cache, cache_folder(), loans, neighbours)
            stocker = PageStocker(pool, reclaim_below=config.reclaim_below)
            stocker.start()
            resources.callback(stocker.close)
            meter = OverheadMeter(pool)
            meter.start()
            resources.callback(meter.close)
            return cls(limits, assembly, stocker, meter, reuse, leader, resources.pop_all())


def _open_neighbours(
    folder: Path | None, pool: PagePool, resources: ExitStack
) -> tuple[LoanBook, Neighbours] | tuple[None, None]:
    """Lend weights to the other engine processes of this machine, and borrow from them.

    Args:
        folder: where these find each other; None for no others.
        pool: where pages of weights are.
        resources: close what is opened.
    """
    if folder is None:
        return None, None
    if not pool.driver.can_export:
        _log.warning("%s cannot share pages with other processes", pool.driver.device)
        return None, None
    loans = LoanBook(pool)
    try:
        lender = Lender(loans, pool.pages, folder)
    except OSError as error:
        _log.warning("weights are not shared with other devices: %s", error)
        return None, None
    lender.start()
    resources.callback(lender.close)
    # Where a process may have few mappings, they are left for its own pages; they are cheap there.
    maps_ahead = pool.driver.max_mappings is None
    neighbours = Neighbours(folder, lender.path, pool.driver, maps_ahead=maps_ahead)
    neighbours.start()
    resources.callback(neighbours.close)
    return loans, neighbours


def _host_cache_bytes(config: EngineConfig, driver: Driver) -> int:
    """Size of the host cache: as configured, or half of the host's free memory where a GPU has
    several models.

    Raises:
        ConfigError: the host has less free memory.
    """
    if config.host_cache_bytes is None:
        is_of_use = driver.device.type != "cpu" and len(config.models) > 1
        is_of_use &= config.tensor_parallel_size == 1
        return available_host_bytes() // 2 if is_of_use else 0
    if config.host_cache_bytes > (free_bytes := available_host_bytes()):
        raise ConfigError(
            f"--host-cache is {format_size(config.host_cache_bytes)} and this machine has "
            f"{format_size(free_bytes)} free; give less, or leave it out"
        )
    return config.host_cache_bytes
