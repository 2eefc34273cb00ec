"""Trained predictor of lengths: an encoder, features that are numbers, and two heads.

One head gives the bucket, as probabilities of all bins; the other the length itself (ODMA, sections
3.2 and 4.2). The forecast is the first head's: it says how sure it is. The second one is what the
paper calls the point estimate. Here it is a second loss of the training, and nothing else: buckets
are chosen by a quantile of the first head's distribution (`aquifer.cache.buckets.Routing`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from aquifer.errors import ConfigError
from aquifer.predict.encoder import PromptEncoder, Size
from aquifer.predict.features import NUM_NUMBERS, numbers, token_rows
from aquifer.predict.forecaster import Asked
from aquifer.predict.lengths import NUM_BINS, Forecast

_WEIGHTS, _CONFIG = "model.safetensors", "predictor.json"

_LEAST_DEVIATION = 1e-4
"""Standard deviation below which a feature counts as the same in all training samples."""

_MOST_DEVIATIONS = 4.0
"""Features are cut at so many standard deviations: nothing was learned of what lies beyond."""


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """What a predictor was made for.

    Args:
        size: size of its encoder.
        tokenizer: fingerprint of the tokenizer that its prompts were encoded with
            (`aquifer.predict.fingerprint`); "" if it reads no prompts.
        reads_prompts: whether it has an encoder; else it sees the numbers alone.
        outputs: number of outputs it was trained on.
    """

    size: Size
    tokenizer: str
    reads_prompts: bool = True
    outputs: int = 0


class LengthPredictor(torch.nn.Module):
    """Predicts the lengths of outputs from their requests. It is a `Predictor`.

    Args:
        config: what it is made for.
    """

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = PromptEncoder(config.size) if config.reads_prompts else None
        width = 0 if self.encoder is None else self.encoder.dim
        self.mixer = torch.nn.Sequential(
            torch.nn.Linear(width + NUM_NUMBERS, 128), torch.nn.GELU(), torch.nn.Linear(128, 128)
        )
        self.bins = torch.nn.Linear(128, NUM_BINS)
        self.log_length = torch.nn.Linear(128, 1)
        self.center: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("center", torch.zeros(NUM_NUMBERS))
        self.register_buffer("scale", torch.ones(NUM_NUMBERS))

    def standardize(self, features: torch.Tensor) -> None:
        """Set the scale of the features that are numbers by those of the training samples.

        A feature that is the same in all of them is ignored from then on: its weights would be
        random, and another value in a server would change forecasts at random.

        Args:
            features: [samples, NUM_NUMBERS], see `numbers`.
        """
        deviation = features.std(0, correction=0)
        self.center.copy_(features.mean(0))
        varies = deviation > _LEAST_DEVIATION
        self.scale.copy_(torch.where(varies, 1 / deviation.clamp(min=_LEAST_DEVIATION), 0.0))

    def forward(
        self, rows: torch.Tensor | None, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the bins, [requests, NUM_BINS], and binary logarithms of lengths, [requests].

        Args:
            rows: [requests, tokens], see `token_rows`; None if it reads no prompts.
            features: [requests, NUM_NUMBERS], see `numbers`.
        """
        features = (features - self.center) * self.scale
        features = features.clamp(-_MOST_DEVIATIONS, _MOST_DEVIATIONS)
        if self.encoder is not None:
            assert rows is not None, "it reads prompts"
            features = torch.cat((self.encoder(rows), features), dim=1)
        mixed = torch.nn.functional.gelu(self.mixer(features))
        return self.bins(mixed), self.log_length(mixed).squeeze(1)

    def inputs(self, asked: Sequence[Asked]) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The arguments of `forward` for some requests."""
        return (token_rows(asked) if self.config.reads_prompts else None), numbers(asked)

    @torch.inference_mode()
    def predict(self, asked: Sequence[Asked]) -> list[Forecast]:
        """See `aquifer.predict.forecaster.Predictor`."""
        logits, _ = self(*self.inputs(asked))
        return [Forecast.of(masses) for masses in logits.double().softmax(1).numpy()]

    def save(self, folder: Path, report: dict[str, Any] | None = None) -> None:
        """Write the predictor, and figures about it, into a folder, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / _WEIGHTS)
        content = {"predictor": asdict(self.config), "report": report or {}}
        (folder / _CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, tokenizer: str | None = None) -> LengthPredictor:
        """Read what `save` has written.

        Args:
            folder: where it is.
            tokenizer: fingerprint of the tokenizer whose prompts it is to read; None to not check.

        Raises:
            ConfigError: there is none, it is damaged, or it was trained with another tokenizer.
        """
        try:
            content = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            config = PredictorConfig(**content["predictor"])
            predictor = cls(config)
            predictor.load_state_dict(load_file(folder / _WEIGHTS))
            if not all(values.isfinite().all() for values in predictor.state_dict().values()):
                raise ValueError("some of its weights are no finite numbers")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(
                f"{folder} holds no length predictor: {error.filename} is missing; "
                "`aquifer predict train` writes one"
            ) from error
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RuntimeError,
            SafetensorError,
        ) as error:
            raise ConfigError(f"the length predictor in {folder} is damaged: {error}") from error
        if config.reads_prompts and tokenizer is not None and config.tokenizer != tokenizer:
            raise ConfigError(
                f"the length predictor in {folder} was trained with another tokenizer than this "
                "model's; train one with --tokenizer and this model"
            )
        return predictor.eval()
