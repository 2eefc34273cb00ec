"""Models of the Hugging Face hub: downloaded once, into the cache that its own tools use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from aquifer.config import ModelSpec
from aquifer.errors import ConfigError, errors_of_model

_TEXT_FILES = ["*.json", "*.jinja"]
_WEIGHTS = "*.safetensors"
_NOT_READ = ["*/*", "consolidated*"]  # subfolders, and Mistral's second copy of all weights


def locate(
    models: Sequence[ModelSpec], revision: str | None = None, *, weights: bool = True
) -> tuple[ModelSpec, ...]:
    """Return the models with paths that exist, after a download where one is needed.

    All paths are checked before the first download, and without importing the hub's library.

    Args:
        models: what to serve.
        revision: branch, tag or commit of the only model that is on the hub; None for its default
            branch.
        weights: whether the weights are needed too.

    Raises:
        ConfigError: a path does not exist, a model cannot be downloaded, or it is unclear which
            model the revision is of.
    """
    for model in models:
        model.check_path()
    num_on_hub = sum(not model.path.exists() for model in models)
    if revision is not None and num_on_hub != 1:
        raise ConfigError(
            f"--revision is for one model of the Hugging Face hub, and {num_on_hub} of the models "
            "are from there; leave it out, or download each model with 'hf download' and give its "
            "folder"
        )
    return tuple(
        model
        if model.path.exists()
        else replace(model, path=_download(str(model.hub_id), revision, weights))
        for model in models
    )


def here(model: ModelSpec) -> ModelSpec:
    """Return a model that another machine has located with its path on this one.

    A model of the hub is downloaded, in the same revision, where it is not there.

    Raises:
        ConfigError: it cannot be downloaded; the error names the model.
    """
    if model.hub_id is None or model.path.exists():
        return model
    revision = model.path.name if model.path.parent.name == "snapshots" else None
    with errors_of_model(model.name):
        return replace(model, path=_download(model.hub_id, revision, weights=True))


def _download(hub_id: str, revision: str | None, weights: bool) -> Path:
    """Return the folder of a model of the hub; its files are downloaded unless they are cached."""
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=[*_TEXT_FILES, _WEIGHTS] if weights else _TEXT_FILES,
                ignore_patterns=_NOT_READ,
            )
        )
    except Exception as error:  # its HTTP library's errors too, which differ between versions
        cause, advice = _explain(error, hub_id, revision)
        raise ConfigError(
            f"there is no folder {hub_id}, and the Hugging Face hub's model of that name cannot be "
            f"had: {cause}; {advice}"
        ) from error


def _explain(error: Exception, hub_id: str, revision: str | None) -> tuple[str, str]:
    """What was wrong, and what to do about it."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            "access to it is restricted",
            f"accept its terms on https://huggingface.co/{hub_id}, then run 'hf auth login' or set "
            "HF_TOKEN",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "it does not exist, or is private",
            "check the name; for a private model run 'hf auth login' or set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"it has no revision {revision!r}",
            "give one of its branches, tags or commits with --revision",
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        if isinstance(error.__cause__, errors.OfflineModeIsEnabled):
            return (
                "HF_HUB_OFFLINE is set, and its files are not all in the cache",
                "unset HF_HUB_OFFLINE, or give the path of a folder",
            )
        return (
            f"the hub cannot be reached ({_first_line(error.__cause__ or error)}), and its files "
            "are not all in the cache",
            "check the network, or give the path of a folder",
        )
    return _first_line(error), "try again, or give the path of a folder"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
