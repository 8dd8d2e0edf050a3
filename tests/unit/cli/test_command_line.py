"""The `launcher` command: help, options in both styles, start of ranks."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperOption

from launcher.cli import train
from launcher.cli.export import find_checkpoint
from launcher.cli.main import app, main
from launcher.console import program
from launcher.errors import EXIT_FAILED, EXIT_USAGE, RecipeError
from launcher.recipe.decode import dotted, keys
from launcher.recipe.load import load_recipe, to_yaml
from launcher.recipe.other_names import ABSENT, KEYS_BY_NAME, NAMES, NEEDLESS, OPTIONS, answer_to
from launcher.reliability.run_directory import RunFolder
from tests import REPOSITORY
from tests.distributed.launching import free_port, wait_until

GROUP: Any = typer.main.get_command(app)
COMMANDS = GROUP.commands
LAUNCHER = [sys.executable, "-m", "launcher.cli.main"]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_help_describes_every_option_and_has_an_example(name, capsys):
    assert main([name, "--help"]) == 0
    printed = capsys.readouterr().out
    _, _, example = printed.partition("Example:\n")
    assert example.startswith(f"    launcher {name}")
    command = COMMANDS[name]
    assert all(param.help for param in command.params if isinstance(param, TyperOption))
    assert all(f"\n  {value}=" in printed for value in command.values())
    assert all(f" {switch}" in printed for switch in command.switches())


def test_help_version_and_unknown_command(capsys):
    assert main(["submit", "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # includes the keys of the section slurm
    assert "nodes=..." in printed
    assert "max_failures=... Consecutive failures without a new checkpoint" in printed
    assert "[default: 3]" in printed
    assert main(["--version"]) == 0
    capsys.readouterr()
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in COMMANDS)
    assert "Shipped recipes: ddp, embedding, finetune, " in printed
    assert main([]) == 0
    assert capsys.readouterr().out == printed
    assert main(["plam"]) == 2
    assert "No such command 'plam'. Did you mean 'plan'?" in capsys.readouterr().err


def test_values_and_switches_are_parsed(monkeypatch):
    received = {}
    monkeypatch.setattr(
        COMMANDS["plan"], "callback", lambda **options: received.update(options) or 0
    )
    for word, option, value in [
        ("nodes=2", "nodes", 2),
        ("gpu_memory=1GiB", "gpu_memory", 2**30),
        ("gpu=--x", "gpu", "--x"),
        ("--json", "print_json", True),
        ("--no-search", "no_search", True),
        ("run.name=a=b", "overrides", ["run.name=a=b"]),
        ("data={kind: chat}", "overrides", ["data={kind: chat}"]),
        ("recipe=x", "overrides", ["recipe=x"]),
        ("oops", "overrides", ["oops"]),
    ]:
        GROUP.main(["plan", word], standalone_mode=False)
        assert (word, received[option]) == (word, value)


@pytest.mark.parametrize(
    "command",
    [
        # A value or a switch in another form
        "plan --gpus 8",
        "plan --gpus=8",
        "plan --gpus",
        "plan gpu-memory=80GiB",
        "plan json=true",
        "plan --json=true",
        "plan json=false",
        "plan --no_search",
        "plan --run.seed=2",
        "plan --batch.micro-batch-size 2",
        "submit --partition x",
        "train --model x",
        "export run=a out=b",
        "status run_dir=a",
        # A wrong value, or none
        "plan nodes=0",
        "plan gpu_memory=80",
        "rows a step=0",
        "rows a",
        "export a",
        "export out=a",
        "export a b out=c",
        "export a out=b dtype=int8",
        # A misspelt name
        "plan gpu_memry=80GiB",
        "plan --jsn",
        "submit --tim=3",
        "train learningrate=1",
        # A key of the recipe, or the name of another program
        "plan lr=0.1",
        "plan max_steps=3",
        "plan --learning-rate 1",
        "plan nproc_per_node=8",
        "plan ranks=2",
        "plan steps=2",
        "plan html=x",
        "report a --output x",
        "report a -o x",
        "export a output_dir=x",
        "train --output x",
        "train out=x",
        "train devices=2",
        "submit gpus_per_node=2",
        "train --config a.yaml",
        "train --batch-size 8",
        "chat a --max-length=3",
        "new model_name_or_path=a data=b",
        # An argument of another command
        "selftest nodes=2",
        "show gpu=h100",
        "train dry_run=true",
        "status a --loss",
        "status a step=3",
        "plan sweep.run.seed=1,2",
        "new recipe=x.yaml",
    ],
)  # fmt: skip
def test_wrong_arguments_are_answered_with_the_right_form(command, words, capsys):
    assert main(command.split()) == 2
    words.check(command, capsys.readouterr().err)


def test_commands_on_a_recipe_take_the_number_of_gpus(folder, capsys):
    """People type the same arguments for each command on a recipe."""
    for words, problem in {
        ("inspect", "gpus=3"): "64 is not a multiple of 8 (micro-batch) x 3 (ranks)",
        ("prepare", "gpus=3", "nodes=2"): "64 is not a multiple of 8 (micro-batch) x 6 (ranks)",
        ("show", "gpus=3", "nodes=2"): "64 is not a multiple of 8 (micro-batch) x 6 (ranks)",
        ("plan", "gpu=h100", "gpus=3"): "64 is not a multiple of 8 (micro-batch) x 3 (ranks)",
        ("plan", "model=a/b"): "a section; did you mean model.path='a/b'?",
    }.items():
        command, *arguments = words
        assert main([command, "recipe=x.yaml", *arguments]) == 2
        assert problem in capsys.readouterr().err


def test_folders_of_outputs_are_made_before_the_work(folder, capsys):
    """A command that has worked for minutes must not fail because of the folder of its page."""
    (folder / "runs/one").mkdir(parents=True)
    (folder / "runs/one/status.json").write_text("{}")
    assert main(["report", "runs/one", "out=new/deep/page.html"]) == 0
    assert (folder / "new/deep/page.html").is_file()
    plan = ["plan", "recipe=x.yaml", "gpu=h100", "gpus=1"]
    for command in (["report", "runs/one", "out={}"], [*plan, "out={}"], ["doctor", "out={}"]):
        for path, problem in {
            "x.yaml/below/page": "not a directory",
            "runs": "name a file in it",
        }.items():
            capsys.readouterr()
            assert main([word.format(path) for word in command]) == 2
            assert problem in capsys.readouterr().err


def test_options_of_other_programs_are_those_of_no_command():
    options = {
        name.removeprefix("--").replace("-", "_")
        for command in COMMANDS.values()
        for param in command.params
        for name in param.opts
    }
    assert options >= {*OPTIONS} - {"recipe"}
    for name, others in OPTIONS.items():
        assert name not in others.split()


def test_commands_to_paste_name_the_program_that_a_shell_finds(tmp_path, monkeypatch):
    """Without activation that is the path of this environment's."""
    folder = tmp_path / "here" / ".venv/bin"
    folder.mkdir(parents=True)
    for name in ("python", "launcher"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == ".venv/bin/launcher"
    monkeypatch.chdir(folder)
    assert program() == "./launcher"
    monkeypatch.chdir("/")
    assert program() == str(folder / "launcher").removeprefix("/")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert program() == str(folder / "launcher")
    monkeypatch.setenv("PATH", str(folder))
    assert program() == "launcher"
    (folder / "launcher").unlink()
    assert program() == f"{folder / 'python'} -m launcher"


def test_names_of_other_tools_are_names_of_keys():
    known = {dotted(path) for path in keys()}
    assert set(NAMES) <= known
    assert not set(NAMES) & set(KEYS_BY_NAME)
    tables = (NAMES, ABSENT, NEEDLESS)
    described = [name for table in tables for names in table.values() for name in names.split()]
    assert len(described) == len(set(described)), "each name is described once"
    assert not {path[-1] for path in keys()} & set(described), "it has a key already"
    for name, answer in {
        "max_samples": "did you mean data.limit?",
        "lora_model_dir": "did you mean lora.path?",
        "loss_watchdog_threshold": "did you mean run.max_loss_ratio?",
        "wandb_watch": "not needed: metrics go to metrics.jsonl, wandb or TensorBoard",
        "pissa_iter": "not available: adapters are LoRA and DoRA, and their first values those of lora.init",
        "quantizer": "did you mean model.qat?",
        "warmup_ratio": None,  # a key of its own
    }.items():
        assert answer_to(name) == answer
    assert "kto.beta=0.1 with data.kind=unpaired" in str(answer_to("rl"))


def test_all_wrong_arguments_are_named(capsys):
    assert main(["train", "recipe=fsdp", "epochs=3", "per_device_train_batch_size=2"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "command line: epochs=3: did you mean run.epochs?",
        "command line: per_device_train_batch_size=2: did you mean batch.micro_batch_size?",
    ]


@pytest.mark.parametrize(
    ("module", "number"),
    [("typer", signal.SIGINT), ("torch", signal.SIGINT), ("torch", signal.SIGTERM)],
    ids=["imports", "command", "terminated"],
)
def test_a_request_to_stop_prints_one_line(module, number):
    """A signal when a module is imported: at the start, or by the command."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder)\n"
        "from launcher.__main__ import main\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "plan", "recipe=fsdp", "gpu=h100"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (128 + number, f"stopped by {number.name}\n")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
@pytest.mark.parametrize(
    ("script", "status", "printed"),
    [
        ("$0 -m launcher schema >/dev/full", 1, "the output cannot be written: No space left"),
        ("$0 -m launcher show recipe=fsdp >&-", 0, ""),
        ("set -o pipefail; $0 -m launcher schema | head -c 1", 0, "{"),
        ("PYTHONIOENCODING=ascii $0 -m launcher show recipe=fsdp run.dir=\u00fc", 0, "dir: \\xfc"),
        ("cd gone; rmdir ../gone; $0 -m launcher show recipe=fsdp", 2, "directory was deleted"),
    ],
    ids=["full", "closed", "reader", "encoding", "folder"],
)
def test_output_that_cannot_be_written(script, status, printed, tmp_path):
    """None of these may print a traceback."""
    (tmp_path / "gone").mkdir()
    ended = subprocess.run(
        ["bash", "-c", script, sys.executable],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = ended.stdout + ended.stderr
    assert (ended.returncode, "Traceback" in output) == (status, False), output
    assert printed in output


def test_status_of_an_earlier_start_does_not_count(folder, monkeypatch):
    """A wrapper that starts a stopped run again must not do so for ever."""
    run = RunFolder(folder / "runs/small")
    run.path.mkdir(parents=True)
    run.write_status("stopped", step=5)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(train, "_Requests", lambda **_: types.SimpleNamespace(first=None))
    for ended in (lambda arguments, log: 1, lambda arguments, log: 0):
        monkeypatch.setattr(train, "_run_agent", ended)
        command = ["train", "recipe=x.yaml", "gpus=2", "run.device=cpu", f"run.dir={run.path}"]
        assert main(command) == 1, "nobody has ordered that its ranks end with 0"
    monkeypatch.setattr(
        train, "_run_agent", lambda arguments, log: run.write_status("stopped", step=9) or 0
    )
    assert main(command) == 75
    # A rank that is asked to stop at the start may end while another thread writes `running`
    monkeypatch.setattr(train, "_Requests", lambda **_: types.SimpleNamespace(first=signal.SIGINT))
    monkeypatch.setattr(
        train, "_run_agent", lambda arguments, log: run.write_status("running", step=0) or 0
    )
    assert main(command) == 75


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_a_request_to_stop_reaches_the_ranks_though_the_console_is_gone():
    """As after `launcher train ... 2>&1 | tee log` and Ctrl-C, which ends tee first, or after the
    end of an ssh connection. A signal that is ignored, as under nohup, is no request, also where
    torchrun has set a handler."""
    code = (
        "import os, signal, subprocess, sys; from pathlib import Path\n"
        "from launcher.cli.train import RunFolder, _Requests\n"
        "rank = subprocess.Popen(['sleep', '120'])\n"
        "number = int(sys.argv[1])\n"
        "if len(sys.argv) > 2: signal.signal(number, signal.SIG_IGN)\n"
        "_Requests(run=RunFolder(Path('absent'))); signal.signal(number, lambda *_: rank.kill())\n"
        "os.kill(os.getpid(), number)\n"
        "if len(sys.argv) > 2: os.kill(os.getpid(), signal.SIGTERM)\n"
        "os._exit(-rank.wait(60))"
    )
    for number, *ignored in (
        (signal.SIGHUP,),
        (signal.SIGHUP, "ignored"),
        (signal.SIGINT, "ignored"),
    ):
        expected = signal.SIGTERM if ignored else number
        command = [sys.executable, "-c", code, str(int(number)), *ignored]
        with open("/dev/full", "w") as full:
            ended = subprocess.run(command, stderr=full, timeout=300, check=False)
        assert ended.returncode == expected


@pytest.mark.slow
@pytest.mark.parametrize("host", ["localhost", "nowhere.invalid"])
def test_a_request_to_stop_ends_a_machine_that_waits_for_others(host, folder):
    """In torchrun, and before machine 0 has an address: nothing else would end it for ten minutes."""
    port = free_port()
    command = ["train", "recipe=x.yaml", "run.device=cpu", "gpus=1", "nodes=2"]
    command += ["node_rank=0", f"address={host}:{port}"]

    def in_torchrun():
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 5):
            return True
        return False

    with subprocess.Popen(
        [*LAUNCHER, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as waiting:
        try:
            if host == "localhost":
                assert wait_until(in_torchrun, process=waiting)
            else:
                assert waiting.stdout.readline() == f"waiting for an address of {host}\n"
            waiting.send_signal(signal.SIGTERM)
            output, _ = waiting.communicate(timeout=120)
        finally:
            waiting.kill()
    assert waiting.returncode == 75
    assert "the other machines are not waited for" in output


@pytest.mark.parametrize(
    ("ended", "state", "status"),
    [
        (0, "finished", 0),
        (1, "finished", 0),  # a rank crashed after the end
        (0, "running", 1),
        (75, "running", 1),  # a process that ended itself
        (1, "running", 1),
        (0, None, 1),
        (0, "failed", 1),
        (1, "stopped", 75),
        (2, "failed", 2),
    ],
)
def test_exit_status_agrees_with_the_outcome(ended, state, status, folder, monkeypatch):
    """torchrun's status is 0 if a process ends itself with 0."""
    run = RunFolder(folder / "runs/small")
    run.path.mkdir(parents=True)

    def agent(arguments, log):
        if state is not None:
            run.write_status(state, step=3)
        return ended

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(train, "_Requests", lambda **_: types.SimpleNamespace(first=None))
    monkeypatch.setattr(train, "_run_agent", agent)
    command = ["train", "recipe=x.yaml", "gpus=2", "run.device=cpu", f"run.dir={run.path}"]
    assert main(command) == status
    recorded = run.read_status().get("state")
    assert recorded == ("failed" if state == "running" else state)


def test_train_starts_ranks(folder, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    started = []
    monkeypatch.setattr(train, "_run_agent", lambda arguments, log: started.append(arguments) or 0)
    monkeypatch.setattr(train, "_visible_gpus", lambda device: 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    # It would block the signals of this process
    monkeypatch.setattr(train, "_Requests", lambda **_: types.SimpleNamespace(first=None))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    main(["train", "recipe=x.yaml", "gpus=2", "run.seed=3", "max_restarts=1"])
    ranks = ["--nproc-per-node=2", "--max-restarts=1", "-m", "launcher.train"]
    assert started.pop() == ["--standalone", *ranks, "recipe=x.yaml", "run.seed=3"]
    main(["train", "recipe=x.yaml"])
    assert "--nproc-per-node=4" in started.pop()
    assert main(["train", "recipe=x.yaml", "gpus=8"]) == 2
    assert capsys.readouterr().err.endswith(
        "command line: gpus=8: this machine has 4 GPUs; run.device=cpu trains in 8 processes on its "
        "CPUs\n"
    )
    main(["train", "recipe=x.yaml", "gpus=8", "run.device=cpu"])
    assert "--nproc-per-node=8" in started.pop()
    assert main(["train", "recipe=x.yaml", "gpus=3"]) == 2
    assert "64 is not a multiple of 8 (micro-batch) x 3 (ranks)" in capsys.readouterr().err
    machines = ["train", "recipe=x.yaml", "gpus=2"]
    for words, refusal in (
        (
            ["nodes=2"],
            "nodes=2 needs node_rank and address: start the same command on each machine",
        ),
        (["nodes=2", "node_rank=0"], "nodes=2 needs address: start"),
        (["nodes=2", "node_rank=2", "address=h:1"], "node_rank=2 must be less than nodes=2"),
        (["nodes=2", "node_rank=0", "address=10.0.0.1"], "address=10.0.0.1 must be HOST:PORT"),
        (["node_rank=0"], "node_rank is for several machines: add nodes=N"),
        (["nodes=1", "node_rank=1"], "node_rank=1 must be less than nodes=1"),
        (["nodes=1", "address=10.0.0.1"], "address=10.0.0.1 must be HOST:PORT"),
        (["nodes=1", "address=tcp://a:1"], "address=tcp://a:1 must be HOST:PORT"),
        (["nodes=1", "address=a:1,b:1"], "address=a:1,b:1 must be HOST:PORT"),
        (["nodes=1", "address=10.0.0.1:1:1"], "address=10.0.0.1:1:1 must be HOST:PORT"),
        (["nodes=3", "node_rank=0", "address=h:1"], "8 (micro-batch) x 6 (ranks)"),
    ):
        assert main([*machines, *words]) == 2
        assert refusal in capsys.readouterr().err
    assert started == []
    main([*machines, "nodes=1", "node_rank=0", "address=my-run-0:29500"])  # a job of one pod
    assert started.pop()[:2] == ["--standalone", "--nproc-per-node=2"]
    main([*machines, "nodes=2", "node_rank=1", "address=127.0.0.1:29500", "run.dir=runs/a"])
    assert started.pop()[:7] == [
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29500", "--rdzv-id=a"),
        *("--rdzv-conf=is_host=0,read_timeout=600", "--local-addr=127.0.0.1", "--nproc-per-node=2"),
    ]
    monkeypatch.setattr(train, "MEETING_SECONDS", 0)
    assert main([*machines, "nodes=2", "node_rank=0", "address=no.such.host.invalid:29500"]) == 2
    assert "no.such.host.invalid has no address here" in capsys.readouterr().err

    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    capsys.readouterr()
    assert train._visible_gpus("cpu") == 1
    assert capsys.readouterr().out == ""
    assert train._visible_gpus("auto") == 1
    assert re.fullmatch(
        r"trains on the CPU, in 1 process with \d+ cores, because torch \S+ is built without CUDA or "
        r"ROCm; run.device=cpu trains on the CPU, with gpus=N in N processes\n",
        capsys.readouterr().out,
    )
    with pytest.raises(RecipeError, match=r"run.device=cuda: .* is built without CUDA or ROCm"):
        train._visible_gpus("cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for device in ("auto", "cuda"):  # the ranks would end, each with a message of its own
        with pytest.raises(
            RecipeError, match=r"built for CUDA 12.8 and finds no GPU: run.device=cpu"
        ):
            train._visible_gpus(device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [train._visible_gpus(device) for device in ("cpu", "auto")] == [1, 8]


@pytest.mark.slow
@pytest.mark.parametrize(("refused", "status"), [(True, EXIT_USAGE), (False, EXIT_FAILED)])
def test_a_machine_that_loses_the_store_after_a_refusal_was_refused(
    monkeypatch, capsys, tmp_path, refused, status
):
    """The machine of the store may end before the others' agents know how their ranks ended."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.rendezvous import RendezvousError

    def agent(arguments):
        if refused:
            Path(os.environ["LAUNCHER_REFUSED"]).write_text("the ranks would not train the same\n")
        raise RendezvousError("closed")

    monkeypatch.delenv("LAUNCHER_REFUSED", raising=False)
    monkeypatch.setenv("LOGLEVEL", "WARNING")  # otherwise all logging is disabled
    monkeypatch.setattr(torchrun, "run", agent)
    monkeypatch.setattr(train, "bind_stores", lambda parsed: None)  # it would change this process
    assert train._run_agent(["--nproc-per-node=1", "-m", "launcher.train"], log=tmp_path) == status
    assert ("did not meet" in capsys.readouterr().err) is not refused
    assert not Path(os.environ.pop("LAUNCHER_REFUSED")).exists()


@pytest.mark.slow
def test_the_commands_at_the_end_of_a_run_can_be_pasted(tmp_path, monkeypatch):
    from launcher.run.reporting import next_commands

    monkeypatch.setattr("launcher.run.reporting.program", lambda: ".venv/bin/launcher")
    recipe = load_recipe(["recipe=quickstart"], ranks=1).recipe
    run_folder = tmp_path / "a run"
    run_folder.mkdir()
    chat, report, export = next_commands(run_folder, recipe, saved=True, exported=True)
    for line, name in ((chat, "chat"), (report, "report"), (export, "export")):
        program, command, *words = shlex.split(line)
        assert (program, command) == (".venv/bin/launcher", name)
        COMMANDS[name].make_context(name, [*words], parent=GROUP.make_context("launcher", [name]))
    assert export.endswith("/a run' out='exported/a run'")
    assert next_commands(run_folder, recipe, saved=False, exported=False) == [report]


def test_an_export_without_a_whole_checkpoint_names_the_copies(tmp_path):
    """As after a start that was ended while it fetched them."""
    (tmp_path / "checkpoints" / "step_00000003").mkdir(parents=True)
    for copies, named in (("null", False), ("s3://bucket/run", True)):
        loaded = load_recipe(["recipe=quickstart", f"checkpoint.copy_to={copies}"], ranks=1).recipe
        (tmp_path / "recipe.yaml").write_text(to_yaml(loaded))
        with pytest.raises(RecipeError) as refused, contextlib.ExitStack() as held:
            find_checkpoint(tmp_path, held)
        assert (
            "copies in s3://bucket/run (checkpoint.copy_to): start it" in str(refused.value)
        ) == named
