"""The token that the nodes of a cluster share."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from aquifer.errors import ConfigError

_LEAST_CHARACTERS = 16


def read_token(file: Path) -> str:
    """The token in a file.

    Raises:
        ConfigError: there is none that can be used.
    """
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file: cannot read {file}: {error}; make one with: "
            f"openssl rand -hex 32 > {file}"
        ) from error
    if len(token) < _LEAST_CHARACTERS or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"--token-file: {file} must hold at least {_LEAST_CHARACTERS} printable ASCII "
            f"characters; make one with: openssl rand -hex 32 > {file}"
        )
    return token


def write_token(file: Path) -> None:
    """Write a new random token to a file that only its owner can read."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(secrets.token_hex(32) + "\n")
