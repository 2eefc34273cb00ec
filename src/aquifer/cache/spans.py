"""The tokens of one step: which sequences, and which stretch of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.kernels.prefill_merge import DeviceSpans
from aquifer.memory.transfer import upload

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """The tokens of one step: the stretch [starts, starts + counts) of each sequence.

    The tokens of sequence i occupy rows [offsets[i], offsets[i + 1]) of the step's flat tensors.
    """

    slots: IntArray  # [num_seqs]
    starts: IntArray  # [num_seqs], tokens already in the cache
    counts: IntArray  # [num_seqs], tokens to be written in this step, at least 1 each
    offsets: IntArray  # [num_seqs + 1]

    @classmethod
    def make(cls, slots: IntArray, starts: IntArray, counts: IntArray) -> Spans:
        """Spans in the order given."""
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.add.accumulate(counts, out=offsets[1:])
        return cls(slots, starts, counts, offsets)

    @property
    def num_tokens(self) -> int:
        """Rows of the step's flat tensors."""
        return int(self.offsets[-1])

    def ends_of(self, indices: IntArray) -> Spans:
        """The last token of some of the spans, as spans of their own."""
        ends = (self.starts + self.counts)[indices]
        return Spans.make(self.slots[indices], ends - 1, np.ones_like(ends))

    def rows(self) -> tuple[IntArray, IntArray]:
        """(slot, position) of every token of the step, each [num_tokens]."""
        first = np.repeat(self.starts - self.offsets[:-1], self.counts)
        return np.repeat(self.slots, self.counts), first + np.arange(self.num_tokens)


def keeps_decodes(device: torch.device) -> bool:
    """Whether rows that decode have kernels of their own.

    On the host they are chunks of one token, which is faster there.
    """
    return device.type != "cpu"


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of one step, on the device of the KV. The rows that decode come first."""

    slots: torch.Tensor  # [tokens] int64; -1 for a row that only pads the batch
    positions: torch.Tensor  # [tokens] int64
    # [num_decodes], positions + 1, or 0 for padding: rows of one token each that attend to all KV
    # of their sequence.
    decode_lengths: torch.Tensor
    chunks: PrefillSpans | None  # all other rows: several tokens of a sequence each
    # The same of a step that is captured whole, for which `chunks` is None: which rows are of
    # chunks is known on the device alone. So `decode_lengths` has as many rows as may decode, and 0
    # for those that are of chunks.
    fixed_chunks: DeviceSpans | None = None

    @classmethod
    def of(cls, spans: Spans, num_decodes: int, device: torch.device) -> Rows:
        """The rows of `spans`, of which the first `num_decodes` have one token each.

        Args:
            spans: the step's tokens.
            num_decodes: spans that decode; see `keeps_decodes`.
            device: where they run.
        """
        if not keeps_decodes(device):
            num_decodes = 0
        arrays = cls.arrays(spans, num_decodes)
        packed = upload(np.concatenate(arrays), device)  # one copy for all
        tensors = packed.split([len(array) for array in arrays])
        return cls.over(spans, num_decodes, tensors)

    @staticmethod
    def arrays(spans: Spans, num_decodes: int) -> tuple[IntArray, ...]:
        """What the device has to know of a step, for `over`: slots and positions of its tokens, and
        slots, starts and offsets of its chunks.

        Args:
            spans: the step's tokens.
            num_decodes: spans that decode.
        """
        chunks = slice(num_decodes, None)
        return (
            *spans.rows(),
            spans.slots[chunks],
            spans.starts[chunks],
            spans.offsets[chunks],
        )

    @classmethod
    def over(cls, spans: Spans, num_decodes: int, tensors: Sequence[torch.Tensor]) -> Rows:
        """The rows of `spans`, given `arrays` on the device."""
        slots, positions, chunk_slots, chunk_starts, chunk_offsets = tensors
        chunks = slice(num_decodes, None)
        return cls(
            slots,
            positions,
            positions[:num_decodes] + 1,
            PrefillSpans(
                slots=spans.slots[chunks].tolist(),
                starts=spans.starts[chunks].tolist(),
                offsets=spans.offsets[chunks].tolist(),
                device_slots=chunk_slots,
                device_starts=chunk_starts,
                device_offsets=chunk_offsets,
            )
            if num_decodes < len(spans.slots)
            else None,
        )

    @classmethod
    def single(cls, slots: torch.Tensor, positions: torch.Tensor) -> Rows:
        """Rows of one token each, [n] int64 both, all of which decode."""
        return cls(slots, positions, positions + 1, None)

    @property
    def num_decodes(self) -> int:
        """Number of rows, from the first, that are the only one of their sequence."""
        return len(self.decode_lengths)
