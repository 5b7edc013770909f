"""What is free: the figure of the machine, and the limits of control groups of both versions, in made-up folders."""

import pytest

from undertow import free_memory
from undertow.free_memory import find_free_memory

MIB = 1 << 20


def make_group(folder, limit, usage, cached, is_first):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_first else ("memory.max", "memory.current")
    for name, value in zip(names, (limit, usage), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"cache 7\n{'total_' if is_first else ''}inactive_file {cached}\n")


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Makes the groups that /proc/self/cgroup then names."""
    monkeypatch.setattr(free_memory, "CGROUPS", tmp_path)
    read = free_memory.Path.read_text

    def name_as(line):
        monkeypatch.setattr(
            free_memory.Path, "read_text", lambda self: line if str(self) == "/proc/self/cgroup" else read(self)
        )

    return tmp_path, name_as


def test_without_a_container_it_is_what_the_machine_has(groups):
    _, name_as = groups
    name_as("0::/\n")
    found = find_free_memory()
    assert found.where == "the machine" and 0 < found.free_bytes <= found.limit_bytes


@pytest.mark.parametrize("is_first", [True, False])
def test_the_smallest_room_of_all_groups_counts(groups, is_first):
    root, name_as = groups
    root = root / "memory" if is_first else root
    make_group(root / "outer", 80 * MIB, 50 * MIB, 0, is_first)
    make_group(root / "outer" / "inner", 60 * MIB, 40 * MIB, 15 * MIB, is_first)
    name_as("4:cpu:/x\n7:memory:/outer/inner\n" if is_first else "0::/outer/inner\n")
    found = find_free_memory()
    assert (found.where, found.free_bytes, found.limit_bytes) == ("the container", 30 * MIB, 80 * MIB)


@pytest.mark.parametrize(("is_first", "limit"), [(True, 9223372036854771712), (False, "max")])
def test_a_group_without_a_limit_does_not_count(groups, is_first, limit):
    root, name_as = groups
    make_group((root / "memory" if is_first else root) / "free", limit, 1, 0, is_first)
    name_as("7:memory:/free\n" if is_first else "0::/free\n")
    assert find_free_memory().where == "the machine"


def test_a_path_of_the_host_means_the_root(groups):
    root, name_as = groups
    make_group(root, 60 * MIB, 70 * MIB, 0, is_first=False)
    name_as("0::/docker/0123\n")
    found = find_free_memory()
    assert (found.free_bytes, found.limit_bytes) == (0, 60 * MIB)
