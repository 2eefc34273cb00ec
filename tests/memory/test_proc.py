"""Fields of the system's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from aquifer.memory.proc import proc_bytes


def test_a_field_in_bytes(tmp_path: Path) -> None:
    """Other lines may be of any form, also with more colons."""
    file = tmp_path / "status"
    file.write_text("Name:\ta:b\nVmPeak:\t    9 kB\nVmRSS:\t   123 kB\nThreads:\t1\nEmpty:\n")
    assert proc_bytes(str(file), "VmRSS") == 123 * 1024
    with pytest.raises(KeyError):
        proc_bytes(str(file), "VmSwap")
