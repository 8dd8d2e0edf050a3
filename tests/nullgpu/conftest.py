from functools import partial
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.nullgpu import devices


def pytest_collection_modifyitems(items):
    """Skips the tests without PyTorch's CUDA build. `make test-cuda` installs it."""
    if not devices.cuda_build():
        skip = pytest.mark.skip(reason="this PyTorch is not a CUDA build; run make test-cuda")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@pytest.fixture
def null_gpus(tmp_path):
    """Returns a function (count=8, gib=79.6, capability=80) that creates a `devices.NullGpus`."""
    return partial(devices.null_gpus, tmp_path, build_folder=REPOSITORY / "build/nullgpu")
