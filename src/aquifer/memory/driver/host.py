"""Driver of host memory: a memfd provides the pages, mmap with MAP_FIXED the addresses.

A handle is a byte offset into one anonymous file, or into that of another process. The
implementation relies on these facts:

- `fallocate` allocates the memory at creation, so that a shortage is an error here and not a
  SIGBUS at the first access; `FALLOC_FL_PUNCH_HOLE` frees it, and the hole reads as zeros.
- The same file offset may be mapped at any number of addresses (MAP_SHARED).
- A reservation is a PROT_NONE mapping without swap accounting. Unmapping maps PROT_NONE over the
  page instead of calling munmap, so that no other mmap can land inside the reservation.
- Linux merges mappings that are adjacent in address and in file offset, and limits a process to
  `vm.max_map_count` of them. Neighbouring handles are therefore mapped by one call, and `create`
  returns neighbours where it can.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from aquifer.errors import DriverError, InvariantError
from aquifer.memory.driver.base import ExportedPages, Handle
from aquifer.memory.proc import available_host_bytes, cgroup_limit_bytes, proc_bytes
from aquifer.memory.runs import runs

_PROT_NONE, _PROT_READ_WRITE = 0x0, 0x3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x20, 0x4000, 0x100000
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x01, 0x02
_MAP_FAILED = ctypes.c_void_p(-1).value

_DEFAULT_PAGE_BYTES = 64 * 1024
_PIECE_BYTES = 1 << 20  # size of one write of `fill` and one read of `unlike`
_MAX_FILE_BYTES = 2**63 - 1
_FILE_STRIDE = 1 << 64  # distance of the handles of two files
_MAPPINGS_LEFT_TO_OTHERS = 8192  # libraries, thread stacks, allocator arenas


class HostDriver:
    """The `Driver` of the CPU. Linux only."""

    name = "host"
    device = torch.device("cpu")
    granularity_bytes = mmap.PAGESIZE
    default_page_bytes = _DEFAULT_PAGE_BYTES
    large_page_bytes = _DEFAULT_PAGE_BYTES  # neighbours are mapped by one call
    can_export = True
    runs_ahead = False

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise DriverError("NO_MEMFD", "the host driver needs Linux (memfd_create)")
        self._libc = _load_libc()
        self._fd = os.memfd_create("aquifer", os.MFD_CLOEXEC)
        self._file_bytes = 0
        self._page_bytes: dict[Handle, int] = {}  # live handles -> size
        self._adopted = _AdoptedFiles()
        self._holes: dict[int, list[Handle]] = {}  # size -> released offsets, to be reused
        self._reservations: dict[int, int] = {}  # address -> size
        self._pieces: dict[int, bytes] = {}  # what `fill` writes, by the value of all its bytes
        # One thread creates pages ahead while another releases some.
        self._lock = threading.Lock()

    @property
    def max_mappings(self) -> int:
        """Pages that may be mapped at once within `vm.max_map_count`."""
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        return max(limit - _MAPPINGS_LEFT_TO_OTHERS, limit // 2)

    def available_bytes(self) -> int:
        """See `available_host_bytes`."""
        return available_host_bytes()

    def total_bytes(self) -> int:
        """The machine's memory, or the limit of the control group if that is less."""
        limit = cgroup_limit_bytes()
        total = proc_bytes("/proc/meminfo", "MemTotal")
        return total if limit is None else min(total, limit)

    def overhead_bytes(self, *, asks_system: bool = True) -> int:
        """0: memory of Python, torch and activations is not part of the pool's budget."""
        return 0

    def create(self, page_bytes: int, count: int) -> list[Handle]:
        """Reuse released offsets of the same size, lowest first, then grow the file."""
        if page_bytes <= 0 or page_bytes % self.granularity_bytes:
            raise DriverError(
                "EINVAL",
                f"page size {page_bytes} is not a positive multiple of {self.granularity_bytes}",
            )
        with self._lock:
            holes = self._holes.setdefault(page_bytes, [])
            holes.sort(reverse=True)
            reused = holes[max(len(holes) - count, 0) :][::-1]
            num_new = count - len(reused)
            new_end = self._file_bytes + num_new * page_bytes
            if new_end > _MAX_FILE_BYTES:
                raise DriverError(
                    "EFBIG", f"{count} pages of {page_bytes} bytes exceed the largest file size"
                )
            handles = reused + [Handle(o) for o in range(self._file_bytes, new_end, page_bytes)]
            try:
                if num_new:
                    os.ftruncate(self._fd, new_end)
                for offset, length in _stretches(handles, page_bytes):
                    self.fallocate(0, offset, length)
            except OSError as error:
                for offset, length in _stretches(reused, page_bytes):
                    self.fallocate(_FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, length)
                os.ftruncate(self._fd, self._file_bytes)  # removes the new pages
                raise _driver_error(
                    error, f"could not create {count} pages of {page_bytes} bytes"
                ) from error
            del holes[len(holes) - len(reused) :]
            self._file_bytes = new_end
            self._page_bytes.update(dict.fromkeys(handles, page_bytes))
            return handles

    def release(self, handles: Sequence[Handle]) -> None:
        """Punch holes in place of the pages, which frees their memory at once."""
        with self._lock:
            for handle in handles:
                if handle not in self._page_bytes:
                    raise InvariantError(f"page {handle} was released twice or never created")
            adopted = [handle for handle in handles if handle >= _FILE_STRIDE]
            for handle in adopted:
                if self._adopted.release(handle):
                    del self._page_bytes[handle]
            if adopted:
                handles = [handle for handle in handles if handle < _FILE_STRIDE]
            for page_bytes, group in self._by_size(handles):
                for offset, length in _stretches(sorted(group), page_bytes):
                    self.fallocate(_FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, length)
                self._holes.setdefault(page_bytes, []).extend(group)
            for handle in handles:
                del self._page_bytes[handle]

    def export(self, handles: Sequence[Handle]) -> ExportedPages:
        """All pages are in one file, of which this opens another descriptor."""
        try:
            file = os.dup(self._fd)
        except OSError as error:
            raise _driver_error(error, "could not open pages for another process") from error
        return ExportedPages(self._page_bytes[handles[0]], [file], [(0, each) for each in handles])

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        """Keep a descriptor of each file; a handle has its number, too."""
        with self._lock:
            handles = self._adopted.add(pages)
            self._page_bytes.update(dict.fromkeys(handles, pages.page_bytes))
            return handles

    def reserve(self, num_bytes: int) -> int:
        """Reserve `num_bytes` with a PROT_NONE mapping; this takes only address space."""
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        address = self._mmap(None, num_bytes, _PROT_NONE, flags, -1, 0)
        self._reservations[address] = num_bytes
        return address

    def free(self, address: int, num_bytes: int) -> None:
        """Free the addresses."""
        if self._reservations.pop(address, None) != num_bytes:
            raise InvariantError(f"{num_bytes} bytes at {address:#x} were never reserved")
        self._libc.munmap(address, num_bytes)

    def map(self, address: int, handles: Sequence[Handle]) -> None:
        """Map each run of neighbouring offsets with one call."""
        mapped = 0
        flags = _MAP_SHARED | _MAP_FIXED
        for offset, length in self._stretches_of(handles):
            try:
                number, place = divmod(offset, _FILE_STRIDE)
                file = self._adopted.file(number) if number else self._fd
                self._mmap(address + mapped, length, _PROT_READ_WRITE, flags, file, place)
            except DriverError:
                if mapped:
                    self._map_nothing(address, mapped)
                raise
            mapped += length

    def unmap(self, address: int, page_bytes: int, count: int) -> None:
        """Replace the pages by the PROT_NONE reservation."""
        self._map_nothing(address, page_bytes * count)

    def fill(self, handles: Sequence[Handle], byte: int) -> None:
        """Write through the file, so that no mapping is needed (or counted as resident)."""
        piece = memoryview(self._piece(byte))
        for offset, length in self._stretches_of(handles):
            for start in range(0, length, _PIECE_BYTES):
                part = piece[: min(_PIECE_BYTES, length - start)]
                os.pwrite(self._fd, part, offset + start)

    def unlike(self, handles: Sequence[Handle], byte: int) -> list[Handle]:
        """Read through the file."""
        return [handle for handle in handles if not self._consists_of(handle, byte)]

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Wrap the addresses in a tensor; nothing is read."""
        buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def fence(self) -> None:
        """None: the CPU's work is done when the call returns."""

    def resident_bytes(self) -> int:
        """Memory that the pages take from the system now, mapped or not."""
        return os.fstat(self._fd).st_blocks * 512

    @property
    def file_bytes(self) -> int:
        """Size of the file, holes included."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Unmap all reservations and close the file, which frees every page."""
        for address, num_bytes in self._reservations.items():
            self._libc.munmap(address, num_bytes)
        self._reservations.clear()
        self._page_bytes.clear()
        self._holes.clear()
        self._adopted.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def fallocate(self, mode: int, offset: int, length: int) -> None:
        """Allocate bytes of the file or punch a hole there, as fallocate(2) does.

        Raises:
            OSError: the system has no memory for them.
        """
        if self._libc.fallocate(self._fd, mode, offset, length):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _piece(self, byte: int) -> bytes:
        piece = self._pieces.get(byte)
        if piece is None:
            piece = self._pieces[byte] = bytes([byte]) * _PIECE_BYTES
        return piece

    def _consists_of(self, handle: Handle, byte: int) -> bool:
        """Whether all bytes of a page have one value."""
        page_bytes, piece = self._page_bytes[handle], self._piece(byte)
        for start in range(0, page_bytes, _PIECE_BYTES):
            found = os.pread(self._fd, min(_PIECE_BYTES, page_bytes - start), handle + start)
            if found != (piece if len(found) == len(piece) else piece[: len(found)]):
                return False
        return True

    def _stretches_of(self, handles: Sequence[Handle]) -> list[tuple[int, int]]:
        """(offset, length) of each stretch of neighbours among pages of one size."""
        return _stretches(handles, self._page_bytes[handles[0]]) if handles else []

    def _by_size(self, handles: Sequence[Handle]) -> Iterator[tuple[int, list[Handle]]]:
        """Split into maximal runs of one page size, keeping the order."""
        start = 0
        while start < len(handles):
            page_bytes = self._page_bytes[handles[start]]
            end = start + 1
            while end < len(handles) and self._page_bytes[handles[end]] == page_bytes:
                end += 1
            yield page_bytes, list(handles[start:end])
            start = end

    def _map_nothing(self, address: int, num_bytes: int) -> None:
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._mmap(address, num_bytes, _PROT_NONE, flags | _MAP_FIXED, -1, 0)
        except DriverError:
            # At vm.max_map_count the system refuses every mmap, even one that leaves fewer
            # mappings, but not munmap. Until the second mmap the addresses are free: if another
            # thread's mmap takes them meanwhile, the second call fails and overwrites nothing.
            if self._libc.munmap(address, num_bytes):
                raise
            self._mmap(address, num_bytes, _PROT_NONE, flags | _MAP_FIXED_NOREPLACE, -1, 0)

    def _mmap(
        self, address: int | None, num_bytes: int, prot: int, flags: int, fd: int, offset: int
    ) -> int:
        result = self._libc.mmap(address, num_bytes, prot, flags, fd, offset)
        if result == _MAP_FAILED:
            number = ctypes.get_errno()
            hint = (
                "; this process holds too many mappings: choose larger pages, or raise "
                "vm.max_map_count"
                if number == errno.ENOMEM
                else ""
            )
            raise _driver_error(
                OSError(number, os.strerror(number)), f"mmap of {num_bytes} bytes failed{hint}"
            )
        return int(result)


class _AdoptedFiles:
    """The files of other processes of which pages were adopted.

    The handle of a page of file number n is n * `_FILE_STRIDE` + offset. A file is open for as long
    as any page of it is, so that the memory of a process that has ended is not kept.
    """

    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # number -> descriptor; 0 would be the driver's own
        self._last_number = 0
        self._num_uses: Counter[Handle] = Counter()
        self._num_pages: Counter[int] = Counter()  # by number of the file

    def file(self, number: int) -> int:
        """The descriptor of a file."""
        return self._files[number]

    def add(self, pages: ExportedPages) -> list[Handle]:
        """Use pages, some of which may be in use already.

        Raises:
            DriverError: too many files are open.
        """
        numbers = [self._number_of(file) for file in pages.files]
        handles = [Handle(numbers[index] * _FILE_STRIDE + offset) for index, offset in pages.places]
        self._num_uses.update(handles)
        self._num_pages.update(numbers[index] for index, _ in pages.places)
        return handles

    def release(self, handle: Handle) -> bool:
        """End a use of a page; returns whether it was the last one."""
        number = handle // _FILE_STRIDE
        self._num_pages[number] -= 1
        if not self._num_pages[number]:
            del self._num_pages[number]
            os.close(self._files.pop(number))
        self._num_uses[handle] -= 1
        if self._num_uses[handle]:
            return False
        del self._num_uses[handle]
        return True

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._num_uses.clear()
        self._num_pages.clear()

    def _number_of(self, file: int) -> int:
        status = os.fstat(file)
        for number, known in self._files.items():
            if os.path.samestat(os.fstat(known), status):
                return number
        self._last_number += 1
        try:
            self._files[self._last_number] = os.dup(file)
        except OSError as error:
            raise _driver_error(error, "could not open pages of another process") from error
        return self._last_number


def _stretches(handles: Sequence[Handle], page_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of each stretch of handles that are neighbours in the file."""
    return [
        (handles[start], (end - start) * page_bytes) for start, end in runs(handles, page_bytes)
    ]


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return libc


def _driver_error(error: OSError, what: str) -> DriverError:
    name = errno.errorcode.get(error.errno or 0, "EUNKNOWN")
    return DriverError(name, f"{what} ({error.strerror})")
