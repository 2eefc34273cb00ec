"""Mixers on a GPU against the CPU: rows that decode, chunks of prompts, and padding."""

from __future__ import annotations

import pytest
import torch
from tests.models.test_mixers import MIXERS, check, make_spans, split_rows, with_padding

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("name", MIXERS)
def test_rows_that_decode_beside_chunks(name: str) -> None:
    spans = make_spans((3, 7, 1), (0, 0, 1), (4, 2, 200), (1, 0, 70))
    check(MIXERS[name], spans, split_rows(spans, 2, DEVICE))


@pytest.mark.parametrize("name", MIXERS)
def test_chunks_alone(name: str) -> None:
    spans = make_spans((2, 1, 33), (0, 0, 1), (4, 0, 300))
    check(MIXERS[name], spans, split_rows(spans, 0, DEVICE))


@pytest.mark.parametrize("name", MIXERS)
def test_rows_that_decode_beside_padding(name: str) -> None:
    spans = make_spans((3, 7, 1), (0, 0, 1), (1, 30, 1))
    check(MIXERS[name], spans, with_padding(split_rows(spans, 3, DEVICE), 2))
