"""Collectives between processes: gloo on the CPU; NCCL and our own all-reduce on GPUs.

What few rows add up to, as in decode steps, is computed by `aquifer.kernels.all_reduce`, where the
GPUs can write to each other's memory; NCCL does all else.

The process group is one of its own, not torch's default one, so a program that has another use for
that can still open an engine. Only processes of this machine take part: they meet at a file, and
gloo and NCCL listen on the loopback interface alone.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from aquifer.kernels.all_reduce import all_reduce, compile_all_reduce
from aquifer.memory.driver import open_driver
from aquifer.parallel.peer_memory import PeerMemory, open_peer_memory

# torch's stubs lack most of what is used of these.
_dist: Any = torch.distributed
_c10d: Any = distributed_c10d

_TIMEOUT = timedelta(hours=1)
"""A rank may wait that long for another one, which loads weights or compiles kernels. One that has
died is noticed by its process (`aquifer.parallel.ranks`)."""


class GroupCollectives:
    """The `Collectives` of ranks that are processes. Made by `connect`.

    Args:
        group: their process group, `ProcessGroupGloo` or `ProcessGroupNCCL`.
        rank: number of this one.
        size: number of ranks.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self._peers: PeerMemory | None = None
        self.rank = rank
        self.size = size
        # Not in the background, so NCCL's operations are launched on the current stream.
        self._reduce, self._gather = _c10d.AllreduceOptions(), _c10d.AllgatherOptions()
        self._broadcast = _c10d.BroadcastOptions()
        self._reduce.asyncOp = self._gather.asyncOp = self._broadcast.asyncOp = False

    def total(self, *partials: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `Collectives.total`. Tensors are added up before they are sent."""
        own, *others = partials
        for other in others:
            own += other
        if self._peers is not None and self.adds_itself(own):
            all_reduce(own, self._peers.inboxes)
        else:
            self.total_by_group(own)
        return (own,)

    def adds_itself(self, values: torch.Tensor) -> bool:
        """Whether `total` adds up such a tensor by our own all-reduce."""
        return self._peers is not None and self._peers.inboxes.fits(values)

    def total_by_group(self, values: torch.Tensor) -> None:
        """Overwrite values with what those of all ranks add up to, by gloo or NCCL."""
        self._wait(self._group.allreduce([values], self._reduce))

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """See `Collectives.joined`."""
        num_rows, num_columns = part.shape
        parts = part.new_empty(self.size * num_rows, num_columns)
        self._wait(self._group._allgather_base(parts, part, self._gather))  # noqa: SLF001
        return parts.view(self.size, num_rows, num_columns).transpose(0, 1).flatten(1)

    def agree(self, values: torch.Tensor) -> None:
        """See `Collectives.agree`."""
        self._wait(self._group.broadcast([values], self._broadcast))

    def abort(self) -> None:
        """End what waits for a rank that is gone; nothing can be sent from then on."""
        if (peers := self._peers) is not None:
            peers.stop()
        self._group.abort()

    def close(self) -> None:
        """Abort, and release all. Pre-condition: nothing is launched any more."""
        self.abort()
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def use_peer_memory(self, device: torch.device, folder: Path) -> None:
        """Add up small tensors by our own all-reduce, if the devices of all ranks allow it.

        Args:
            device: this rank's GPU, which is the current one.
            folder: where the ranks meet.
        """

        def all_agree(own: bool) -> bool:
            votes = torch.tensor([int(own)], device=device)
            self.total_by_group(votes)
            return int(votes.item()) == self.size

        self._peers = open_peer_memory(
            self.rank, self.size, lambda: open_driver(str(device), exports=True), folder, all_agree
        )
        if self._peers is not None:
            compile_all_reduce(self._peers.inboxes, device)

    @staticmethod
    def _wait(work: Any) -> None:
        """Wait for gloo; of NCCL, the current stream waits, and not the host."""
        if work is not None:
            work.wait()


def connect(rank: int, size: int, device: torch.device, meeting: Path) -> GroupCollectives:
    """Meet the other ranks; returns when all have come.

    Args:
        rank: number of this one.
        size: number of ranks.
        device: where its tensors are.
        meeting: a file that does not exist, the same for all ranks, in a folder of its own.
    """
    store = _dist.FileStore(str(meeting), size)
    kind: Any = _c10d.ProcessGroupGloo if device.type == "cpu" else _c10d.ProcessGroupNCCL
    options = kind._Options() if device.type == "cpu" else kind.Options()  # noqa: SLF001
    options._timeout = _TIMEOUT  # noqa: SLF001
    if device.type == "cpu":
        options._devices = [kind.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        return GroupCollectives(kind(store, rank, size, options), rank, size)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast over NVLink
    torch.cuda.set_device(device)
    group = GroupCollectives(kind(store, rank, size, options), rank, size)
    group.agree(torch.zeros(1, device=device))  # NCCL connects with the first operation
    group.use_peer_memory(device, meeting.parent)
    return group
