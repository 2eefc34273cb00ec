"""What an engine is made of beside its models: device, pool, scheduler and background threads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from aquifer.cache.swap import SwapSpace
from aquifer.config import EngineConfig
from aquifer.engine.assembly import Assembly
from aquifer.engine.policies import Policies
from aquifer.engine.step_limits import StepLimits
from aquifer.kernels import start_compiler
from aquifer.memory.budget import make_pool
from aquifer.memory.driver import open_driver
from aquifer.memory.driver.base import Driver
from aquifer.memory.meter import OverheadMeter
from aquifer.memory.stock import PageStocker
from aquifer.weights.parameters import Parameter, placed_bytes


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine; closing `resources` closes them all."""

    limits: StepLimits
    assembly: Assembly
    stocker: PageStocker
    meter: OverheadMeter
    resources: ExitStack

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        parameters: Sequence[Sequence[Parameter]],
        driver: Driver | None,
        policies: Policies | None,
    ) -> EngineParts:
        """Open the device and a pool for models with these parameters.

        Args:
            config: the engine's options.
            parameters: of each model of the configuration.
            driver: used in place of the device's own.
            policies: the decisions; None for the default ones.

        Raises:
            ConfigError: the memory does not suffice, or an option does not fit the device.
            DriverError: the device refused memory.
        """
        with ExitStack() as resources:
            if driver is None:
                driver = open_driver(config.device)
                resources.callback(driver.close)
            if driver.device.type == "cuda":
                start_compiler(driver.device)
            weight_bytes = [sum(part.num_bytes for part in parts) for parts in parameters]
            pool = make_pool(config, driver, weight_bytes, partial(placed_bytes, parameters))
            resources.callback(pool.close)
            limits = StepLimits.of(config, driver.device.type)
            swaps = config.preemption_mode != "recompute"
            space = SwapSpace(config.swap_space_bytes if swaps else 0, driver.device)
            resources.callback(space.close)
            assembly = Assembly(
                pool,
                limits.max_batched_tokens,
                swap_space=space,
                restore_mode=config.preemption_mode,
                express_share=config.express_share,
                max_prefill_s=limits.max_prefill_s,
                policies=policies,
            )
            stocker = PageStocker(pool)
            stocker.start()
            resources.callback(stocker.close)
            meter = OverheadMeter(driver)
            meter.start()
            resources.callback(meter.close)
            return cls(limits, assembly, stocker, meter, resources.pop_all())
