"""The files of docs/clouds, and the command that each platform starts on a node."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests import REPOSITORY

FOLDER = REPOSITORY / "docs/clouds"
GPUS = 8
MODEL, DATA, STORE = "Qwen/Qwen3-8B", "s3://my-bucket/data/*.jsonl", "s3://my-bucket/runs/my-run"


@dataclass
class Entry:
    """How a platform starts the launcher on a node."""

    command: list[str]
    variables: dict[str, str]
    """What the platform sets in the environment."""


def load(text, file):
    """The documents of a file whose text may have been changed."""
    return [json.loads(text)] if file.endswith(".json") else list(yaml.safe_load_all(text))


def entry(file, rank, addresses, scratch, *, gpus=GPUS, replaced=None):
    """What a file starts on the node of this rank.

    addresses: of the nodes. scratch: a folder for a file that a platform writes for the container.
    replaced: other texts for parts of the file, all of which it must have.
    """
    text = (FOLDER / file).read_text()
    for old, new in (replaced or {}).items():
        assert old in text, f"{file} has no {old}"
        text = text.replace(old, str(new))
    documents = load(text, file)
    if file == "sagemaker.json":
        return _sagemaker(documents, rank, addresses, scratch)
    return _ENTRIES[file](documents, rank, addresses, str(gpus))


def _of_container(container, variables):
    """Kubernetes replaces $(NAME) in command and arguments."""
    words = [*container.get("command", []), *container.get("args", [])]
    given = variables | {each["name"]: each["value"] for each in container.get("env", [])}
    words = [re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], word) for word in words]
    return Entry(words, given)


def _kubernetes_job(documents, rank, addresses, gpus):
    (container,) = documents[1]["spec"]["template"]["spec"]["containers"]
    return _of_container(container, {"JOB_COMPLETION_INDEX": str(rank)})


def _jobset(documents, rank, addresses, gpus):
    (job,) = documents[0]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return _of_container(container, {"JOB_COMPLETION_INDEX": str(rank)})


def _torchrun_variables(rank, addresses, gpus):
    return {
        "PET_NNODES": str(len(addresses)),
        "PET_NPROC_PER_NODE": gpus,
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": addresses[0],
        "PET_MASTER_PORT": "29500",
    }


def _trainjob(documents, rank, addresses, gpus):
    """torch.go of Kubeflow Trainer 2.3 sets the variables."""
    runtime, job = documents
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    return _of_container(
        container | job["spec"]["trainer"], _torchrun_variables(rank, addresses, gpus)
    )


def _pytorchjob(documents, rank, addresses, gpus):
    """envvar.go and master.go of the training operator 1.9 set the variables."""
    replicas = documents[0]["spec"]["pytorchReplicaSpecs"]
    pod = replicas["Worker" if rank else "Master"]
    (container,) = pod["template"]["spec"]["containers"]
    variables = _torchrun_variables(rank, addresses, gpus) | {
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": "29500",
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(len(addresses) * int(gpus)),
    }
    return _of_container(container, variables)


def _skypilot(documents, rank, addresses, gpus):
    variables = {
        "SKYPILOT_NUM_NODES": str(len(addresses)),
        "SKYPILOT_NUM_GPUS_PER_NODE": gpus,
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(addresses),
    }
    return Entry(["bash", "-c", documents[0]["run"]], variables)


def _dstack(documents, rank, addresses, gpus):
    variables = {
        "DSTACK_NODES_NUM": str(len(addresses)),
        "DSTACK_GPUS_PER_NODE": gpus,
        "DSTACK_NODE_RANK": str(rank),
        "DSTACK_MASTER_NODE_IP": addresses[0],
    }
    return Entry(["sh", "-i", "-c", " && ".join(documents[0]["commands"])], variables)


def _aws_batch(documents, rank, addresses, gpus):
    container = documents[0]["containerProperties"]
    return Entry(["launcher", *container["command"]], {})  # the image's ENTRYPOINT


def _aws_batch_nodes(documents, rank, addresses, gpus):
    """The main node has no variable with its address."""
    (nodes,) = documents[0]["nodeProperties"]["nodeRangeProperties"]
    variables = {
        "AWS_BATCH_JOB_NUM_NODES": str(len(addresses)),
        "AWS_BATCH_JOB_NODE_INDEX": str(rank),
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    }
    if rank:
        variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = addresses[0]
    return Entry(nodes["container"]["command"], variables)


def _sagemaker(documents, rank, addresses, scratch):
    """The entrypoint finds the names of the nodes in a file."""
    algorithm = documents[0]["AlgorithmSpecification"]
    config = scratch / f"resourceconfig_{rank}.json"
    config.write_text(json.dumps({"current_host": addresses[rank], "hosts": addresses}))
    words = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
    real = "/opt/ml/input/config/resourceconfig.json"
    assert real in words[2]
    words[2] = words[2].replace(real, str(config))
    return Entry(words, {})


_ENTRIES = {
    "kubernetes_job.yaml": _kubernetes_job,
    "jobset.yaml": _jobset,
    "trainjob.yaml": _trainjob,
    "pytorchjob.yaml": _pytorchjob,
    "skypilot.yaml": _skypilot,
    "train.dstack.yml": _dstack,
    "aws_batch.json": _aws_batch,
    "aws_batch_nodes.json": _aws_batch_nodes,
}
FILES = [*_ENTRIES, "sagemaker.json"]
ONE_NODE = ["aws_batch.json"]
KUBERNETES = ["kubernetes_job.yaml", "jobset.yaml", "trainjob.yaml", "pytorchjob.yaml"]
DNS_NAMES = {
    "kubernetes_job.yaml": "my-run-0.my-run",
    "jobset.yaml": "my-run-node-0-0.my-run",
}
"""Names of node 0 that a service of the cluster provides."""


def write_program(folder, name, script):
    """A shell script that stands for a program. Returns a PATH on which it comes first."""
    file = Path(folder, name)
    file.write_text(f"#!/bin/bash\n{script}\n")
    file.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"
