"""The length of an output that has come to its own end, as what learns lengths gets it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class EndedOutput(NamedTuple):
    """An output that was not aborted and did not fail. Of it alone, no text can be known."""

    num_prompt_tokens: int
    num_outputs: int  # its tokens
    classes: tuple[Hashable, ...] = ()  # of its request, see `aquifer.predict.prior`

    @property
    def num_tokens(self) -> int:
        """Length of the sequence."""
        return self.num_prompt_tokens + self.num_outputs
