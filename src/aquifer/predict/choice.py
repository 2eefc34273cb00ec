"""Choice of a forecaster by name."""

from __future__ import annotations

from aquifer.errors import ConfigError
from aquifer.predict.forecaster import Forecaster, LengthForecaster, Oracle


def make_forecaster(choice: str) -> Forecaster | None:
    """Make the forecaster of a model.

    Args:
        choice: "off", "prior", "oracle", or the folder of a trained predictor.

    Raises:
        ConfigError: there is no such folder, or it holds no predictor.
    """
    if choice == "off":
        return None
    if choice == "prior":
        return LengthForecaster()
    if choice == "oracle":
        return Oracle()
    raise ConfigError(
        f"--length-prediction is {choice!r}; choose off, prior or oracle, or the folder of a "
        "predictor that `aquifer predict train` has written"
    )
