"""The Slurm cluster for all tests. Without Slurm, the tests are skipped with the reason."""

import os
import shutil
import tempfile

import pytest

from tests.slurm.cluster import Cluster, unavailable


@pytest.fixture(scope="session")
def cluster():
    why = unavailable()
    if why is not None:
        message = f"the Slurm tests cannot run: {why}"
        assert os.environ.get("CI_REQUIRES_SLURM") != "1", message
        pytest.skip(message)
    # munge needs a folder that every user may enter; pytest's are private
    folder = tempfile.mkdtemp(prefix="slurm-")
    try:
        with Cluster(folder, nodes=8, gpus=2) as cluster:
            assert (
                f"proctrack/{cluster.proctrack}" in cluster.run("scontrol", "show", "config").stdout
            )
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)
