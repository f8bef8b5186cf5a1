"""Nets sharded over two processes by FSDP2, with gloo on a CPU."""
import pytest
import torch.multiprocessing as mp

from two_processes import work  # a module that both processes can import


@pytest.mark.slow
def test_on_two_processes(tmp_path):
    mp.spawn(work, (tmp_path / 'store',), nprocs=2)
