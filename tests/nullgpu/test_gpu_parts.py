"""The parts of `make gpu-first` and `make test-gpu` on null GPUs, with small models: what a GPU would
run is not broken.

Null GPUs compute no values, so that the tests of tests/gpu do not compare any here.
"""

import json
import os
import sys

import gpu_rows
import pytest

from tests import REPOSITORY
from tests.distributed.launching import run

NVIDIA_SMI = """\
#!/bin/sh
# Answers the queries of tests and benchmarks for one null GPU
case "$1" in
    --query-compute-apps=*)
        for log in "$NULLGPU_LOG"/*; do
            # Another process may have got the number of one that has ended
            if grep -qs "$NULLGPU_LOG" "/proc/${log##*.}/environ" && grep -q " context 0$" "$log"; then
                echo "GPU-00000000-0000-0000-0000-000000000000, ${log##*.}"
            fi
        done ;;
    --query-gpu=name) echo "$NULLGPU_NAME" ;;
    --query-gpu=driver_version) echo 580.00 ;;
    *) exit 9 ;;
esac
"""


@pytest.fixture
def parts(null_gpus, tmp_path):
    """Returns a function that runs parts on one GPU, and returns what gpu.json has of each.

    It asserts that each of them has the status.
    """
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(NVIDIA_SMI)
    (programs / "nvidia-smi").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    gpus = null_gpus(count=1, capability=90)  # the plan counts its cuBLAS workspaces

    def run_parts(*names, folder=tmp_path / "results", timeout=240, status="passed"):
        options = ["--quick", "--limit", 2 * timeout, "--results", folder, "--parts"]
        words = [REPOSITORY / "benchmarks/gpu.py", *options]
        done = run([sys.executable, *words, *names], timeout=timeout, **gpus.variables, PATH=path)
        found = json.loads((folder / "gpu.json").read_text())["parts"]
        ended = {name: found[name]["status"] for name in names}
        assert ended == dict.fromkeys(names, status), done.output[-8000:]
        done.check(0 if status == "passed" else 1)
        return found

    return run_parts


def rows(found, part):
    return [row for command in found[part]["commands"] for row in command["figures"]]


@pytest.mark.long
def test_results_of_several_calls_are_merged(parts, tmp_path):
    """A later call adds to the files of an earlier one."""
    found = parts("kernels", "steps")
    compared = [row for row in rows(found, "kernels") if row["error"]]
    assert {row["holds"] for row in compared} == {"no values"}
    assert not [row["what"] for row in rows(found, "kernels") if row["what"].endswith("failed")]
    trained = rows(found, "steps")
    eager = [row.name for row in gpu_rows.GROUPS["steps"] if gpu_rows.EAGER in row.overrides]
    assert [row["row"] for row in trained] == eager
    assert {row["retries"] for row in trained} == {"0"}
    # Offload waits for the copies of gradients, and reads the number of targets
    assert {row["waits"] for row in trained if "offload" not in row["row"]} == {"none"}
    found = parts("memory", "widths")
    assert list(found) == ["kernels", "steps", "memory", "widths"]
    assert [row["row"] for row in rows(found, "memory")] == [
        row.name for row in gpu_rows.GROUPS["memory"]
    ]
    assert all(float(row["GiB"]) > 0 for part in ("memory", "widths") for row in rows(found, part))
    files = sorted(file.name for file in (tmp_path / "results").iterdir())
    assert files == ["gpu.json", "gpu.md", "logs"]
    assert "## memory: memory" in (tmp_path / "results/gpu.md").read_text()


@pytest.mark.long
def test_doctor_measures(parts):
    """Null GPUs add no numbers, which is the only finding against them."""
    found = rows(parts("doctor", status="doctor: failed with status 3"), "doctor")
    bad = [row for row in found if row["found"].startswith("bad")]
    assert bad == [{"what": "all-reduce", "found": "bad: gives a wrong sum"}]
    assert {row["what"] for row in found} >= {"torch", "half_flops", "memory_bandwidth"}


@pytest.mark.long
def test_benchmarks_run_to_their_end(parts):
    """The report of an out-of-memory error, in `values`, is the longest text that tests/gpu compares."""
    found = parts("values", "compare", "checkpoint", "plan")
    assert {row["outcome"] for row in rows(found, "values")} == {"passed"}
    assert {row["mode"] for row in rows(found, "compare")} == {"fsdp-bf16-packed"}
    names = {row["what"] for row in rows(found, "checkpoint")}
    assert {"synchronous", "first_stall", "second_stall", "load"} <= names
    assert [row["strategy"] for row in rows(found, "plan")] == ["ddp", "fsdp, full"]


@pytest.mark.long
@pytest.mark.parametrize(
    "part",
    ["contexts", "resume", "tests"],
)
def test_no_test_for_gpus_fails_or_is_skipped(parts, part):
    found = rows(parts(part), part)
    assert found
    assert {row["outcome"] for row in found} == {"passed"}
