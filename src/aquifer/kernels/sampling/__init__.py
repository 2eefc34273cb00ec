"""From logits to token ids: `sample.py` says how."""
