"""A server of this machine for the time of a benchmark: `aquifer serve`."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aquifer.bench.options import ENGINE
from aquifer.errors import EngineError
from aquifer.options import find_option, options_of

_GUARDS = find_option("guard_pages").variable  # that of any program
_READY = re.compile(r"ready on (http://\S+)")


@contextlib.contextmanager
def serving(
    model: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run `aquifer serve` on a free port, and stop it in the end.

    Args:
        model: what to serve.
        arguments: further arguments of the command.
        environment: variables that are added to those of this process. Options that the latter
            set for `aquifer serve` do not count: the result would not tell.

    Yields: its URL.

    Raises:
        EngineError: it did not start; its messages are on standard error.
    """
    command = [sys.executable, "-m", "aquifer", "serve", model, "--port", "0", *arguments]
    options = {option.variable for option in options_of("serve")} - {_GUARDS}
    inherited = {name: text for name, text in os.environ.items() if name not in options}
    server = subprocess.Popen(
        command,
        env={**inherited, "AQUIFER_LOG_LEVEL": "error", **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield _url(server)
    finally:
        server.terminate()
        server.communicate()  # reads what it writes, so that it never waits for this process


def server_arguments(engine: Mapping[str, Any]) -> list[str]:
    """The options of `LLM` as arguments of `aquifer serve`."""
    return [
        argument
        for option in ENGINE
        if engine.get(option.name) is not None
        for argument in (option.flag, str(engine[option.name]))
    ]


def _url(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        found = _READY.search(line)
        if found is not None:
            return found[1]
    raise EngineError("aquifer serve ended before it was ready")
