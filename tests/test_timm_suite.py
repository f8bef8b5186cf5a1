"""timm's tests/test_models.py on one net of each family. TIMM_TESTS names the folder of timm's source distribution."""
import os
import subprocess
import sys

import pytest

FAMILIES = (
    'sa_quadratic_tiny', 'sa_quadratic_gen_pruned', 'sa_learned_tiny', 'sa_learned_content_tiny',
    'sa_learned_content_hier_tiny', 'resnet_tiny', 'san_pairwise_cifar', 'san_patchwise_hier', 'resvit_hier_tiny')


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_timm_accepts_a_net_of_each_family(timm_tests):
    command = [
        sys.executable, '-m', 'pytest', '-q', '-p', 'timm_selfconv', '-p', 'no:cacheprovider',
        'tests/test_models.py', '-k', ' or '.join(FAMILIES)]
    environment = {k: v for k, v in os.environ.items() if k != 'GITHUB_ACTIONS'}  # which would skip some tests
    done = subprocess.run(command, cwd=timm_tests, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    assert int(done.stdout.rsplit(' passed', 1)[0].rsplit(None, 1)[-1]) >= 7 * len(FAMILIES), done.stdout[-2000:]
