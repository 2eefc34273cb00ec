"""CPUs that a process may use, from files of control groups; how long threads wait in a loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from aquifer.cpus import cpu_quota, limit_spinning, usable_cpus, whole_cpus


class Groups:
    """A folder with the files of control groups, and the file that names a process's groups."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.membership = folder / "membership"
        self.root.mkdir()

    def write(self, path: str, content: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")

    def write_v1(self, folder: str, quota_us: int, period_us: int = 100_000) -> None:
        self.write(f"{folder}/cpu.cfs_quota_us", str(quota_us))
        self.write(f"{folder}/cpu.cfs_period_us", str(period_us))

    def quota(self, *lines: str) -> float | None:
        """The quota of a process with these lines in its membership file."""
        self.membership.write_text("".join(f"{line}\n" for line in lines))
        return cpu_quota(self.root, self.membership)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


# --- version 2 -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "quota"),
    [("250000 100000", 2.5), ("20000 100000", 0.2), ("400000 50000", 8.0), ("max 100000", None)],
)
def test_quota_of_version_2(groups: Groups, content: str, quota: float | None) -> None:
    groups.write("app/cpu.max", content)
    assert groups.quota("0::/app") == quota


def test_the_least_quota_of_all_groups_above_counts(groups: Groups) -> None:
    groups.write("pod/app/worker/cpu.max", "max 100000")
    groups.write("pod/app/cpu.max", "600000 100000")
    groups.write("pod/cpu.max", "300000 100000")
    groups.write("other/cpu.max", "100000 100000")
    assert groups.quota("0::/pod/app/worker") == 3
    assert groups.quota("0::/pod/app") == 3
    assert groups.quota("0::/other") == 1


def test_the_container_is_the_root_of_its_mount(groups: Groups) -> None:
    groups.write("cpu.max", "150000 100000")
    assert groups.quota("0::/") == 1.5
    assert groups.quota("0::/docker/4f1c") == 1.5  # the path as the host sees it


def test_files_outside_of_the_mount_are_not_read(groups: Groups) -> None:
    groups.write("../cpu.max", "100000 100000")
    groups.write("app/cpu.max", "200000 100000")
    assert groups.quota("0::/app") == 2


# --- version 1 -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota_us", "period_us", "quota"),
    [(150_000, 100_000, 1.5), (25_000, 50_000, 0.5), (-1, 1, None)],
)
def test_quota_of_version_1(
    groups: Groups, quota_us: int, period_us: int, quota: float | None
) -> None:
    groups.write_v1("cpu/app", quota_us, period_us)
    assert groups.quota("3:memory:/app", "2:cpu:/app") == quota


def test_controllers_mounted_together(groups: Groups) -> None:
    groups.write_v1("cpu,cpuacct/app", 300_000)
    groups.write_v1("cpuacct/app", 100_000)
    assert groups.quota("5:cpuacct:/app") is None
    assert groups.quota("5:cpu,cpuacct:/app") == 3


def test_a_container_with_the_hosts_path(groups: Groups) -> None:
    groups.write_v1("cpu", 400_000)
    assert groups.quota("2:cpu:/docker/4f1c") == 4


def test_both_versions_side_by_side(groups: Groups) -> None:
    groups.write_v1("cpu/app", 400_000)
    groups.write_v1("cpu", -1)
    groups.write("unified/app/cpu.max", "100000 100000")  # has no controllers then
    assert groups.quota("2:cpu:/app", "1:name=systemd:/app", "0::/app") == 4


# --- neither ---------------------------------------------------------------------------------


def test_nothing_to_read(groups: Groups, tmp_path: Path) -> None:
    assert groups.quota("2:cpu:/app", "0::/app") is None
    assert groups.quota() is None
    assert cpu_quota(groups.root, tmp_path / "missing") is None


@pytest.mark.parametrize("content", ["", "max", "100000", "100000 0"])
def test_files_without_a_quota(groups: Groups, content: str) -> None:
    groups.write("app/cpu.max", content)
    assert groups.quota("0::/app") is None


@pytest.mark.parametrize(
    ("num_allowed", "quota", "num_cpus"),
    [(8, None, 8), (8, 4.0, 4), (8, 2.9, 2), (8, 0.3, 1), (2, 16.0, 2), (1, None, 1)],
)
def test_whole_cpus(num_allowed: int, quota: float | None, num_cpus: int) -> None:
    assert whole_cpus(num_allowed, quota) == num_cpus


def test_cpus_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert usable_cpus() == 1


@pytest.mark.parametrize(
    "environment",
    [{"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "PASSIVE"}],
)
def test_what_the_user_says_about_waiting_is_left_alone(environment: dict[str, str]) -> None:
    before = dict(environment)
    limit_spinning(environment)
    assert environment == before


def test_waiting_threads_sleep_soon() -> None:
    environment = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": ""}
    limit_spinning(environment)
    assert 0 < int(environment.pop("GOMP_SPINCOUNT")) < 300_000  # the default is 300 000
    assert environment == {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": ""}
