"""What a rank on CPUs asks of its machine: cores of its own, and freed memory kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.host import share_of

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="cores and glibc")


@given(cores=st.sets(st.integers(0, 200), min_size=1, max_size=64), size=st.integers(1, 80))
def test_ranks_get_equal_numbers_of_cores_of_their_own_or_all_of_them(cores, size):
    cores = sorted(cores)
    shares = [share_of(cores, rank, size) for rank in range(size)]
    if len(cores) < size:
        assert shares == [cores] * size
    else:
        assert {len(share) for share in shares} == {len(cores) // size}
        assert len({core for share in shares for core in share}) == size * (len(cores) // size)


@linux
@pytest.mark.parametrize(("pin", "size"), [("auto", 1), ("auto", 2), ("auto", 1000), ("off", 2)])
def test_settle_pins_where_each_rank_can_have_a_core(pin, size):
    code = f"import os; from executor import settle; settle({size - 1}, {size}, pin={pin!r}); " + (
        "print(*sorted(os.sched_getaffinity(0)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    cores = sorted(os.sched_getaffinity(0))
    expected = share_of(cores, size - 1, size) if pin == "auto" else cores
    assert found.stdout.split() == [str(core) for core in expected]


@linux
def test_blocks_that_are_freed_are_not_faulted_in_again():
    """Blocks of 16 MiB, written and freed five times over; counted, too, where none is kept.

    What glibc keeps by itself depends on what lies at the heap's end, so there it is told.
    """
    code = """
import resource, sys
from executor.host import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
import torch
def turn():
    torch.ones(4 << 20).add_(1)
    torch.ones(4 << 20).add_(1)
    both = torch.ones(4 << 20), torch.ones(4 << 20), torch.ones(4 << 20)
for _ in range(10):  # until the heap is as large as it gets
    turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    unset = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    faults = {
        way: int(
            subprocess.run(
                [sys.executable, "-c", code, way],
                env={**unset, **told},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for way, told in [("keep", {}), ("give back", {"MALLOC_MMAP_THRESHOLD_": "131072"})]
    }
    assert faults["keep"] < 1000
    assert faults["give back"] > 10_000
