"""Logging of the server's processes: one handler, on standard error.

The web process and the engine process each call `configure_logging` once, when they start. A module
logs through `logging.getLogger(__name__)`. Programs that use `LLM` configure logging themselves.
"""

from __future__ import annotations

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


def configure_logging(level: str) -> None:
    """Log Aquifer's messages from a level on, and warnings of other packages, to standard error.

    A second call replaces the first one's settings.

    Args:
        level: name of the least level, in any case; `aquifer.options` has the choices.
    """
    least = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(
        level=max(least, logging.WARNING), format=_FORMAT, datefmt=_TIME_FORMAT, force=True
    )
    logging.getLogger("aquifer").setLevel(least)
