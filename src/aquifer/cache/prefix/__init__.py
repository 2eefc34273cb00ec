"""Prefix caching: KV of earlier requests, found by their tokens.

trie.py       radix tree of the blocks that are kept, found by the tokens in them and before them
victims.py    guards of blocks in use, and the order in which others are evicted
pins.py       prefixes that stay until they are unpinned
cache.py      PrefixCache: matches, leases and statistics over these three
"""

from aquifer.cache.prefix.cache import Lease, PrefixCache, PrefixStats
from aquifer.cache.prefix.trie import Match, TokenIds

__all__ = ["Lease", "Match", "PrefixCache", "PrefixStats", "TokenIds"]
