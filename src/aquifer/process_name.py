"""The name of this process in lists of processes, such as those of `ps` and `top`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def name_process(name: str) -> None:
    """Name this process, where the system has names: they tell the processes of a server apart.

    To be called in the first thread, before there are others, which are named alike.

    Args:
        name: at most 15 ASCII characters; Linux keeps no more.
    """
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)
