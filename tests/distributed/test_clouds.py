"""The commands of docs/clouds train on two nodes, which are network namespaces; see tests/clouds.py.

The command is the node's process 1, as in a container.
"""

import re
import shutil
import sys

import pytest

from tests.clouds import (
    DATA,
    DNS_NAMES,
    FILES,
    FOLDER,
    MODEL,
    ONE_NODE,
    STORE,
    entry,
    write_program,
)
from tests.distributed.namespaces import two_nodes, unavailable
from tests.distributed.test_nodes import wait_until_both_train
from tests.distributed.test_resumed_runs import RECIPE, events, records
from tests.run_files import status, write_texts

STEPS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("clouds")
    write_texts(folder / "text.jsonl", seed=2)
    (folder / "recipe.yaml").write_text(
        RECIPE.replace("FOLDER", str(folder))
        .replace("DROPOUT", "0.0")
        .replace("seed: 3", "seed: 3, timeout: 10, hang_timeout: 20, init_timeout: 60")
    )
    return folder


def replacements(file, folder, run_dir, address):
    """A small run on CPUs in place of the file's. `address`: of node 0."""
    text = (FOLDER / file).read_text()
    found = {
        "recipe=sft": f"recipe={folder}/recipe.yaml",
        f"model.path={MODEL}": f"run.max_steps={STEPS}",
        f"checkpoint.copy_to={STORE}": f"checkpoint.copy_to={folder}/copies/{run_dir.name}",
    }
    data = next(each for each in (f"data.train='{DATA}'", f"data.train={DATA}") if each in text)
    found[data] = "run.device=cpu"
    (run,) = set(re.findall(r'run\.dir=("\$HOME[^"]+"|[\w/-]+)', text))
    found[f"run.dir={run}"] = f"run.dir={run_dir}"
    for cache in set(re.findall(r"data\.cache=[\w/]+", text)):
        found[cache] = f"data.cache={folder}/cache"
    if "gpus=8" in text:
        found["gpus=8"] = "gpus=1"
    if file in DNS_NAMES:
        found[DNS_NAMES[file]] = address
    return found


def start(file, nodes, folder, scratch, run_dir, *, only=None):
    """Starts the file's command on the nodes, or on that of rank `only`."""
    path = write_program(scratch, "launcher", f'exec {sys.executable} -m launcher.cli.main "$@"')
    write_program(scratch, "hostname", f"echo {nodes[0].address}")  # ECS has it in /etc/hosts
    addresses = [node.address for node in nodes]
    replaced = replacements(file, folder, run_dir, addresses[0])
    for rank, node in enumerate(nodes):
        if only in (None, rank):
            found = entry(file, rank, addresses, scratch, gpus=1, replaced=replaced)
            log = folder / f"{node.name}.log"
            variables = found.variables | {"PATH": path, "HF_HOME": str(folder)}
            node.start(found.command, log=log, as_init=True, **variables)


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_command_of_each_file(file, folder, tmp_path):
    """One node gets SIGTERM: all save, copy, and end with status 75. Started again with an empty run
    folder, they resume from the copy."""
    run_dir = folder / file.replace(".", "_")
    with two_nodes() as nodes:
        used = nodes[:1] if file in ONE_NODE else nodes
        start(file, used, folder, tmp_path, run_dir)
        wait_until_both_train(used, run_dir, step=3, ranks=len(used))
        used[-1].terminate()
        stopped = [203 if file == "pytorchjob.yaml" else 75] * len(used)
        assert [node.wait(120) for node in used] == stopped, used[0].output()[-8000:]
        assert status(run_dir)["state"] == "stopped"
        assert status(run_dir)["step"] < STEPS
        shutil.rmtree(run_dir)  # the replacement has an empty disk
        start(file, used, folder, tmp_path, run_dir)
        assert [node.wait(240) for node in used] == [0] * len(used), used[0].output()[-8000:]
    assert [line["step"] for line in records(run_dir)] == list(range(1, STEPS + 1))
    assert len(events(run_dir, "resumed")) == 1


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_pod_of_a_jobset(lost, folder, tmp_path):
    """A node is lost without a warning: the other pod fails, and the JobSet starts both again."""
    file, run_dir = "jobset.yaml", folder / f"lost_{lost}"
    with two_nodes() as nodes:
        start(file, nodes, folder, tmp_path, run_dir)
        wait_until_both_train(nodes, run_dir, step=6)
        nodes[lost].kill()
        other = nodes[1 - lost]
        assert other.wait(120) == 1, other.output()[-8000:]
        start(file, nodes, folder, tmp_path, run_dir)
        assert [node.wait(240) for node in nodes] == [0, 0], nodes[0].output()[-8000:]
    assert [line["step"] for line in records(run_dir)] == list(range(1, STEPS + 1))
    assert events(run_dir, "resumed")[-1]["step"] >= 4
