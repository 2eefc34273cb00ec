"""The host driver: its pages are real memory, and its refusals leave no trace."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from aquifer.errors import ConfigError, DriverError, InvariantError
from aquifer.memory import proc
from aquifer.memory.driver import host, open_driver
from aquifer.memory.driver.base import Handle
from aquifer.memory.driver.host import HostDriver

PAGE = 64 * 1024


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver()
    yield driver
    driver.close()


def test_open_by_name():
    driver = open_driver("cpu")
    assert isinstance(driver, HostDriver)
    assert driver.device == torch.device("cpu")
    assert driver.default_page_bytes % driver.granularity_bytes == 0
    driver.close()
    with pytest.raises(ConfigError, match="'tpu'"):
        open_driver("tpu")


def test_new_pages_are_zero_and_hold_what_is_written(driver):
    address = driver.reserve(4 * PAGE)
    handles = driver.create(PAGE, 4)
    driver.map(address, handles)
    view = driver.view(address, 4 * PAGE)
    assert not view.any()
    view.copy_(torch.arange(4 * PAGE) % 251)
    driver.unmap(address, PAGE, 4)
    driver.map(address, handles[::-1])
    expected = (torch.arange(4 * PAGE) % 251).view(4, PAGE).flip(0).flatten()
    assert torch.equal(view, expected.to(torch.uint8))
    driver.unmap(address, PAGE, 4)


def test_alias(driver):
    """One page at three addresses, two of them in one range."""
    [page, other] = driver.create(PAGE, 2)
    one, two = driver.reserve(3 * PAGE), driver.reserve(PAGE)
    driver.map(one, [page, other, page])
    driver.map(two, [page])
    resident_bytes = driver.resident_bytes()
    driver.view(two, PAGE).fill_(7)
    view = driver.view(one, 3 * PAGE).view(3, PAGE)
    assert view[:, 0].tolist() == view[:, -1].tolist() == [7, 0, 7]
    view[2].fill_(9)
    assert driver.view(two, PAGE)[5] == 9
    driver.unmap(two, PAGE, 1)
    assert view[0, 5] == 9
    assert driver.resident_bytes() == resident_bytes == 2 * PAGE


def test_unmapped_addresses_stay_reserved(driver):
    address = driver.reserve(4 * PAGE)
    assert _permissions(address) == "---p"
    assert not _is_readable(address)
    handles = driver.create(PAGE, 3)
    driver.map(address, handles)
    assert [_is_readable(address + i * PAGE) for i in range(4)] == [True, True, True, False]
    driver.unmap(address + PAGE, PAGE, 1)
    assert [_is_readable(address + i * PAGE) for i in range(4)] == [True, False, True, False]
    assert _permissions(address + PAGE) == "---p"
    driver.unmap(address, PAGE, 1)
    driver.unmap(address + 2 * PAGE, PAGE, 1)
    driver.free(address, 4 * PAGE)
    with pytest.raises(InvariantError, match="never reserved"):
        driver.free(address, 4 * PAGE)


def test_tensor_over_more_than_a_terabyte(driver):
    num_bytes = 3 << 40
    address = driver.reserve(num_bytes)
    view = driver.view(address, num_bytes).view(torch.float32)
    assert view.numel() == num_bytes // 4
    last = address + num_bytes - PAGE
    driver.map(last, driver.create(PAGE, 1))
    view[-3:] = torch.tensor([1.0, 2.0, 3.0])
    assert view[-4:].tolist() == [0, 1, 2, 3]
    assert view[-PAGE // 4 :].sum() == 6
    driver.unmap(last, PAGE, 1)
    driver.free(address, num_bytes)


def test_given_back_memory_leaves_the_process_and_the_system(driver):
    size, count = 1 << 20, 24
    address = driver.reserve(size * count)
    resident, shmem = driver.resident_bytes(), _shmem_bytes()
    handles = driver.create(size, count)
    assert driver.resident_bytes() == resident + size * count  # before they are touched
    driver.map(address, handles)
    driver.view(address, size * count).fill_(1)
    assert _shmem_bytes() - shmem >= size * count
    driver.unmap(address, size, count)
    assert _shmem_bytes() - shmem < size
    assert driver.resident_bytes() == resident + size * count
    driver.release(handles[::2])
    assert driver.resident_bytes() == resident + size * count // 2
    driver.release(handles[1::2])
    assert driver.resident_bytes() == resident
    again = driver.create(size, count)
    assert again == handles  # the same offsets, so the file does not grow
    driver.map(address, again)
    assert not driver.view(address, size * count).any()
    driver.unmap(address, size, count)
    driver.release(again)


def test_fill_reaches_mapped_and_unmapped_pages_and_no_others(driver):
    size = 3 << 20  # more than is written at a time
    handles = driver.create(size, 3)
    address = driver.reserve(3 * size)
    driver.map(address, handles)
    view = driver.view(address, 3 * size).view(3, size)
    view.fill_(5)
    driver.unmap(address, size, 1)
    shmem = _shmem_bytes()
    driver.fill([handles[2], handles[0]], 0)
    assert driver.unlike(handles, 0) == [handles[1]]
    assert _shmem_bytes() <= shmem + size // 4  # no mapping was needed
    driver.map(address, handles[:1])
    assert [row.unique().tolist() for row in view] == [[0], [5], [0]]
    driver.fill(handles[1:], 0xFF)
    assert [row.unique().tolist() for row in view] == [[0], [255], [255]]
    view[2, -1] = 254
    assert driver.unlike(handles, 0xFF) == [handles[0], handles[2]]
    view[2, -1] = 255
    assert driver.unlike(handles[1:], 0xFF) == []
    driver.unmap(address, size, 3)


def test_no_pages(driver):
    address = driver.reserve(PAGE)
    for act in (driver.release, partial(driver.fill, byte=0), partial(driver.map, address)):
        act([])
    assert driver.resident_bytes() == 0
    assert not _is_readable(address)


def test_pages_of_two_sizes(driver):
    small, large = driver.create(PAGE, 2), driver.create(3 * PAGE, 1)
    address = driver.reserve(5 * PAGE)
    driver.map(address, small[1:])
    driver.map(address + PAGE, large)
    driver.map(address + 4 * PAGE, small[:1])
    view = driver.view(address, 5 * PAGE)
    view.fill_(3)
    driver.fill(large, 0)
    driver.fill(small[1:], 0)
    assert view.view(5, PAGE)[:, 9].tolist() == [0, 0, 0, 0, 3]
    driver.unmap(address, PAGE, 5)
    driver.release([*small, *large])
    assert driver.resident_bytes() == 0
    assert driver.create(3 * PAGE, 1) == large
    assert sorted(driver.create(PAGE, 2)) == small


@pytest.mark.parametrize("page_bytes", [0, -4096, 1000, 4097, 6144])
def test_page_size_that_is_no_multiple(driver, page_bytes):
    with pytest.raises(DriverError, match=r"EINVAL: .*multiple of") as caught:
        driver.create(page_bytes, 1)
    assert caught.value.name == "EINVAL"
    assert driver.resident_bytes() == 0


@pytest.mark.parametrize(
    ("page_bytes", "count"), [(2**62, 2), (2**63 - 4096, 2), (2**64, 1), (2**40, 2**40)]
)
def test_absurd_sizes(driver, page_bytes, count):
    with pytest.raises(DriverError, match="EFBIG"):
        driver.create(page_bytes, count)
    _still_works(driver)


def test_a_refused_creation_leaves_no_trace(driver):
    """The system's own refusal half-way: some pages from holes, the others beyond the limit."""
    kept = driver.create(PAGE, 6)
    driver.release(kept[1:3])
    resident_bytes = driver.resident_bytes()
    with _file_size_limit(7 * PAGE), pytest.raises(DriverError, match=r"EFBIG.*5 pages"):
        driver.create(PAGE, 5)
    assert driver.resident_bytes() == resident_bytes
    with _file_size_limit(7 * PAGE):
        assert driver.create(PAGE, 3) == [*kept[1:3], kept[-1] + PAGE]
    assert driver.resident_bytes() == 7 * PAGE


class FullDriver(HostDriver):
    """Its system has memory for `num_good` stretches, or for all if that is None."""

    num_good: int | None = None

    def fallocate(self, mode: int, offset: int, length: int) -> None:
        if mode == 0 and self.num_good is not None:
            if not self.num_good:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.num_good -= 1
        super().fallocate(mode, offset, length)


def test_a_refused_fallocate_leaves_no_trace():
    driver = FullDriver()
    kept = driver.create(PAGE, 6)
    driver.release([kept[0], kept[3]])
    resident_bytes, file_bytes = driver.resident_bytes(), driver.file_bytes
    for num_good in range(3):
        driver.num_good = num_good
        with pytest.raises(DriverError, match="ENOSPC: could not create 4 pages"):
            driver.create(PAGE, 4)
        assert driver.resident_bytes() == resident_bytes
        assert driver.file_bytes == file_bytes
    driver.num_good = None
    assert driver.create(PAGE, 2) == [kept[0], kept[3]]
    _still_works(driver)
    driver.close()


def test_too_many_mappings(driver):
    """All or nothing even where the system's own limit on mappings is met."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 200_000:
        pytest.skip(f"vm.max_map_count is {limit}: it would take too long to get there")
    count, size = limit + 100, driver.granularity_bytes
    assert limit // 2 <= driver.max_mappings < limit
    pages = driver.create(size, 2)
    address = driver.reserve(count * size)
    before = _num_mappings()
    with pytest.raises(DriverError, match=r"ENOMEM: .*larger pages, or raise vm.max_map_count"):
        driver.map(address, pages[:1] * count)  # one page again and again: nothing to merge
    assert abs(_num_mappings() - before) < 50
    assert not _is_readable(address)
    assert not _is_readable(address + 1000 * size)
    driver.map(address, pages)
    assert not driver.view(address, 2 * size).any()
    driver.unmap(address, size, 2)
    driver.free(address, count * size)


def test_max_mappings_can_really_be_mapped(driver):
    if driver.max_mappings > 200_000:
        pytest.skip("it would take too long")
    count, size = driver.max_mappings, driver.granularity_bytes
    [page] = driver.create(size, 1)
    address = driver.reserve(count * size)
    driver.map(address, [page] * count)
    driver.view(address, count * size)[-1] = 1
    assert driver.view(address, count * size)[size - 1] == 1
    driver.unmap(address, size, count)
    assert not _is_readable(address)


def test_neighbours_take_one_mapping(driver):
    handles = driver.create(PAGE, 64)
    address = driver.reserve(64 * PAGE)
    before = _num_mappings()
    driver.map(address, handles)
    assert _num_mappings() - before <= 1
    driver.unmap(address, PAGE, 64)


def test_reservation_beyond_the_address_space(driver):
    with pytest.raises(DriverError, match="ENOMEM"):
        driver.reserve(1 << 60)
    _still_works(driver)


def test_release_of_what_is_not_there(driver):
    [page] = driver.create(PAGE, 1)
    driver.release([page])
    for handle in (page, Handle(12345)):
        with pytest.raises(InvariantError):
            driver.release([handle])
    assert driver.resident_bytes() == 0


def test_close_gives_everything_back():
    driver = HostDriver()
    mappings, shmem = _num_mappings(), _shmem_bytes()
    address = driver.reserve(1 << 40)
    driver.map(address, driver.create(1 << 20, 8))
    driver.view(address, 8 << 20).fill_(1)
    assert _shmem_bytes() - shmem >= 8 << 20
    driver.close()
    assert _shmem_bytes() - shmem < 1 << 20
    assert _num_mappings() <= mappings + 1
    driver.close()


def test_available_bytes(driver, monkeypatch):
    """The machine's memory, or what the control group leaves if that is less: even nothing."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total_bytes = int(fields["MemTotal"].split()[0]) * 1024
    assert 0 < driver.available_bytes() <= total_bytes
    for room, expected in [(0, 0), (5 << 20, 5 << 20)]:
        monkeypatch.setattr(proc, "cgroup_room_bytes", lambda room=room: room)
        assert driver.available_bytes() == expected


def _still_works(driver: HostDriver) -> None:
    before = driver.resident_bytes()
    address = driver.reserve(2 * PAGE)
    handles = driver.create(PAGE, 2)
    driver.map(address, handles)
    view = driver.view(address, 2 * PAGE)
    assert not view.any()
    view.fill_(1)
    driver.unmap(address, PAGE, 2)
    driver.release(handles)
    driver.free(address, 2 * PAGE)
    assert driver.resident_bytes() == before


@contextmanager
def _file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _is_readable(address: int) -> bool:
    """Whether the byte there can be read; asked of the system, so that nothing faults."""
    read_end, write_end = os.pipe()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.write(write_end, ctypes.c_void_p(address), ctypes.c_size_t(1)) == 1:
            return True
        assert ctypes.get_errno() == errno.EFAULT
        return False
    finally:
        os.close(read_end)
        os.close(write_end)


def _permissions(address: int) -> str | None:
    """Permissions of the mapping that holds an address; None if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions = line.split()[:2]
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            return permissions
    return None


def _num_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def _shmem_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["RssShmem"].split()[0]) * 1024


def test_all_memory_is_the_machine_s_or_the_control_group_s(driver, monkeypatch):
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    machine_bytes = int(fields["MemTotal"].split()[0]) * 1024
    for limit_bytes, total_bytes in ((None, machine_bytes), (1 << 20, 1 << 20)):
        monkeypatch.setattr(host, "cgroup_limit_bytes", lambda limit=limit_bytes: limit)
        assert driver.total_bytes() == total_bytes
    assert driver.overhead_bytes() == 0


def test_pages_of_another_process(driver):
    """They are the same bytes, and stay where they are when they are released here."""
    lender = HostDriver()
    handles = lender.create(PAGE, 5)
    own = lender.reserve(5 * PAGE)
    lender.map(own, handles)
    expected = torch.arange(5 * PAGE).to(torch.uint8)
    lender.view(own, 5 * PAGE).copy_(expected)
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        exported = lender.export(handles)
        adopted = [driver.adopt(exported) for _ in range(2)]
        assert adopted[0] == adopted[1]
        for file in exported.files:
            os.close(file)
        address = driver.reserve(5 * PAGE)
        driver.map(address, [*adopted[0][3:], *adopted[0][:3]])
        view = driver.view(address, 5 * PAGE)
        assert torch.equal(view, expected.roll(2 * PAGE))
        lender.view(own, 5 * PAGE)[0] = 7
        assert view[2 * PAGE] == 7
        lender.view(own, 5 * PAGE)[0] = 0
        driver.unmap(address, PAGE, 5)
        driver.free(address, 5 * PAGE)
        for each in adopted:
            driver.release(each)
        with pytest.raises(InvariantError, match="released twice"):
            driver.release(adopted[0])
        assert len(os.listdir("/proc/self/fd")) == num_open
    assert torch.equal(lender.view(own, 5 * PAGE), expected)
    assert driver.resident_bytes() == 0
    lender.close()
