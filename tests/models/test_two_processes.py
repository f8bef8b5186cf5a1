"""Nets on two CPU processes that communicate by gloo."""
import pytest
import torch.multiprocessing as mp

from two_processes import work  # the processes can import this module too


@pytest.mark.slow
def test_on_two_processes(tmp_path):
    """One test runs all checks, because starting the processes takes most of the time."""
    mp.spawn(work, (tmp_path / 'store',), nprocs=2)
