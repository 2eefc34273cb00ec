"""Benchmark of an OpenAI-compatible server: `aquifer bench serve`."""
