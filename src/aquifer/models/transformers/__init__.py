"""Any decoder-only language model of Hugging Face Transformers, over our KV cache.

Transformers looks its attention up by name in a registry; one entry there is ours. All tokens of
a step run as one sequence of batch 1: everything but attention works token by token, and
attention goes to `KVView.attend`, which knows the sequences. Three steps make that safe:

    plan     refuse what the configuration or the modules show to be something else
    mapping  name, for each parameter, the stored tensors that fill it
    probe    run a few tokens through the loaded model in both ways; refuse what differs
"""

from aquifer.models.transformers.plan import TransformersPlan

__all__ = ["TransformersPlan"]
