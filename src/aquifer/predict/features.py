"""Features of requests: what a trained predictor sees of them (ODMA, section 3.2).

The paper names request type, temperature, system prompt and depth of the conversation beside the
prompt. Here the system prompt counts by the recent lengths of requests that begin alike. Type and
depth are left out: an engine gets tokens, with a chat's turns in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from aquifer.predict.forecaster import Asked
from aquifer.predict.prior import NUM_LEVELS

NUM_ROWS = 8192
"""Rows of the table of token embeddings. Token ids share them by their remainder, so that the file
stays small with a large vocabulary."""

PADDING = NUM_ROWS
"""The row of places without a token."""

PART_TOKENS = 32
"""Tokens from the beginning of a prompt that are read, and as many from its end."""

NUM_NUMBERS = 5 + 2 * NUM_LEVELS
"""Features of a request that are numbers."""


def token_rows(asked: Sequence[Asked]) -> torch.Tensor:
    """Rows of the embedding for the first and the last tokens of each prompt.

    Returns: [requests, at most 2 * PART_TOKENS] int64, no wider than the longest needs.
    """
    parts = []
    for each in asked:
        prompt = each.prompt_token_ids
        if len(prompt) > 2 * PART_TOKENS:
            prompt = [*prompt[:PART_TOKENS], *prompt[-PART_TOKENS:]]
        parts.append(np.asarray(prompt, np.int64) % NUM_ROWS)
    width = max(map(len, parts))
    rows = np.full((len(parts), width), PADDING, np.int64)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return torch.from_numpy(rows)


def numbers(asked: Sequence[Asked]) -> torch.Tensor:
    """Features that are numbers: logarithms of lengths, sampling, and recent lengths.

    Returns: [requests, NUM_NUMBERS] float32.
    """
    rows = [
        [
            np.log2(len(each.prompt_token_ids)) / 10,
            min(np.log2(each.most_tokens), 20) / 10,
            min(each.temperature, 2.0),
            each.top_p,
            float(each.temperature == 0),
            *(value for mean, weight in each.recent for value in (mean / 10, weight)),
        ]
        for each in asked
    ]
    return torch.tensor(rows, dtype=torch.float32)
