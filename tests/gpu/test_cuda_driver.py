"""The CUDA driver on a real GPU, and every fact about it that the implementation relies on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from aquifer.errors import DriverError
from aquifer.memory.driver import open_driver
from aquifer.memory.driver.cuda import CudaDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.stock import PageStocker
from aquifer.weights.parameters import Parameter
from aquifer.weights.store import WeightStore

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
PAGE, LARGE = 2 * MIB, 32 * MIB
A, B = Owner("a", Kind.KV), Owner("b", Kind.KV)
SLEEP_CYCLES = 500_000_000  # about a quarter of a second


def _occupy() -> None:
    """Keep the current stream busy for a while."""
    torch.cuda._sleep(SLEEP_CYCLES)


def _settled_free_bytes(driver: CudaDriver, at_least: int) -> int:
    """Free memory, once it has come back: the system may take a moment."""
    deadline_s = time.monotonic() + 5
    while (free_bytes := driver.available_bytes()) < at_least and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return free_bytes


# --- mapping -------------------------------------------------------------------------------


def test_sizes(driver):
    assert driver.granularity_bytes == PAGE
    assert (driver.default_page_bytes, driver.large_page_bytes) == (PAGE, LARGE)
    assert (driver.device, driver.max_mappings) == (torch.device("cuda", 0), None)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    assert 0 < driver.available_bytes() <= total_bytes
    assert abs(driver.available_bytes() - free_bytes) < 256 * MIB


def test_one_page_at_two_addresses(driver):
    address = driver.reserve(8 * PAGE)
    tensor = driver.view(address, 8 * PAGE)
    pages = driver.create(PAGE, 2)
    driver.map(address, pages)
    driver.map(address + 4 * PAGE, pages[:1])
    tensor[:PAGE] = 7
    tensor[PAGE : 2 * PAGE] = 8
    tensor[4 * PAGE] = 9
    assert tensor[0] == 9
    assert (tensor[1:PAGE] == 7).all()
    assert (tensor[4 * PAGE + 1 : 5 * PAGE] == 7).all()
    assert (tensor[PAGE : 2 * PAGE] == 8).all()
    torch.cuda.synchronize()
    driver.unmap(address, PAGE, 2)
    assert (tensor[4 * PAGE + 1 : 5 * PAGE] == 7).all()
    torch.cuda.synchronize()
    driver.unmap(address + 4 * PAGE, PAGE, 1)
    driver.release(pages)
    driver.free(address, 8 * PAGE)


def test_a_tensor_over_terabytes_of_nothing(driver):
    """It is made before anything is mapped, and sees pages that are mapped later at any place."""
    address = driver.reserve(4 * TIB)
    tensor = driver.view(address, 4 * TIB)
    assert (tensor.shape, tensor.dtype, tensor.device) == ((4 * TIB,), torch.uint8, driver.device)
    assert tensor.data_ptr() == address
    far = 3 * TIB + 5 * PAGE
    driver.map(address + far, driver.create(PAGE, 1))
    # [rows, 8] in bfloat16 with a row stride of 1024: what a layer's keys look like.
    rows = tensor.view(torch.bfloat16).as_strided((1024, 8), (1024, 1), far // 2)
    rows.copy_(torch.arange(8192, device="cuda").view(1024, 8) % 256)
    expected = torch.arange(8192).view(1024, 8) % 256
    assert torch.equal(rows.cpu(), expected.bfloat16())
    torch.testing.assert_close(
        rows.float() @ torch.ones(8, 1, device="cuda"), expected.sum(1, True).float().cuda()
    )


def test_any_part_is_unmapped_by_one_call(driver):
    address = driver.reserve(8 * PAGE)
    tensor = driver.view(address, 8 * PAGE).view(8, PAGE)
    pages = driver.create(PAGE, 8)
    driver.map(address, pages)
    tensor.copy_(torch.arange(8, device="cuda").to(torch.uint8)[:, None])
    torch.cuda.synchronize()
    driver.unmap(address + 2 * PAGE, PAGE, 3)
    driver.map(address + 2 * PAGE, [pages[4], pages[3], pages[2]])
    assert tensor[:, 0].tolist() == [0, 1, 4, 3, 2, 5, 6, 7]
    torch.cuda.synchronize()
    driver.unmap(address, PAGE, 8)
    driver.map(address, pages[::-1])
    assert tensor[:, -1].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


def test_map_all_or_none(driver):
    address = driver.reserve(2 * PAGE)
    pages = driver.create(PAGE, 3)
    with pytest.raises(DriverError, match=r"^CUDA_ERROR_\w+: could not map 3 pages"):
        driver.map(address, pages)  # the third lies beyond the reservation
    driver.map(address, pages[:2])
    assert not driver.view(address, 2 * PAGE).any()


def test_create_all_or_none(driver):
    _, total_bytes = torch.cuda.mem_get_info()
    before = driver.available_bytes()
    with pytest.raises(DriverError, match=r"^CUDA_ERROR_OUT_OF_MEMORY: could not create"):
        driver.create(64 * MIB, total_bytes // (64 * MIB) + 1)
    assert _settled_free_bytes(driver, before - 8 * MIB) >= before - 8 * MIB
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.create(PAGE + 4096, 1)


# --- what is not pages ---------------------------------------------------------------------

SLACK = 16 * MIB  # the system rounds, and a page of tables may come with a page of memory


def test_total(driver):
    assert driver.total_bytes() == torch.cuda.mem_get_info()[1]
    assert driver.product == torch.cuda.get_device_name()
    assert int(driver.cuda_version.split(".")[0]) >= 12


def test_overhead_is_this_process_s_own(driver):
    """Pages are not in it, torch's memory is, and another process makes no difference."""
    torch.ones(1, device="cuda").sum().item()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    first = driver.overhead_bytes()
    pages = driver.create(PAGE, 512) + driver.create(LARGE, 16)
    assert abs(driver.overhead_bytes() - first) < SLACK
    torchs = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    assert abs(driver.overhead_bytes() - first - GIB) < SLACK
    with subprocess.Popen(
        [sys.executable, "-c", _HOG],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as hog:
        assert hog.stdin is not None
        assert hog.stdout is not None
        assert hog.stdout.readline() == "taken\n"
        assert abs(driver.overhead_bytes() - first - GIB) < SLACK
        hog.stdin.close()
    del torchs
    torch.cuda.empty_cache()
    driver.release(pages)
    deadline_s = time.monotonic() + 5
    while abs(driver.overhead_bytes() - first) >= SLACK and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert abs(driver.overhead_bytes() - first) < SLACK


_HOG = """
import sys, torch
taken = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").fill_(1)
torch.cuda.synchronize()
print("taken", flush=True)
sys.stdin.read()
"""


def test_overhead_has_captured_graphs_in_it(driver):
    """Their private pools are torch's memory, which both ways of measuring include."""
    matrix = torch.ones(1024, 1024, device="cuda")
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    before = driver.overhead_bytes()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    after = driver.overhead_bytes()
    assert after - before >= 512 * MIB
    assert after >= torch.cuda.memory_reserved()
    del held, graph


# --- contents ------------------------------------------------------------------------------


def test_new_pages_are_zero_wherever_this_process_wrote(driver):
    """Nine tenths of all free memory are written, given back, and taken again."""
    count = driver.available_bytes() * 9 // 10 // (64 * MIB)
    num_bytes = count * 64 * MIB
    address = driver.reserve(num_bytes)
    tensor = driver.view(address, num_bytes)
    for round_ in range(2):
        pages = driver.create(64 * MIB, count)
        driver.map(address, pages)
        for part in tensor.split(4 * GIB):
            assert not part.view(torch.int64).any(), f"round {round_}"
            part.fill_(0xA5)
        torch.cuda.synchronize()
        driver.unmap(address, 64 * MIB, count)
        driver.release(pages)
    small = driver.create(PAGE, 2048)
    driver.map(address, small)
    assert not tensor[: 2048 * PAGE].view(torch.int64).any()


@pytest.mark.parametrize("page_bytes", [PAGE, LARGE])
def test_fill(driver, page_bytes):
    """Mapped and unmapped pages alike, no others, and without waiting for kernels."""
    address = driver.reserve(4 * page_bytes)
    tensor = driver.view(address, 4 * page_bytes).view(4, page_bytes)
    pages = driver.create(page_bytes, 4)
    driver.map(address, pages)
    tensor.fill_(0xA5)
    torch.cuda.synchronize()
    driver.unmap(address + page_bytes, page_bytes, 1)
    driver.fill(driver.create(page_bytes, 1), 0)  # loads what the device needs for it
    _occupy()
    fence = driver.fence()
    driver.fill([pages[1], pages[3]], 0)
    assert not fence.passed(), "zeroing waited for the kernels of another stream"
    driver.map(address + page_bytes, pages[1:2])
    assert tensor.amin(1).tolist() == tensor.amax(1).tolist() == [0xA5, 0, 0xA5, 0]
    assert driver.unlike(pages, 0) == [pages[0], pages[2]]
    tensor[3, -1] = 1
    torch.cuda.synchronize()
    assert driver.unlike(pages[::-1], 0) == [pages[3], pages[2], pages[0]]


def test_a_graph_replays_after_a_page_was_replaced(driver):
    address = driver.reserve(4 * PAGE)
    tensor = driver.view(address, 4 * PAGE).view(torch.float32).view(4, -1)
    pages = driver.create(PAGE, 2)
    driver.map(address, pages[:1])
    driver.map(address + 2 * PAGE, pages)  # where both can be written
    tensor[2], tensor[3] = 1, 2
    out = torch.zeros_like(tensor[0])
    torch.add(tensor[0], 10, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(tensor[0], 10, out=out)
    for page, expected in ((0, 11), (1, 12), (0, 11), (1, 12)):
        torch.cuda.synchronize()
        driver.unmap(address, PAGE, 1)
        driver.map(address, [pages[page]])
        graph.replay()
        assert (out == expected).all()


# --- work in flight ------------------------------------------------------------------------


def test_a_fence_passes_when_the_work_before_it_is_done(driver):
    _occupy()
    fence = driver.fence()
    assert not fence.passed()
    fence.wait()
    assert fence.passed()


def test_retired_pages_under_a_kernel(driver):
    """Work that was launched before the pages were given up may still write to all of them."""
    pool = PagePool(driver, 8 * PAGE)
    range_ = VirtualRange(pool.pages, 8 * PAGE, PAGE)
    pages = pool.acquire(A, 8)
    assert pages is not None
    range_.map(0, pages)
    tensor = range_.tensor((8, PAGE), torch.uint8)
    tensor.fill_(1)
    torch.cuda.synchronize()
    _occupy()
    tensor.fill_(2)
    pool.retired.retire(range_, range(8))
    assert not pool.retired.collect()
    assert pool.retired.reuse(range_, range(2)) == range(2)
    tensor[:2] += 1
    other = VirtualRange(pool.pages, 4 * PAGE, PAGE)
    others = pool.acquire(B, 4)  # waits: the pool is short
    assert others is not None
    other.map(0, others)
    assert not other.tensor((4, PAGE), torch.uint8).any()  # neither 1 nor 2
    assert (tensor[:2] == 3).all()
    assert range_.num_mapped_pages == 4
    pool.check()
    pool.retired.retire(range_, range(2))
    pool.retired.retire(other, range(4))
    pool.retired.settle()
    assert not pool.usage().in_use_bytes
    for each in (range_, other):
        each.close()
    pool.close()
    torch.cuda.synchronize()


def test_the_stocker_s_thread_makes_and_unmaps_pages_while_kernels_run(driver):
    # 64 pages are touched, and 8 have to be ready, a sixteenth of all: so that some of them are
    # unmapped again.
    pool = PagePool(driver, 128 * PAGE)
    others = pool.acquire(B, 64)
    assert others is not None
    stocker = PageStocker(pool, 32)
    stocker.start()
    range_ = VirtualRange(pool.pages, 64 * PAGE, PAGE)
    tensor = range_.tensor((64, PAGE), torch.uint8)
    for step in range(200):
        first = step % 8 * 8
        taken = pool.retired.reuse(range_, range(first, first + 8))
        pages = pool.acquire(A, 8 - len(taken))
        assert pages is not None
        range_.map(first + len(taken), pages)  # what is left is the beginning
        stocker.wake()
        tensor[first : first + 8] = step % 256
        assert step % 50 or (tensor[first : first + 8] == step % 256).all()
        pool.retired.retire(range_, range(first, first + 8))
    deadline_s = time.monotonic() + 10
    while pool.ready_bytes < 8 * PAGE and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert pool.ready_bytes >= 8 * PAGE
    assert range_.num_mapped_pages == len(pool.retired) <= 56
    assert pool.usage().in_use_bytes == {B: 64 * PAGE}
    pool.release(others)
    pool.check()
    pool.retired.settle()
    assert range_.num_mapped_pages == 0
    stocker.close()
    range_.close()
    pool.close()
    torch.cuda.synchronize()


def test_any_thread_may_call(driver):
    """A thread without a CUDA context calls while this one computes."""
    address = driver.reserve(64 * PAGE)
    tensor = driver.view(address, 64 * PAGE).view(64, PAGE)
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for _ in range(10):
                pages = driver.create(PAGE, 16)
                driver.fill(pages, 0)
                driver.map(address + first * PAGE, pages)
                tensor[first : first + 16] = first
                driver.fence().wait()
                assert (tensor[first : first + 16] == first).all()
                torch.cuda.synchronize()
                driver.unmap(address + first * PAGE, PAGE, 16)
                driver.release(pages)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 16, 32, 48)]
    for thread in threads:
        thread.start()
    busy = torch.randn(2048, 2048, device="cuda")
    for _ in range(200):
        busy = torch.nn.functional.normalize(busy @ busy)
    for thread in threads:
        thread.join()
    assert not errors
    assert busy.isfinite().all()
    assert torch.cuda.current_device() == 0


# --- the pool ------------------------------------------------------------------------------


def test_two_page_sizes_under_one_budget(driver):
    """Pages of either size can be acquired, at the cost of idle pages of the other."""
    budget_bytes = 256 * MIB
    pool = PagePool(driver, budget_bytes, keep_idle_bytes=budget_bytes)
    before = driver.available_bytes()
    large = pool.acquire(A, 4, LARGE)
    small = pool.acquire(A, 64)
    assert large is not None
    assert small is not None
    assert pool.usage().free_bytes == 0
    assert pool.acquire(B, 1) is None
    for _ in range(3):
        pool.release(large)
        more = pool.acquire(B, 64)  # four large pages become sixty-four small ones
        assert more is not None
        assert pool.acquire(B, 1) is None
        pool.check()
        assert before - driver.available_bytes() < budget_bytes + 64 * MIB
        pool.release(more)
        large = pool.acquire(A, 4, LARGE)
        assert large is not None
        pool.check()
    pool.release(small + large)
    assert pool.usage().idle_bytes == budget_bytes
    pool.close()
    assert _settled_free_bytes(driver, before - 8 * MIB) >= before - 8 * MIB


def test_weights_in_large_pages(driver):
    sizes = [50 * MIB, 224 * MIB, 33 * MIB, 3 * MIB, 8192]
    parameters = [Parameter(str(n), (n,), torch.uint8, ()) for n in sizes]
    pool = PagePool(driver, 512 * MIB)
    store = WeightStore(pool, Owner("a", Kind.WEIGHTS), parameters)
    assert store.populate()
    counts = {16: 9, 9: 1, 2: 1, 1: 2}  # pages of so many ordinary ones
    assert len(pool.pages) == sum(counts.values())
    assert pool.created_bytes == sum(size * count for size, count in counts.items()) * PAGE
    for value, tensor in enumerate(store.tensors.values()):
        tensor.fill_(value + 1)
    for value, tensor in enumerate(store.tensors.values()):
        assert (tensor == value + 1).all()
    store.close()
    pool.close()


def test_nothing_leaks(driver):
    def cycle() -> None:
        address = driver.reserve(TIB)
        tensor = driver.view(address, TIB)
        for page_bytes in (PAGE, LARGE):
            pages = driver.create(page_bytes, 16)
            driver.map(address, pages)
            driver.map(address + 512 * MIB, pages[:4])
            driver.fill(pages, 0)
            tensor[: 16 * page_bytes] = 1
            driver.fence().wait()
            driver.unmap(address, page_bytes, 16)
            driver.unmap(address + 512 * MIB, page_bytes, 4)
            driver.release(pages)
        driver.free(address, TIB)

    cycle()  # loads kernels, which take memory too
    torch.cuda.synchronize()
    before = driver.available_bytes()
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        cycle()
    torch.cuda.synchronize()
    assert _settled_free_bytes(driver, before - MIB) >= before - MIB
    assert len(os.listdir("/proc/self/fd")) == num_fds


def test_drivers_come_and_go():
    for _ in range(3):
        driver = open_driver("cuda")
        address = driver.reserve(PAGE)
        driver.map(address, driver.create(PAGE, 1))
        assert not driver.view(address, PAGE).any()
        driver.close()
    with pytest.raises(DriverError, match="there is no cuda:99"):
        open_driver("cuda:99")
    assert torch.ones(3, device="cuda").sum() == 3
