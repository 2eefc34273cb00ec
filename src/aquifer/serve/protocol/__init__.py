"""OpenAI's API as pydantic models, with the additional fields of vLLM's server."""
