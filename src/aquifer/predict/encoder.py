"""Encoder of a prompt's tokens: a small DistilBERT of Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from transformers import DistilBertConfig, DistilBertModel

from aquifer.errors import ConfigError, as_config_error
from aquifer.predict.features import NUM_ROWS, PADDING, PART_TOKENS

Size = Literal["compact", "distilbert"]

_SIZES: dict[Size, dict[str, int]] = {
    "compact": {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128},
    "distilbert": {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072},
}
"""Sizes; the second one is that of ODMA and S3, of 66 million parameters with its own table."""


class PromptEncoder(torch.nn.Module):
    """Reads the tokens of prompts, and returns a vector of each.

    Args:
        size: "compact", or "distilbert" for DistilBERT's own size.

    Attributes:
        dim: elements of a vector.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.dim = _SIZES[size]["dim"]
        config = DistilBertConfig(
            vocab_size=NUM_ROWS + 1,
            pad_token_id=PADDING,
            max_position_embeddings=2 * PART_TOKENS,
            dropout=0.1,
            attention_dropout=0.1,
            **_SIZES[size],
        )
        self.model = DistilBertModel(config)

    def load_layers(self, folder: Path) -> None:
        """Begin with the layers of a pretrained DistilBERT; its table of tokens does not fit.

        Args:
            folder: a checkpoint of the same size, in safetensors.

        Raises:
            ConfigError: there is none, or its size is another one.
        """
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} holds no DistilBERT: config.json is missing; give the folder of a "
                "downloaded checkpoint"
            )
        with as_config_error(f"cannot read the pretrained encoder in {folder}"):
            pretrained = DistilBertModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True
            )
        names = ("dim", "n_layers", "n_heads", "hidden_dim")
        theirs, ours = (
            [getattr(config, name) for name in names]
            for config in (pretrained.config, self.model.config)
        )
        if theirs != ours:
            raise ConfigError(
                f"the pretrained encoder in {folder} has {', '.join(names)} of {theirs}; it must "
                f"have {ours}"
            )
        self.model.transformer.load_state_dict(pretrained.transformer.state_dict())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Vectors of prompts: the mean over their tokens.

        Args:
            rows: [requests, tokens] int64; `PADDING` where there is no token.

        Returns: [requests, dim].
        """
        is_token = rows != PADDING
        # A single prompt has no padding.
        mask = is_token.long() if len(rows) > 1 else None
        states = self.model(input_ids=rows, attention_mask=mask).last_hidden_state
        weights = is_token[..., None].to(states.dtype)
        mean: torch.Tensor = (states * weights).sum(1) / weights.sum(1)
        return mean
