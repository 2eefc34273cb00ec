"""From requests to tokens: who runs (scheduler), what runs (runner), which token (sampler)."""
