"""The name of a process."""

from __future__ import annotations

import subprocess
import sys


def test_a_process_gets_its_name() -> None:
    code = (
        "from aquifer.process_name import name_process; name_process('aquifer-engine'); "
        "print(open('/proc/self/comm').read(), end='')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "aquifer-engine\n"
