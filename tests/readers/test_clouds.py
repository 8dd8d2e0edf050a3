"""Files of docs/clouds, read by their platforms' own packages, which `make test-readers` installs.
tests/unit/test_clouds.py has AWS Batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.clouds import FOLDER

READERS = Path(os.environ.get("READERS", REPOSITORY / "build/readers"))
ONE_NODE = {"nodes": 1, "accelerators": {"H100": 8}}
READ = {
    "skypilot.yaml": ("skypilot", ONE_NODE | {"spot": True, "recover_on": [75]}),
    "train.dstack.yml": (
        "dstack",
        ONE_NODE | {"spot": "spot", "recover_on": ["no-capacity", "interruption"]},
    ),
    "kubernetes_job.yaml": ("kubernetes", {"kinds": ["Service", "Job"]}),
    "jobset.yaml": ("kubernetes", {"kinds": ["JobSet"]}),
    "trainjob.yaml": ("kubernetes", {"kinds": ["TrainingRuntime", "TrainJob"]}),
    "pytorchjob.yaml": ("kubernetes", {"kinds": ["PyTorchJob"]}),
}
MISTAKES = [
    ("skypilot.yaml", "exit_codes: [75]", "exit_codes: [750]", "recover_on_exit_codes"),
    ("skypilot.yaml", "num_nodes: 1", "nodes: 1", "nodes"),
    ("train.dstack.yml", "no-capacity, interruption", "preemption", "preemption"),
    ("train.dstack.yml", "spot_policy: spot", "use_spot: true", "use_spot"),
    ("kubernetes_job.yaml", "podFailurePolicy:", "failurePolicy:", "failurePolicy"),
    ("jobset.yaml", "maxRestarts: 20", 'maxRestarts: "20"', "maxRestarts"),
    ("jobset.yaml", "MessagePatterns:", "Patterns:", "onJobFailurePatterns: unknown name"),
    ("jobset.yaml", "medium: Memory", "media: Memory", "media"),
    ("trainjob.yaml", "numNodes: 2", "nodes: 2", "nodes"),
    ("trainjob.yaml", "operator: In", "operators: In", "operator"),
    ("pytorchjob.yaml", "cleanPodPolicy", "cleanPods", "cleanPods: unknown name"),
    ("pytorchjob.yaml", "secretRef:", "secret:", "secret"),
]
"""A text, one that a schema must refuse in its place, and what the message names."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (READERS / "kubernetes").is_dir(), reason="needs `make test-readers`"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the platforms say about each file, by its path: one process for each platform."""
    folder = tmp_path_factory.mktemp("files")
    files = {platform: [] for platform, _ in READ.values()}
    for file, (platform, _) in READ.items():
        files[platform].append(FOLDER / file)
    for number, (file, old, new, _) in enumerate(MISTAKES):
        text = (FOLDER / file).read_text()
        assert old in text
        wrong = folder / f"{number}_{file}"
        wrong.write_text(text.replace(old, new))
        files[READ[file][0]].append(wrong)
    found = {}
    for platform, paths in files.items():
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("cloud_files.py")), platform, *paths],
            env=os.environ | {"PYTHONPATH": str(READERS / platform), "HOME": str(folder)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found |= {path.name: json.loads(line) for path, line in zip(paths, lines, strict=True)}
    return found


@pytest.mark.parametrize("file", READ)
def test_platforms_read_their_files(file, found, figures):
    platform, wanted = READ[file]
    assert found[file] == {"read": wanted}
    figures(platform, "", f"docs/clouds/{file}", "valid")


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes_are_found(number, found):
    file, _, _, named = MISTAKES[number]
    assert named in found[f"{number}_{file}"]["error"]
