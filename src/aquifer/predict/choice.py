"""Choice of a forecaster by name."""

from __future__ import annotations

from pathlib import Path

from aquifer.errors import ConfigError
from aquifer.predict.fingerprint import tokenizer_fingerprint
from aquifer.predict.forecaster import Forecaster, LengthForecaster, Oracle


def make_forecaster(choice: str, checkpoint: Path) -> Forecaster | None:
    """Make the forecaster of a model.

    Args:
        choice: "off", "prior", "oracle", or the folder of a trained predictor.
        checkpoint: the model, for its tokenizer.

    Raises:
        ConfigError: there is no such folder, it holds no predictor, or one that was trained with
            another tokenizer.
    """
    if choice == "off":
        return None
    if choice == "prior":
        return LengthForecaster()
    if choice == "oracle":
        return Oracle()
    if (folder := Path(choice).expanduser()).is_dir():
        from aquifer.predict.model import LengthPredictor

        fingerprint = tokenizer_fingerprint(checkpoint)
        return LengthForecaster(LengthPredictor.load(folder, fingerprint))
    raise ConfigError(
        f"--length-prediction is {choice!r}; choose off, prior or oracle, or the folder of a "
        "predictor that `aquifer predict train` has written"
    )
