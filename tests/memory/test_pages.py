"""Page numbers: unique, ascending, and refused once their pages are released."""

from __future__ import annotations

from functools import partial

import pytest

from aquifer.errors import InvariantError
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pages import PageTable

PAGE = 4096


def test_numbers_of_pages_do_not_repeat_and_ascend():
    driver = HostDriver()
    table = PageTable(driver, 4096)
    first = table.create(PAGE, 3)
    table.release(first[:2])
    second = table.create(2 * PAGE, 4)
    assert first + second == sorted(set(first + second))
    assert table.numbers == [first[2], *second]
    assert (len(table), driver.resident_bytes()) == (1 + 4, PAGE + 4 * 2 * PAGE)
    for act in (table.release, partial(table.fill, byte=0)):
        with pytest.raises(InvariantError, match="does not exist"):
            act(first[:1])
    table.release(table.numbers)
    assert (len(table), driver.resident_bytes()) == (0, 0)
    driver.close()
