"""Endpoints of the HTTP API.

openai.py      models, completions and chat, as OpenAI defines them
prefixes.py    pinned prefixes
tokens.py      tokenize and detokenize, as vLLM's server has them
operators.py   health, version, metrics and memory
page.py        the page to look at, and its events
"""
