"""CPUs that this process may use, and how long a thread keeps one that only waits.

A container with a quota of two CPUs sees all CPUs of its host. Threads beyond the quota do not run
in parallel: the kernel stops all of them for the rest of each period (cpu.max, version 2 of
control groups; cpu.cfs_quota_us, version 1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

_SPIN_COUNT = "10000"
"""Rounds of its loop that a waiting thread of GNU's OpenMP, which torch's packages contain, makes
before it sleeps: about 0.1 ms, which is longer than between two products of a step. By default it
makes 300 000. Beside other programs, the thread that it waits for often has no CPU meanwhile.
benchmarks/cpu/serving.py compares the ways of waiting."""
_SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads of OpenMP that wait sleep soon, unless the user has set how long they run.

    Has an effect on this process if torch has not been imported, and on processes started later.
    """
    if not any(environment.get(name) for name in _SPIN_VARIABLES):
        environment["GOMP_SPINCOUNT"] = _SPIN_COUNT


def usable_cpus() -> int:
    """Number of CPUs that this process may use at a time, at least 1."""
    return whole_cpus(len(os.sched_getaffinity(0)), cpu_quota())


def whole_cpus(num_allowed: int, quota: float | None) -> int:
    """Number of threads that can run in parallel all the time, at least 1.

    Args:
        num_allowed: CPUs of the affinity mask.
        quota: seconds of CPU time per second; None for no limit. A fraction is not counted: a
            thread on it would be stopped in each period, and others would wait for it.
    """
    return num_allowed if quota is None else max(min(num_allowed, int(quota)), 1)


def cpu_quota(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Seconds of CPU time per second that this process may use; None for no limit.

    Each group limits all groups below it, so the least quota counts.

    Args:
        groups: where the file systems of control groups are mounted.
        membership: the file that names the groups of this process.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = [quota for line in lines for quota in _quotas(groups, line)]
    return min(quotas, default=None)


def _quotas(groups: Path, line: str) -> Iterator[float]:
    """The quotas along one line of the membership file, "hierarchy:controllers:path"."""
    _, controllers, path = line.split(":", 2)
    if not controllers:
        mount, read = groups, _quota_v2
    elif "cpu" in controllers.split(","):
        mount, read = groups / controllers, _quota_v1
    else:
        return
    # Within a container the mount may begin at the container's own group, while the path begins at
    # the host's root: then only the mount itself is there.
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        quota = read(folder)
        if quota is not None:
            yield quota
        if folder == mount:
            return


def _quota_v2(folder: Path) -> float | None:
    """The quota in "cpu.max": "QUOTA PERIOD" in microseconds, or "max PERIOD" for none."""
    quota, _, period = _content(folder / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and int(period or 0) else None


def _quota_v1(folder: Path) -> float | None:
    """The quota in "cpu.cfs_quota_us", which is -1 for none, by "cpu.cfs_period_us"."""
    quota, period = (_content(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and int(period or 0) else None


def _content(file: Path) -> str:
    """Text of a file; "" if it is not there or may not be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
