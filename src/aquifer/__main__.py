"""The command `aquifer`, and `python -m aquifer`.

Each process that a server spawns imports this module again, so it imports nothing itself.
"""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Run the command line."""
    from aquifer.cli import main as run

    run()


if __name__ == "__main__":
    main()
