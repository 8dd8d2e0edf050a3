"""Reads files of docs/clouds with their platform's own code: `python cloud_files.py PLATFORM FILE...`.

Runs in a process of its own, with the platform's packages. Prints a line of JSON for each file: what it
asks for, or the error.
"""

import json
import sys

import yaml


def skypilot(file):
    import sky

    task = sky.Task.from_yaml(file)
    (resources,) = task.resources
    return {
        "nodes": task.num_nodes,
        "spot": resources.use_spot,
        "accelerators": resources.accelerators,
        "recover_on": resources.job_recovery["recover_on_exit_codes"],
    }


def dstack(file):
    from dstack._internal.core.models.configurations import parse_apply_configuration

    with open(file) as stream:
        task = parse_apply_configuration(yaml.safe_load(stream))
    return {
        "nodes": task.nodes,
        "spot": task.spot_policy.value,
        "accelerators": {task.resources.gpu.name[0]: task.resources.gpu.count.min},
        "recover_on": [event.value for event in task.retry.on_events],
    }


def kubernetes(file):
    """Core resources by the schemas of Kubernetes. Those of others by the models of their client, which
    leave out unknown names; the templates of pods and Jobs in them also by the schemas."""
    with open(file) as stream:
        documents = list(yaml.safe_load_all(stream))
    for document in documents:
        kind = document["kind"]
        if kind in ("JobSet", "TrainJob", "TrainingRuntime"):
            check_by_model(document, kind)
        elif kind == "PyTorchJob":
            check_pytorchjob(document)
        else:
            check_by_schema(document)
        for job in jobs(document):
            check_by_schema(job)
    return {"kinds": [document["kind"] for document in documents]}


def check_by_schema(document):
    import kubernetes_validate

    latest = kubernetes_validate.latest_version()
    kubernetes_validate.validate(document, latest, strict=True)


def check_by_model(document, kind):
    import kubeflow_trainer_api.models as models

    prefix = "JobsetV1alpha2" if kind == "JobSet" else "TrainerV1alpha1"
    model = getattr(models, prefix + kind)
    check_nothing_is_lost(document, json.loads(model.from_dict(document).to_json()))


def check_pytorchjob(document):
    import kubeflow.training.models as models
    import kubernetes.client.models as core
    from kubernetes.client import ApiClient

    for name in dir(models):
        if name.startswith("KubeflowOrg"):  # the client looks for classes among its own
            setattr(core, name, getattr(models, name))

    class Response:
        data = json.dumps(document)

    client = ApiClient()
    read = client.deserialize(Response, "KubeflowOrgV1PyTorchJob")
    check_nothing_is_lost(document, client.sanitize_for_serialization(read))


def check_nothing_is_lost(given, read, path=""):
    """Raises ValueError for a name that the model does not have."""
    if isinstance(given, dict):
        for name, value in given.items():
            if name not in read:
                raise ValueError(f"{path}.{name}: unknown name")
            check_nothing_is_lost(value, read[name], f"{path}.{name}")
    elif isinstance(given, list):
        for index, (value, other) in enumerate(zip(given, read, strict=True)):
            check_nothing_is_lost(value, other, f"{path}[{index}]")
    elif read not in (given, str(given)):  # a number may be a quantity, such as that of GPUs
        raise ValueError(f"{path}: {given!r} was read as {read!r}")


def jobs(document):
    """Jobs with the templates inside a document, as its controller makes them."""
    spec, kind = document["spec"], document["kind"]
    if kind == "TrainingRuntime":
        spec = spec["template"]["spec"]
    templates = [each["template"]["spec"] for each in spec.get("replicatedJobs", [])]
    for each in spec.get("pytorchReplicaSpecs", {}).values():
        pod = each["template"]["spec"] | {"restartPolicy": "Never"}  # as the operator sets it
        templates.append({"template": {"spec": pod}})
    for template in templates:
        yield {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "job"},
            "spec": template,
        }


def main(platform, *files):
    read = globals()[platform]
    for file in files:
        try:
            found = {"read": read(file)}
        except Exception as error:  # each platform has its own kinds
            found = {"error": f"{type(error).__name__}: {getattr(error, 'message', error)}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
