"""The CUDA driver's bookkeeping and errors, over a stand-in for `cuda.bindings.driver`.

What a GPU really does is for `tests/gpu`.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aquifer.errors import ConfigError, DriverError, InvariantError
from aquifer.memory.driver import cuda, open_driver
from aquifer.memory.driver.cuda import CudaDriver

PAGE = 2 << 20


class _Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100


class FakeApi:
    """Remembers what exists and what is mapped; `refuse[name] = n` makes the n-th call fail."""

    CUresult = _Result
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=SimpleNamespace(value=1))
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103
    )
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self) -> None:
        self.refuse: dict[str, int] = {}
        self.code = _Result.CUDA_ERROR_OUT_OF_MEMORY
        self.calls: list[str] = []
        self.contexts = 0
        self.sizes: dict[int, int] = {}
        self.num_imports: Counter[int] = Counter()  # by handle
        self.files: dict[tuple[int, int], tuple[int, int]] = {}  # exported: (handle, size)
        self.has_file_handles = True
        self.created: list[Any] = []  # the properties of each page
        self.contents: dict[int, int] = {}  # the value of all bytes of a handle, if not 0
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.next_handle = 1000
        self.next_address = 1 << 40

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        act = getattr(self, f"do_{name}", lambda *_: ())

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.refuse:
                self.refuse[name] -= 1
                if self.refuse[name] < 0:
                    del self.refuse[name]
                    return (self.code, None)
            return (_Result.CUDA_SUCCESS, *act(*arguments))

        return call

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    @staticmethod
    def CUmemAccessDesc() -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace()

    def cuGetErrorString(self, code: _Result) -> tuple[_Result, bytes]:  # noqa: N802
        return _Result.CUDA_SUCCESS, f"text of {code.value}".encode()

    def do_cuCtxPushCurrent(self, _: Any) -> tuple[()]:  # noqa: N802
        self.contexts += 1
        return ()

    def do_cuCtxPopCurrent(self) -> tuple[None]:  # noqa: N802
        self.contexts -= 1
        return (None,)

    def do_cuDeviceGet(self, index: int) -> tuple[int]:  # noqa: N802
        return (index,)

    def do_cuDevicePrimaryCtxRetain(self, _: int) -> tuple[str]:  # noqa: N802
        return ("context",)

    def do_cuStreamCreate(self, _: int) -> tuple[str]:  # noqa: N802
        return ("stream",)

    def do_cuMemGetAllocationGranularity(self, *_: Any) -> tuple[int]:  # noqa: N802
        return (PAGE,)

    def do_cuDeviceGetPCIBusId(self, length: int, _: int) -> tuple[bytes]:  # noqa: N802
        return (b"0000:1B:00.0".ljust(length, b"\0"),)

    def do_cuDeviceGetName(self, length: int, _: int) -> tuple[bytes]:  # noqa: N802
        return (b"NVIDIA H200".ljust(length, b"\0"),)

    def do_cuDriverGetVersion(self) -> tuple[int]:  # noqa: N802
        return (13020,)

    def do_cuMemGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return 7, 8

    def do_cuDeviceGetAttribute(self, attribute: int, _: int) -> tuple[bool]:  # noqa: N802
        assert attribute == 103
        return (self.has_file_handles,)

    def do_cuMemExportToShareableHandle(self, handle: int, kind: int, _: int) -> tuple[int]:  # noqa: N802
        assert (kind, self.created[0].requestedHandleTypes) == (1, 1)
        file = os.memfd_create("page")
        status = os.fstat(file)
        self.files[status.st_dev, status.st_ino] = handle, self.sizes[handle]
        return (file,)

    def do_cuMemImportFromShareableHandle(self, file: int, kind: int) -> tuple[int]:  # noqa: N802
        assert kind == 1
        status = os.fstat(file)
        number, size = self.files[status.st_dev, status.st_ino]
        handle = number + (1 << 32)
        self.sizes[handle] = size
        self.num_imports[handle] += 1
        return (handle,)

    def do_cuMemCreate(self, size: int, properties: Any, _: int) -> tuple[int]:  # noqa: N802
        assert self.contexts
        self.created.append(properties)
        self.next_handle += 1
        self.sizes[self.next_handle] = size
        return (self.next_handle,)

    def do_cuMemRelease(self, handle: int) -> tuple[()]:  # noqa: N802
        if self.num_imports[handle] > 1:
            self.num_imports[handle] -= 1
        else:
            del self.sizes[handle], self.num_imports[handle]
        return ()

    def do_cuMemAddressReserve(self, size: int, *_: Any) -> tuple[int]:  # noqa: N802
        self.next_address += size
        return (self.next_address - size,)

    def do_cuMemMap(self, address: int, size: int, offset: int, handle: int, _: int) -> tuple[()]:  # noqa: N802
        assert (self.sizes[handle], offset) == (size, 0)
        assert address not in self.mapped
        self.mapped[address] = handle
        return ()

    def do_cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> tuple[()]:  # noqa: N802
        assert (len(access), count) == (1, 1)
        self.accessible |= {place for place in self.mapped if address <= place < address + size}
        return ()

    def do_cuMemsetD8Async(self, address: int, byte: int, size: int, _: str) -> tuple[()]:  # noqa: N802
        places = [place for place in self.accessible if address <= place < address + size]
        assert sum(self.sizes[self.mapped[place]] for place in places) == size
        self.contents.update((self.mapped[place], byte) for place in places)
        return ()

    def do_cuMemcpyDtoHAsync(self, target: int, source: int, size: int, _: str) -> tuple[()]:  # noqa: N802
        assert source in self.accessible
        assert self.sizes[self.mapped[source]] == size
        ctypes.memset(target, self.contents.get(self.mapped[source], 0), size)
        return ()

    def do_cuMemUnmap(self, address: int, size: int) -> tuple[()]:  # noqa: N802
        for place in [p for p in self.mapped if address <= p < address + size]:
            size -= self.sizes[self.mapped.pop(place)]
            self.accessible.discard(place)
        assert size == 0
        return ()


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def driver(api: FakeApi) -> CudaDriver:
    return CudaDriver(api=api)


def test_errors_carry_the_driver_s_own_words(api):
    api.code = _Result.CUDA_ERROR_NO_DEVICE
    api.refuse["cuInit"] = 0
    with pytest.raises(DriverError, match=r"^CUDA_ERROR_NO_DEVICE: .*--device cpu.*\(text of 100"):
        CudaDriver(api=api)
    for name in ("cuStreamCreate", "cuMemGetAllocationGranularity"):
        api.refuse[name] = 0
        with pytest.raises(DriverError, match="CUDA_ERROR_NO_DEVICE"):
            CudaDriver(api=api)
        assert api.calls[-1] == "cuDevicePrimaryCtxRelease"
        assert api.contexts == 0


def test_no_gpu_is_said_by_name():
    """Whatever is missing on this machine: the bindings, torch for CUDA, or the GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises((ConfigError, DriverError), match="--device cpu"):
        open_driver("cuda:0")
    with pytest.raises(ConfigError, match="'cuda' or 'cuda:N'"):
        open_driver("cuda:x")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_auto_without_the_bindings_is_the_cpu_and_says_so(monkeypatch, caplog, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(cuda, "has_bindings", lambda: False)
    driver = open_driver("auto")
    assert driver.device.type == "cpu"
    driver.close()
    assert ("pip install 'aquifer[cuda]'" in caplog.text) == has_gpu


def test_auto_is_the_first_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "has_bindings", lambda: True)
    opened: list[int] = []
    monkeypatch.setattr(cuda, "CudaDriver", lambda index, exports: opened.append(index))
    open_driver("auto")
    assert opened == [0]


def test_pages_of_another_process(api):
    """A page that is imported twice has one handle, and is the other process's when it is released;
    a refused call leaves no page and no descriptor."""
    lender, driver = CudaDriver(api=api, exports=True), CudaDriver(api=api, exports=True)
    assert lender.can_export
    handles = lender.create(PAGE, 3)
    exported = lender.export(handles)
    assert exported.places == [(0, 0), (1, 0), (2, 0)]
    first = driver.adopt(exported)
    again = driver.adopt(exported._replace(places=exported.places[:2]))
    assert again == first[:2]
    assert not set(first) & set(handles)
    assert driver.num_held == (3, 0, 0)
    address = driver.reserve(3 * PAGE)
    driver.map(address, first)
    assert [api.mapped[address + i * PAGE] for i in range(3)] == first
    driver.unmap(address, PAGE, 3)
    driver.free(address, 3 * PAGE)
    driver.release(first)
    assert driver.num_held == (2, 0, 0)
    api.refuse["cuMemImportFromShareableHandle"] = 2
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY: could not import"):
        driver.adopt(exported)
    num_open = len(os.listdir("/proc/self/fd"))
    api.refuse["cuMemExportToShareableHandle"] = 2
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY: could not export"):
        lender.export(handles)
    assert len(os.listdir("/proc/self/fd")) == num_open
    driver.release(again)
    assert driver.num_held == (0, 0, 0)
    for file in exported.files:
        os.close(file)
    lender.release(handles)
    assert not api.sizes


def test_pages_are_for_one_process_unless_asked_for(api, driver):
    driver.create(PAGE, 1)
    assert not driver.can_export
    assert not hasattr(api.created[0], "requestedHandleTypes")
    api.has_file_handles = False
    assert not CudaDriver(api=api, exports=True).can_export


def test_pages(driver, api):
    handles = driver.create(PAGE, 3)
    assert len(set(handles)) == 3
    assert (driver.available_bytes(), driver.total_bytes()) == (7, 8)
    assert (driver.product, driver.cuda_version) == ("NVIDIA H200", "13.2")
    address = driver.reserve(8 * PAGE)
    driver.map(address + PAGE, handles)
    assert api.mapped.keys() == api.accessible
    assert api.calls.count("cuMemSetAccess") == 1
    driver.fill([handles[2], handles[0]], 0)
    assert len(api.mapped) == 3
    with pytest.raises(InvariantError, match="no page of"):
        driver.unmap(address, PAGE, 2)
    driver.unmap(address + PAGE, PAGE, 2)
    assert [place - address for place in api.mapped] == [3 * PAGE]
    driver.unmap(address + 3 * PAGE, PAGE, 1)
    driver.free(address, 8 * PAGE)
    driver.release(handles)
    with pytest.raises(InvariantError):
        driver.release(handles)
    with pytest.raises(InvariantError):
        driver.free(address, 8 * PAGE)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE: page size 5"):
        driver.create(5, 1)
    driver.close()
    assert (api.sizes, api.mapped, api.contexts) == ({}, {}, 0)


@pytest.mark.parametrize("nth", range(3))
def test_create_all_or_none(driver, api, nth):
    api.refuse["cuMemCreate"] = nth
    with pytest.raises(DriverError, match=r"CUDA_ERROR_OUT_OF_MEMORY: .*\(text of 2\)"):
        driver.create(PAGE, 3)
    assert (api.sizes, driver.num_held, api.contexts) == ({}, (0, 0, 0), 0)


@pytest.mark.parametrize(
    ("call", "nth"), [("cuMemMap", n) for n in range(3)] + [("cuMemSetAccess", 0)]
)
def test_map_all_or_none(driver, api, call, nth):
    handles = driver.create(PAGE, 3)
    address = driver.reserve(3 * PAGE)
    api.refuse[call] = nth
    with pytest.raises(DriverError, match="could not map 3 pages"):
        driver.map(address, handles)
    assert (api.mapped, driver.num_held, api.contexts) == ({}, (3, 0, 1), 0)
    driver.map(address, handles)
    assert len(api.mapped) == 3


@pytest.mark.parametrize(
    "call", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"]
)
def test_fill_leaves_nothing_behind(driver, api, call):
    handles = driver.create(PAGE, 2)
    api.refuse[call] = 0
    with pytest.raises(DriverError):
        driver.fill(handles, 0)
    assert (api.mapped, driver.num_held, api.contexts) == ({}, (2, 0, 0), 0)


def test_pages_with_other_bytes_than_they_should_have(driver, api):
    handles = driver.create(PAGE, 3)
    driver.fill(handles[1:], 0xFF)
    assert driver.unlike(handles, 0xFF) == handles[:1]
    assert driver.unlike(handles, 0) == handles[1:]
    assert driver.unlike([], 0) == []
    api.refuse["cuMemcpyDtoHAsync"] = 0
    with pytest.raises(DriverError):
        driver.unlike(handles, 0)
    assert (api.mapped, driver.num_held, api.contexts) == ({}, (3, 0, 0), 0)


class FakeNvml:
    """Lists these processes, as (process id, bytes), on the device of the fake above."""

    class NVMLError(Exception):
        pass

    def __init__(self, processes: list[tuple[int, int | None]], fails_at: str = "") -> None:
        self.processes = processes
        self.fails_at = fails_at
        self.num_open = 0

    def _call(self, name: str) -> None:
        if name == self.fails_at:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:  # noqa: N802
        self._call("init")
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:  # noqa: N802
        assert bus_id == "0000:1B:00.0"
        self._call("handle")
        return "device"

    def nvmlDeviceGetComputeRunningProcesses(self, device: str) -> list[SimpleNamespace]:  # noqa: N802
        assert device == "device"
        self._call("processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]


MIB = 1 << 20
PID = os.getpid()


@pytest.mark.parametrize(
    ("processes", "fails_at", "overhead_mib"),
    [
        ([(PID + 1, 9000 * MIB), (PID, 806 * MIB)], "", 800),  # less the three pages
        ([(PID, 6 * MIB)], "", 600 + 100),  # less than is ours for certain: another process
        ([(PID, None)], "", 600 + 100),
        ([(PID + 1, 806 * MIB)], "", 600 + 100),
        ([], "", 600 + 100),
        ([(PID, 806 * MIB)], "init", 600 + 100),
        ([(PID, 806 * MIB)], "handle", 600 + 100),
        ([(PID, 806 * MIB)], "processes", 600 + 100),
    ],
)
def test_overhead_is_what_is_not_pages(api, monkeypatch, processes, fails_at, overhead_mib):
    """100 MiB are torch's."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100 * MIB)
    nvml = FakeNvml(processes, fails_at)
    driver = CudaDriver(api=api, nvml=nvml)
    pages = driver.create(PAGE, 4)
    driver.release(pages[:1])
    for _ in range(2):
        assert driver.overhead_bytes() == overhead_mib * MIB
    driver.release(pages[1:])
    if fails_at == "" and overhead_mib == 800:
        assert driver.overhead_bytes() == 806 * MIB
    driver.close()
    assert nvml.num_open == 0


def test_overhead_follows_torch_where_the_library_is_not_asked(api, monkeypatch):
    reserved = [100 * MIB]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved[0])
    nvml = FakeNvml([(PID, 700 * MIB)])
    driver = CudaDriver(api=api, nvml=nvml)
    assert driver.overhead_bytes(asks_system=False) == 700 * MIB  # it was never asked before
    nvml.processes, reserved[0] = [(PID, 900 * MIB)], 130 * MIB
    assert driver.overhead_bytes(asks_system=False) == 730 * MIB
    assert driver.overhead_bytes() == 900 * MIB
    reserved[0] = 120 * MIB
    assert driver.overhead_bytes(asks_system=False) == 890 * MIB
    driver.close()


def test_close_gives_back_what_is_still_mapped(driver, api):
    address = driver.reserve(64 * PAGE)
    driver.map(address, driver.create(PAGE, 2))
    driver.map(address + 16 * PAGE, driver.create(16 * PAGE, 1))
    driver.close()
    driver.close()
    assert (api.sizes, api.mapped, api.contexts) == ({}, {}, 0)
    assert api.calls.count("cuCtxSynchronize") == 1
