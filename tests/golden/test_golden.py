"""What small runs compute, to the last bit: losses, norms, evaluations, checkpoints, and how many
collectives they call.

`one_rank.txt` and `two_ranks.txt` change only in a commit that says why: `make golden` writes them.
"""

import difflib
import os
import platform
from pathlib import Path

import pytest
import torch

from tests.distributed.launching import torchrun
from tests.golden.cases import write_data
from tests.image_models import make_image, make_model
from tests.run_files import write_lines

HERE = Path(__file__).parent
SAME_ON_ALL_CPUS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
"""torch, MKL and oneDNN choose kernels by the CPU's instructions, which add in another order."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Folder with the data of all cases but the one with images."""
    folder = tmp_path_factory.mktemp("golden")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def folder(texts):
    """Folder with the data of all cases."""
    folder = texts
    make_model(folder / "pictures", "qwen2_5_vl")
    for number in range(4):
        make_image(folder / f"{number}.png", seed=number)
    question = {"role": "user", "content": "<image>What is it?"}
    answers = ("red", "green", "blue", "grey")
    rows = [
        {
            "messages": [question, {"role": "assistant", "content": answers[number % 4]}],
            "images": [f"{number % 4}.png"],
        }
        for number in range(40)
    ]
    write_lines(folder / "pictures.jsonl", rows)
    return folder


ON_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="recorded on x86-64")
FIVE = (
    "llama ddp",
    "llama fsdp, bf16",
    "instruct fsdp",
    "dpo fsdp",
    "qwen3_moe fsdp, bf16, router",
)
"""Cases that `make check` trains: twenty steps."""


def trained(folder, ranks, *cases):
    """What the cases compute; all by default."""
    assert torch.__version__.startswith("2.13.0"), "recorded with torch 2.13.0"
    worker = str(HERE / "worker.py")
    torchrun(worker, str(folder), *cases, ranks=ranks, timeout=150, **SAME_ON_ALL_CPUS).check()
    return (folder / "golden.txt").read_text()


@ON_X86
def test_five_runs_compute_what_is_recorded(texts):
    found = trained(texts, 1, *FIVE)
    recorded = (HERE / "one_rank.txt").read_text()
    assert len(found.splitlines()) > len(FIVE)
    assert [line for line in found.splitlines() if line not in recorded.splitlines()] == []


@ON_X86
@pytest.mark.slow
@pytest.mark.parametrize(("file", "ranks"), [("one_rank.txt", 1), ("two_ranks.txt", 2)])
def test_runs_compute_what_is_recorded(folder, file, ranks):
    found = trained(folder, ranks)
    if os.environ.get("GOLDEN") == "write":
        (HERE / file).write_text(found)
    recorded = (HERE / file).read_text()
    changes = difflib.unified_diff(recorded.splitlines(), found.splitlines(), n=2, lineterm="")
    assert found == recorded, "\n".join(changes)
