"""Fingerprint of a tokenizer, by which a predictor knows prompts that it can read."""

from __future__ import annotations

import hashlib
from pathlib import Path


def tokenizer_fingerprint(checkpoint: Path) -> str:
    """Hash of a checkpoint's tokenizer.json; "" if it has none."""
    file = checkpoint / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""
