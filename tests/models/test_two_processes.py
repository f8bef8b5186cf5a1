"""Nets on two processes that talk by gloo, on a CPU."""
import pytest
import torch.multiprocessing as mp

from two_processes import work  # a module that the processes can import, too


@pytest.mark.slow
def test_on_two_processes(tmp_path):
    """All that is checked of all nets: it takes longer to start the processes than to check one."""
    mp.spawn(work, (tmp_path / 'store',), nprocs=2)
