"""Kernels that are compiled within a step are counted and reported."""

from __future__ import annotations

import logging

import pytest

from aquifer.engine.late_compilations import LateCompilations
from aquifer.kernels import compilations


def test_only_what_is_compiled_within_a_step_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late = LateCompilations()
    monkeypatch.setattr(compilations, "count", 5)  # compiled while a model was loaded
    late.begin()
    late.end(None)
    assert late.count == 0
    late.begin()
    monkeypatch.setattr(compilations, "count", 7)
    with caplog.at_level(logging.WARNING):
        late.end(None)
    assert late.count == 2
    assert "2 kernels were compiled while requests waited" in caplog.text
