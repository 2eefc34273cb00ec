"""Driver of an NVIDIA GPU, through CUDA's virtual memory management.

A handle is the driver's own (`CUmemGenericAllocationHandle`). The implementation relies on these
facts beyond the driver's manual; `tests/gpu/test_cuda_driver.py` checks each:

- A handle maps whole. `cuMemSetAccess` and `cuMemUnmap` take a range of many handles, if its ends
  are ends of handles; the cost per handle is about that of single calls.
- A new handle reads as zeros, even in memory that this process wrote before: the kernel driver
  scrubs released memory. So `create` writes nothing.
- Neither mapping nor unmapping waits for running kernels. Unmapping a page that a kernel still
  reads is a fault that ends the process, so callers wait for a `fence` first (`memory/retire.py`).
- A page that another process has exported is mapped like an own one, also if it is another GPU's;
  its memory stays until both have released it.
- A CUDA graph refers to addresses: it replays correctly after the page at one was replaced.

All calls use the device's primary context, which is torch's, and leave the calling thread's
current context unchanged. Calls may come from several threads.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from aquifer.errors import ConfigError, DriverError, InvariantError
from aquifer.memory.driver.base import ExportedPages, Handle
from aquifer.memory.driver.calls import CurrentContext, checked, text_of
from aquifer.memory.driver.dlpack import tensor_over
from aquifer.memory.driver.event import EventFence
from aquifer.memory.driver.nvml import ProcessMemory

_PAGE_BYTES = 2 << 20  # the granularity of every GPU so far
_LARGE_PAGE_BYTES = 32 << 20

_CONTEXT_BYTES = 600 << 20
"""Allowance for the CUDA context, loaded modules and executable graphs where NVML does not report
their size: the use of a process on an H200 with cuBLAS and Triton's kernels loaded, rounded up."""

_NAME_BYTES = 256  # buffer for names returned by the driver


class CudaDriver:
    """The `Driver` of one NVIDIA GPU.

    Args:
        index: the GPU's index in torch.
        exports: whether other processes are to map its pages, as far as the GPU has that.
        api: replaces `cuda.bindings.driver` in tests.
        nvml: replaces the module `pynvml` in tests.

    Raises:
        ConfigError: the CUDA bindings, or torch with CUDA, are not installed.
        DriverError: there is no such GPU, or it refused a call.
    """

    name = "cuda"
    max_mappings = None
    runs_ahead = True

    def __init__(
        self, index: int = 0, api: Any = None, nvml: Any = None, *, exports: bool = False
    ) -> None:
        self._api = api = load_api() if api is None else api
        self.device = torch.device("cuda", index)
        self._page_bytes: dict[Handle, int] = {}  # live handles -> size
        self._num_adopted: Counter[Handle] = Counter()  # those of other processes
        self._created_bytes = 0  # bytes of the live handles; several threads change it
        self._other_bytes: int | None = None  # of the overhead, without torch's, as measured last
        self._counting = threading.Lock()  # guards the last two
        self._reservations: dict[int, int] = {}  # address -> size
        self._mapped: dict[int, int] = {}  # address -> size of the page there
        with ExitStack() as undo:
            self._check(api.cuInit(0), "no NVIDIA GPU can be used; use --device cpu")
            self._device_id = self._check(api.cuDeviceGet(index), f"there is no {self.device}")
            context = self._check(
                api.cuDevicePrimaryCtxRetain(self._device_id),
                f"could not get the primary context of {self.device}",
            )
            undo.callback(api.cuDevicePrimaryCtxRelease, self._device_id)
            self._current = CurrentContext(api, context)
            with self._current:
                self._stream = self._check(
                    api.cuStreamCreate(api.CUstream_flags.CU_STREAM_NON_BLOCKING.value),
                    "could not create a stream",
                )
                undo.callback(api.cuStreamDestroy, self._stream)
                self.can_export = exports and self._has_file_handles()
                self._properties = self._allocation_properties(index)
                self.granularity_bytes: int = self._check(
                    api.cuMemGetAllocationGranularity(
                        self._properties,
                        api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
                    ),
                    "could not get the page granularity",
                )
            bus_id = self._check(
                api.cuDeviceGetPCIBusId(_NAME_BYTES, self._device_id), "could not get the PCI bus"
            )
            self._process_memory = ProcessMemory(text_of(bus_id), nvml)
            self._access = api.CUmemAccessDesc()
            self._access.location = self._properties.location
            self._access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            undo.pop_all()
        self.default_page_bytes = max(_PAGE_BYTES, self.granularity_bytes)
        self.large_page_bytes = max(_LARGE_PAGE_BYTES, self.granularity_bytes)

    def available_bytes(self) -> int:
        """Free memory of the device."""
        return self._memory_info()[0]

    def total_bytes(self) -> int:
        """Total memory of the device."""
        return self._memory_info()[1]

    def overhead_bytes(self, *, asks_system: bool = True) -> int:
        """The CUDA context, torch's caching allocator, modules, workspaces and CUDA graphs.

        It is NVML's figure for this process minus the pages; pages that another thread creates
        meanwhile make it inexact by their size. If NVML does not list this process, it is an
        allowance for the context plus torch's reserved memory, which is exact and includes the
        private pools of captured graphs.

        NVML goes through all pages of the process, which takes it 20 to 40 ms on an H200 with the
        KV of some hundred sequences, in which no page is created or mapped. If it is not asked,
        what is not torch's counts as it was then.
        """
        reserved_bytes = torch.cuda.memory_reserved(self.device)
        if asks_system or self._other_bytes is None:
            self._other_bytes = self._measured_bytes(reserved_bytes) - reserved_bytes
        return self._other_bytes + reserved_bytes

    def _measured_bytes(self, reserved_bytes: int) -> int:
        """The overhead by NVML, with so much reserved memory of torch in it."""
        created_bytes = self._created_bytes
        used_bytes = self._process_memory.used_bytes()
        # A smaller figure belongs to another process: NVML uses the PIDs of another namespace.
        if used_bytes is None or used_bytes < created_bytes + reserved_bytes:
            return _CONTEXT_BYTES + reserved_bytes
        return max(used_bytes - max(created_bytes, self._created_bytes), reserved_bytes)

    @property
    def is_overhead_measured(self) -> bool:
        """Whether the management library knows this process; else `overhead_bytes` is estimated."""
        return self._process_memory.used_bytes() is not None

    @property
    def num_held(self) -> tuple[int, int, int]:
        """How many pages, mapped pages and reservations there are."""
        return len(self._page_bytes), len(self._mapped), len(self._reservations)

    @property
    def product(self) -> str:
        """Product name of the device."""
        with self._current:
            name = self._check(
                self._api.cuDeviceGetName(_NAME_BYTES, self._device_id), "could not get the name"
            )
        return text_of(name)

    @property
    def cuda_version(self) -> str:
        """The newest version of CUDA that the installed driver supports."""
        version = int(self._check(self._api.cuDriverGetVersion(), "could not get the version"))
        return f"{version // 1000}.{version % 1000 // 10}"

    def create(self, page_bytes: int, count: int) -> list[Handle]:
        """Create pages, with one driver call per page."""
        if page_bytes <= 0 or page_bytes % self.granularity_bytes:
            raise DriverError(
                "CUDA_ERROR_INVALID_VALUE",
                f"page size {page_bytes} is not a positive multiple of {self.granularity_bytes}",
            )
        handles: list[Handle] = []
        with self._current, ExitStack() as undo:
            undo.callback(self.release, handles)
            for _ in range(count):
                handle = self._check(
                    self._api.cuMemCreate(page_bytes, self._properties, 0),
                    f"could not create {count} pages of {page_bytes} bytes",
                )
                handles.append(Handle(int(handle)))
                self._page_bytes[handles[-1]] = page_bytes
                self._count(page_bytes)
            undo.pop_all()
        return handles

    def release(self, handles: Sequence[Handle]) -> None:
        """Release pages; their memory is free on return."""
        for handle in handles:
            if handle not in self._page_bytes:
                raise InvariantError(f"page {handle} was released twice or never created")
        with self._current:
            for handle in handles:
                own_bytes = self._forget(handle)
                self._check(self._api.cuMemRelease(handle), "could not release a page")
                self._count(-own_bytes)

    def export(self, handles: Sequence[Handle]) -> ExportedPages:
        """Open a file descriptor for each page."""
        files: list[int] = []
        with self._current, ExitStack() as undo:
            undo.callback(lambda: list(map(os.close, files)))
            for handle in handles:
                exported = self._api.cuMemExportToShareableHandle(handle, self._file_handle, 0)
                files.append(int(self._check(exported, "could not export a page")))
            undo.pop_all()
        places = [(index, 0) for index in range(len(files))]
        return ExportedPages(self._page_bytes[handles[0]], files, places)

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        """Import each page. One that is imported again may have the same handle."""
        handles: list[Handle] = []
        with self._current, ExitStack() as undo:
            undo.callback(self.release, handles)
            for index, _ in pages.places:
                imported = self._api.cuMemImportFromShareableHandle(
                    pages.files[index], self._file_handle
                )
                handle = Handle(int(self._check(imported, "could not import a page")))
                handles.append(handle)
                with self._counting:
                    self._page_bytes[handle] = pages.page_bytes
                    self._num_adopted[handle] += 1
            undo.pop_all()
        return handles

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses; this takes no memory, even for terabytes."""
        with self._current:
            address = int(
                self._check(
                    self._api.cuMemAddressReserve(num_bytes, self.granularity_bytes, 0, 0),
                    f"could not reserve {num_bytes} bytes of addresses",
                )
            )
        self._reservations[address] = num_bytes
        return address

    def free(self, address: int, num_bytes: int) -> None:
        """Free the addresses."""
        if self._reservations.pop(address, None) != num_bytes:
            raise InvariantError(f"{num_bytes} bytes at {address:#x} were never reserved")
        with self._current:
            self._check(self._api.cuMemAddressFree(address, num_bytes), "could not free addresses")

    def map(self, address: int, handles: Sequence[Handle]) -> None:
        """Map the pages one by one, then make the whole range accessible with one call."""
        if not handles:
            return
        page_bytes = self._page_bytes[handles[0]]
        num_mapped = 0
        what = f"could not map {len(handles)} pages of {page_bytes} bytes"
        with self._current, ExitStack() as undo:
            undo.callback(lambda: self._unmap(address, num_mapped * page_bytes))
            for handle in handles:
                place = address + num_mapped * page_bytes
                self._check(self._api.cuMemMap(place, page_bytes, 0, handle, 0), what)
                num_mapped += 1
            self._check(
                self._api.cuMemSetAccess(address, num_mapped * page_bytes, [self._access], 1), what
            )
            undo.pop_all()
        end = address + num_mapped * page_bytes
        self._mapped.update(dict.fromkeys(range(address, end, page_bytes), page_bytes))

    def unmap(self, address: int, page_bytes: int, count: int) -> None:
        """Unmap with one call. Pre-condition: a `fence` has shown that no kernel uses the pages."""
        places = range(address, address + count * page_bytes, page_bytes)
        for place in places:
            if self._mapped.get(place) != page_bytes:
                raise InvariantError(f"no page of {page_bytes} bytes is mapped at {place:#x}")
        with self._current:
            self._unmap(address, count * page_bytes)
        for place in places:
            del self._mapped[place]

    def fill(self, handles: Sequence[Handle], byte: int) -> None:
        """Map the pages at temporary addresses, fill them, and wait for that.

        The write runs on a separate stream, so it does not wait for running kernels. That is safe,
        because a page to be filled has no owner.
        """
        if not handles:
            return
        what = f"could not fill {len(handles)} pages with {byte:#x}"
        with self._current, self._mapped_for_a_time(handles) as (address, num_bytes):
            self._check(self._api.cuMemsetD8Async(address, byte, num_bytes, self._stream), what)
            self._check(self._api.cuStreamSynchronize(self._stream), what)

    def unlike(self, handles: Sequence[Handle], byte: int) -> list[Handle]:
        """Copy one page after the other to the host, on the stream of `fill`, and look there."""
        found: list[Handle] = []
        for handle in handles:
            copy = np.empty(self._page_bytes[handle], np.uint8)
            what = "could not read a page"
            with self._current, self._mapped_for_a_time([handle]) as (address, num_bytes):
                self._check(
                    self._api.cuMemcpyDtoHAsync(copy.ctypes.data, address, num_bytes, self._stream),
                    what,
                )
                self._check(self._api.cuStreamSynchronize(self._stream), what)
            if (copy != byte).any():
                found.append(handle)
        return found

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return a tensor that torch makes without a driver call about the address."""
        return tensor_over(address, num_bytes, self.device)

    def fence(self) -> EventFence:
        """Record an event on torch's current stream.

        It covers that stream only. Work on another stream that uses pages must be joined to it
        (`current.wait_stream(other)`) or waited for before the pages are released.
        """
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return EventFence(event)

    def close(self) -> None:
        """Wait for the device, then release all pages, mapped or not, and torch's cached memory."""
        if self._stream is None:
            return
        with self._current:
            self._check(self._api.cuCtxSynchronize(), "the device failed")
            for place, page_bytes in list(self._mapped.items()):
                self.unmap(place, page_bytes, 1)
            for address, num_bytes in list(self._reservations.items()):
                self.free(address, num_bytes)
            self.release(list(self._page_bytes))
            self._check(self._api.cuStreamDestroy(self._stream), "could not destroy a stream")
            self._stream = None
        self._process_memory.close()
        torch.cuda.empty_cache()
        self._check(
            self._api.cuDevicePrimaryCtxRelease(self._device_id), "could not release the context"
        )

    @contextmanager
    def _mapped_for_a_time(self, handles: Sequence[Handle]) -> Iterator[tuple[int, int]]:
        """Map pages of one size at addresses of their own; (address, bytes)."""
        page_bytes = self._page_bytes[handles[0]]
        num_bytes = len(handles) * page_bytes
        with ExitStack() as undo:
            address = self.reserve(num_bytes)
            undo.callback(self.free, address, num_bytes)
            self.map(address, handles)
            undo.callback(self.unmap, address, page_bytes, len(handles))
            yield address, num_bytes

    def _allocation_properties(self, index: int) -> Any:
        """Properties of pages: pinned memory of this device."""
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = index
        if self.can_export:
            properties.requestedHandleTypes = self._file_handle
        return properties

    @property
    def _file_handle(self) -> Any:
        """The type of handles that are file descriptors."""
        return self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _has_file_handles(self) -> bool:
        """Whether the GPU's pages can have handles that are file descriptors."""
        attribute = self._api.CUdevice_attribute
        supported = attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        return bool(
            self._check(
                self._api.cuDeviceGetAttribute(supported, self._device_id),
                f"could not ask what {self.device} has",
            )
        )

    def _memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        with self._current:
            free_bytes, total_bytes = self._check(
                self._api.cuMemGetInfo(), "could not read free memory"
            )
        return int(free_bytes), int(total_bytes)

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            self._created_bytes += num_bytes

    def _forget(self, handle: Handle) -> int:
        """End a use of a page; returns its bytes, or 0 if it is another process's."""
        with self._counting:
            if handle not in self._num_adopted:
                return self._page_bytes.pop(handle)
            self._num_adopted[handle] -= 1
            if not self._num_adopted[handle]:
                del self._num_adopted[handle], self._page_bytes[handle]
            return 0

    def _unmap(self, address: int, num_bytes: int) -> None:
        if num_bytes:
            self._check(self._api.cuMemUnmap(address, num_bytes), "could not unmap pages")

    def _check(self, result: tuple[Any, ...], what: str) -> Any:
        """Return the values of a call to this driver's API; see `checked`."""
        return checked(self._api, result, what)


def has_bindings() -> bool:
    """Whether the CUDA bindings are installed."""
    return (
        importlib.util.find_spec("cuda") is not None
        and importlib.util.find_spec("cuda.bindings") is not None
    )


def load_api() -> Any:
    """Import the CUDA bindings.

    Raises:
        ConfigError: the bindings, or torch with CUDA, are not installed.
        DriverError: the NVIDIA driver is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(
            f"device 'cuda' needs the CUDA bindings ({error}); pip install 'aquifer[cuda]', or "
            "use --device cpu"
        ) from error
    if torch.version.cuda is None:
        raise ConfigError(
            f"device 'cuda' needs torch with CUDA, and torch {torch.__version__} has none; "
            "install a CUDA build of torch, or use --device cpu"
        )
    try:
        driver.cuDriverGetVersion()
    except RuntimeError as error:  # the bindings found no libcuda
        raise DriverError(
            "NO_CUDA_DRIVER", f"no NVIDIA driver is installed ({error}); use --device cpu"
        ) from error
    return driver
