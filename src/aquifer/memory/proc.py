"""Sizes that Linux reports in files: of the machine's memory, and of the process's part of it."""

from __future__ import annotations

from pathlib import Path


def proc_bytes(path: str, field: str) -> int:
    """A field in kB of a file of lines such as "MemTotal: 16384 kB", in bytes.

    Raises:
        KeyError: the file has no such field.
    """
    fields = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def _cgroup() -> Path:
    """Return the folder of this process's control group (version 2)."""
    group = Path("/proc/self/cgroup").read_text().strip().rsplit("::", 1)[-1]
    return Path("/sys/fs/cgroup") / group.lstrip("/")


def cgroup_limit_bytes() -> int | None:
    """Return the memory limit of this process's control group (version 2), or None."""
    try:
        limit = (_cgroup() / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit)
    except (OSError, ValueError):
        return None


def available_host_bytes() -> int:
    """Free and reclaimable memory, or the room in the control group if that is less."""
    available = proc_bytes("/proc/meminfo", "MemAvailable")
    room = cgroup_room_bytes()
    return available if room is None else min(available, room)


def cgroup_room_bytes() -> int | None:
    """Return the memory left under the limit of this process's control group, or None.

    Cached files count as free, as they do in MemAvailable. Otherwise a checkpoint in the page
    cache would appear to leave no room for itself.
    """
    limit = cgroup_limit_bytes()
    if limit is None:
        return None
    try:
        folder = _cgroup()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(stat["active_file"]) + int(stat["inactive_file"])
        return max(limit - used + cached, 0)
    except (OSError, ValueError, KeyError):
        return None
