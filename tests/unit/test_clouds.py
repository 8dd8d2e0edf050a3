"""Files of docs/clouds: their commands, statuses and, for AWS, the schema. tests/readers has the other
schemas, tests/distributed/test_clouds.py runs the commands."""

import re
import signal
import subprocess

import botocore.session
import botocore.validate
import pytest

from launcher.errors import EXIT_STOPPED, EXIT_USAGE
from launcher.recipe.load import load_recipe
from tests import REPOSITORY
from tests.clouds import (
    DATA,
    DNS_NAMES,
    FILES,
    FOLDER,
    GPUS,
    KUBERNETES,
    MODEL,
    ONE_NODE,
    STORE,
    entry,
    load,
    write_program,
)

ADDRESSES = ["10.0.0.1", "10.0.0.2"]


def documents(file):
    return load((FOLDER / file).read_text(), file)


def run(entry, path, **options):
    return subprocess.run(
        entry.command,
        env=entry.variables | {"PATH": path, "HOME": "/home/me"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def test_each_file_is_tested_and_shown():
    assert sorted(FILES) == sorted(file.name for file in FOLDER.iterdir())
    page = FOLDER.with_name("clouds.md").read_text()
    assert [file for file in FILES if f"(clouds/{file})" not in page] == []


@pytest.mark.parametrize("file", FILES)
def test_arguments_of_each_node(file, tmp_path):
    """A platform's command gives the launcher the same arguments, but for the number of the node."""
    path = write_program(tmp_path, "launcher", r'printf "%s\n" "$@"')
    write_program(tmp_path, "hostname", f"echo {ADDRESSES[0]}")  # ECS has it in /etc/hosts
    addresses = ADDRESSES[:1] if file in ONE_NODE else ADDRESSES
    for rank in range(len(addresses)):
        done = run(entry(file, rank, addresses, tmp_path), path)
        assert done.returncode == 0, done.stderr
        command, *words = done.stdout.splitlines()
        assert command == "train"
        given = dict(word.split("=", 1) for word in words)
        assert given.pop("gpus") == str(GPUS)
        # A pod is replaced alone: agents of others that have restarted their ranks would not meet it
        assert given.pop("max_restarts", "0") == ("0" if file in KUBERNETES else "3")
        if file not in ONE_NODE:
            assert given.pop("nodes") == "2"
            assert given.pop("node_rank") == str(rank)
            assert given.pop("address") == f"{DNS_NAMES.get(file, addresses[0])}:29500"
        assert given["model.path"] == MODEL
        assert given["data.train"] == DATA
        given["data.train"] = REPOSITORY / "recipes/support.jsonl"
        assert given["checkpoint.copy_to"] == STORE
        assert given["run.dir"].startswith("/")
        overrides = [f"{key}={value}" for key, value in given.items()]
        load_recipe(overrides, ranks=GPUS * len(addresses), files=False)


def rules_of(job):
    """The actions for statuses, and for pods whose node is drained or lost."""
    (container,) = job["template"]["spec"]["containers"]
    actions = {}
    for rule in job["podFailurePolicy"]["rules"]:
        if codes := rule.get("onExitCodes"):
            assert codes["containerName"] == container["name"]
            actions |= dict.fromkeys(codes["values"], rule["action"])
        else:
            assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
            actions["disrupted"] = rule["action"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # which podFailurePolicy needs
    return actions


def test_statuses_of_pods_of_a_job():
    actions = rules_of(documents("kubernetes_job.yaml")[1]["spec"])
    assert actions == {EXIT_USAGE: "FailJob", EXIT_STOPPED: "Ignore", "disrupted": "Ignore"}


@pytest.mark.parametrize("file", ["jobset.yaml", "trainjob.yaml"])
def test_statuses_of_pods_of_a_jobset(file):
    """Each ends the Job, and the JobSet decides by Kubernetes' message about it."""
    spec = documents(file)[0]["spec"]
    spec = spec["template"]["spec"] if file == "trainjob.yaml" else spec
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert rules_of(job) == dict.fromkeys([EXIT_USAGE, EXIT_STOPPED, "disrupted"], "FailJob")
    assert job["backoffLimit"] == 0

    def action(message):
        for rule in spec["failurePolicy"]["rules"]:
            assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
            patterns = rule.get("onJobFailureMessagePatterns", [""])
            if any(re.search(pattern, message) for pattern in patterns):
                return rule["action"]
        return None

    # pod_failure_policy.go of Kubernetes
    message = "Container launcher for pod default/run failed with exit code {} matching FailJob rule at index 0"
    assert action(message.format(EXIT_USAGE)) == "FailJobSet"
    again = "RestartJobSetAndIgnoreMaxRestarts"
    assert action(message.format(EXIT_STOPPED)) == again
    disrupted = "Pod default/run has condition DisruptionTarget matching FailJob rule at index 1"
    assert action(disrupted) == again


def test_statuses_of_other_platforms():
    recovery = documents("skypilot.yaml")[0]["resources"]["job_recovery"]
    assert recovery == {"recover_on_exit_codes": [EXIT_STOPPED]}
    for file in ("aws_batch.json", "aws_batch_nodes.json"):
        rules = documents(file)[0]["retryStrategy"]["evaluateOnExit"]
        actions = {rule["onExitCode"]: rule["action"] for rule in rules if "onExitCode" in rule}
        assert actions == {str(EXIT_USAGE): "EXIT", str(EXIT_STOPPED): "RETRY"}


@pytest.mark.parametrize("status", [0, 1, EXIT_USAGE, EXIT_STOPPED, 137])
def test_statuses_of_a_pytorchjob(status, tmp_path):
    """The training operator replaces a pod only if its status is at least 128."""
    path = write_program(tmp_path, "launcher", f"exit {status}")
    done = run(entry("pytorchjob.yaml", 0, ADDRESSES, tmp_path), path)
    assert done.returncode == (status if status in (0, EXIT_USAGE) else 203)


@pytest.mark.parametrize("file", FILES)
def test_a_signal_reaches_the_launcher(file, tmp_path):
    """SIGTERM to the first process of a node, which waits until the launcher has ended."""
    script = "trap 'sleep 0.2; exit 75' TERM; echo started; while :; do sleep 0.01; done"
    path = write_program(tmp_path, "launcher", script)
    write_program(tmp_path, "hostname", "echo 10.0.0.1")
    found = entry(file, 0, ADDRESSES, tmp_path)
    process = subprocess.Popen(
        found.command,
        env=found.variables | {"PATH": path, "HOME": "/home/me"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == (203 if file == "pytorchjob.yaml" else EXIT_STOPPED)
    process.stdout.close()


@pytest.mark.parametrize(
    ("file", "service", "operation"),
    [
        ("aws_batch.json", "batch", "RegisterJobDefinition"),
        ("aws_batch_nodes.json", "batch", "RegisterJobDefinition"),
        ("sagemaker.json", "sagemaker", "CreateTrainingJob"),
    ],
)
def test_requests_to_aws_are_valid(file, service, operation):
    """botocore knows the names and types; this test also checks enums and lengths."""
    model = botocore.session.get_session().get_service_model(service)
    shape = model.operation_model(operation).input_shape
    (request,) = documents(file)
    report = botocore.validate.ParamValidator().validate(request, shape)
    assert not report.has_errors(), report.generate_report()
    assert refused(request, shape) == []


def refused(value, shape):
    """Values that are none of their enum, or too long."""
    if shape.type_name == "list":
        return [bad for each in value for bad in refused(each, shape.member)]
    if shape.type_name == "structure":
        members = shape.members
        return [bad for name, inner in value.items() for bad in refused(inner, members[name])]
    if shape.type_name == "map":
        return [bad for inner in value.values() for bad in refused(inner, shape.value)]
    enum, longest = getattr(shape, "enum", None), shape.metadata.get("max")
    too_long = isinstance(value, str) and longest is not None and len(value) > longest
    return [value] if too_long or (enum and value not in enum) else []


def test_values_that_aws_refuses_are_found():
    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    wrong = {"TrainingInputMode": "Files", "ContainerArguments": ["x" * 257, "train"]}
    assert refused({"AlgorithmSpecification": wrong}, shape) == ["Files", "x" * 257]


@pytest.mark.parametrize("file", FILES)
def test_files_hold_no_credentials(file):
    """Names of secrets, but no value that looks like one."""
    text = (FOLDER / file).read_text()
    assert re.findall(r"AKIA\w+|hf_[A-Za-z0-9]{20,}|(?i:secret_access_key)=(?!\$)\S+", text) == []
