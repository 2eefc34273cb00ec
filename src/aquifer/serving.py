"""What the commands that serve have in common: options to configurations, then progress and URL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aquifer.config import EngineConfig, field_values, parse_models
from aquifer.errors import ConfigError
from aquifer.hub import locate
from aquifer.progress import LoadingBar

if TYPE_CHECKING:
    from aquifer.serve.config import ServerConfig


def configurations(options: SimpleNamespace) -> tuple[EngineConfig, ServerConfig]:
    """The options of engines and server, from those of a command; models are downloaded.

    Raises:
        ConfigError: there is no model, or a value cannot be used.
    """
    if not options.models:
        raise ConfigError("no model given; write aquifer serve PATH, or aquifer serve demo")
    named = parse_models(options.models, options.served_model_name)
    engine = EngineConfig(named, **field_values(EngineConfig, vars(options)))
    models = locate(named, options.revision, weights=engine.load_format != "dummy")

    from aquifer.serve.config import ServerConfig

    return replace(engine, models=models), ServerConfig(**field_values(ServerConfig, vars(options)))


def with_progress(serve: Callable[..., None], *args: Any, **options: Any) -> None:
    """Serve with a bar that shows what is loaded, and say when the server is ready."""
    with LoadingBar() as bar:

        def on_ready(url: str) -> None:
            bar.stop()
            print(f"Aquifer is ready on {url}", flush=True)

        serve(*args, on_progress=bar.update, on_ready=on_ready, **options)
