"""Bounds of the sizes in a model's configuration, checked before anything is made in that size.

They are far above those of any model there is, and low enough that what a plan takes for each layer
is little, and that no product of sizes exceeds 64 bits.
"""

from __future__ import annotations

from aquifer.kernels.sampling.sample import MAX_VOCAB

MOST_LAYERS = 4096
MOST_HEADS = 1 << 14
MOST_WIDTH = 1 << 20
"""The largest width of hidden states, of the intermediate states of an MLP, and of a head."""

MOST_VOCAB = MAX_VOCAB
MOST_POSITIONS = 1 << 24
"""The rotary embedding computes with positions in float32, which is exact up to here."""

LEAST_POSITIONS = 2
"""A request has a token of prompt and one of output."""

UNLIMITED_POSITIONS = 1 << 20
"""Longest context of a model without attention, in tokens. Its configuration states none, and its
state does not grow, so this is a choice: longer than texts that it was trained on by far."""

MOST_STATE = 1 << 12
"""The most numbers of the state of a mixer for each element or channel."""

MOST_TAPS = 1 << 5
"""The most taps of a mixer's convolution; usual are 4."""

MOST_OTHER = 1 << 24
"""The largest absolute value of any other whole number in a configuration of Transformers."""

MOST_PARTS = 1 << 18
"""The most modules, parameters and buffers of a model of Transformers, together. Each takes a few
kilobytes. A mixture of experts with modules for each expert has some 100 000."""

MOST_CONSTANT_BYTES = 1 << 30
"""The most bytes of buffers of a model of Transformers, such as masks; usual are kilobytes."""
