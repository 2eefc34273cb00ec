"""Any decoder-only language model of Hugging Face Transformers, over our KV cache.

Transformers looks up its attention by name in a registry, in which we register an entry. All
tokens of a step run as one sequence of batch 1: everything but attention works token by token, and
attention calls `KVView.attend`, which knows the sequences. These modules make that safe:

    plan     refuse models that the configuration or the modules show to need anything else
    layout   read the KV layout from the configuration and the attention modules
    mapping  find the stored tensors that fill each parameter
    parts    compute linear layers, norms and experts by our kernels
    probe    run a few tokens through the loaded model, by its own code and as served, and compare
    trial    find out whether its steps can be captured as CUDA graphs
"""

from aquifer.models.transformers.plan import TransformersPlan

__all__ = ["TransformersPlan"]
