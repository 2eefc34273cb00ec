"""From requests to tokens: scheduler (plans steps), runner (runs them), sampler (next tokens)."""
