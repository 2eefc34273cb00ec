"""Options of `aquifer replay` that make it a replay on a cluster of workers."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

from aquifer.engine.policies.placement import PLACEMENTS
from aquifer.errors import ConfigError
from aquifer.sim.cluster import ClusterConfig, Failure
from aquifer.sim.config import ReplayConfig
from aquifer.sim.device import find_device

_NEEDS_WORKERS = ("placement", "fail", "notice", "report_every")
_MOST_WORKERS = 1024


def target_of(config: ReplayConfig, options: SimpleNamespace) -> ReplayConfig | ClusterConfig:
    """What to replay on: a device, or with --workers a cluster of devices like it or of others.

    Raises:
        ConfigError: an option is invalid, or needs another one.
    """
    if options.workers is None:
        for name in _NEEDS_WORKERS:
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --workers")
        return config
    if config.loading is None:
        raise ConfigError("--workers needs --weights tensor or whole")
    workers = _workers(config, options)
    settings = {
        "notice_s": options.notice,
        "report_s": options.report_every,
        "placement": None if options.placement is None else PLACEMENTS[options.placement],
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return ClusterConfig(workers, failures=_failures(options.fail), **given)


def _workers(config: ReplayConfig, options: SimpleNamespace) -> tuple[ReplayConfig, ...]:
    """The workers of "8", or of "6:l40,2:h200"."""
    text: str = options.workers
    workers: list[ReplayConfig] = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d{0,3})(?::(.+))?", part)
        if match is None or (match[2] is None and "," in text):
            raise ConfigError(f"--workers is {text!r}; write 8, or 6:l40,2:h200")
        worker = config
        if match[2] is not None:
            if options.calibrate is not None:
                raise ConfigError("--calibrate is of --device; give --workers as a number")
            device = find_device(match[2], "--workers")
            loading = config.loading
            if loading is not None and options.load_gb_per_s is None:
                loading = replace(loading, bytes_per_s=device.link_bandwidth)
            worker = replace(config, device=device, loading=loading)
        workers += [worker] * int(match[1])
    if len(workers) > _MOST_WORKERS:
        raise ConfigError(f"--workers is {text!r}; give at most {_MOST_WORKERS}")
    return tuple(workers)


def _failures(text: str | None) -> tuple[Failure, ...]:
    """The failures of "0@120-180,3@60": worker, seconds until it fails, and until it is back."""
    if text is None:
        return ()
    failures: list[Failure] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)@(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?", part)
        if match is None:
            raise ConfigError(f"--fail is {text!r}; write 0@120-180, or 0@120 if it stays away")
        back_s = None if match[3] is None else float(match[3])
        failures.append(Failure(int(match[1]), float(match[2]), back_s))
    return tuple(failures)
