"""The job's script, as text, from slurm/train.sbatch.j2."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import __version__
from launcher.console import bytes_as_text, plural
from launcher.errors import RecipeError
from launcher.recipe.schema import Slurm


@dataclass(frozen=True, kw_only=True)
class JobScript:
    """What a job's script is rendered from."""

    name: str
    slurm: Slurm
    lead: int
    """Seconds between Slurm's warning and the time limit."""
    log: Path
    """sbatch --output, in which Slurm replaces %j."""
    directory: Path
    """Relative paths of the recipe start there."""
    runs: tuple[tuple[Path, Path], ...]
    """Run folder and recipe of each task of the job array; one run: no array."""
    python: Path
    """Python with the launcher, on the first node."""
    throttle: int | None = None
    """Runs at a time; None: no limit."""
    dependency: str | None = None


def ranks_per_node(slurm: Slurm) -> int:
    """One for each GPU, or one, unless the recipe sets another number."""
    return slurm.ranks_per_node or slurm.gpus_per_node or 1


def node_counts(slurm: Slurm) -> range:
    """Numbers of nodes that may train."""
    first, _, last = str(slurm.train_nodes or slurm.nodes).partition("-")
    return range(int(first), int(last or first) + 1)


def nodes_text(slurm: Slurm) -> str:
    """`2 nodes`, `128 of 130 nodes`."""
    some = "" if slurm.train_nodes is None else f"{slurm.train_nodes} of "
    return some + plural(slurm.nodes, "node")


def torchrun_command(
    slurm: Slurm, *, python: str, nodes: str, endpoint: str, name: str, restarts: int
) -> list[str]:
    """torchrun of a node, below the agent that forwards signals to its ranks. What it runs follows.
    endpoint: HOST:PORT at which the nodes meet, under this name."""
    agent = [python, "-m", "launcher.slurm.agent"]
    if slurm.interface:
        agent += ["--interface", slurm.interface]
    torchrun = [python, "-m", "launcher.distributed.torchrun"]
    options = {
        "--nnodes": nodes,
        "--nproc-per-node": str(ranks_per_node(slurm)),
        "--max-restarts": str(restarts),
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": endpoint,
        "--rdzv-id": name,
        "--rdzv-conf": "is_host={is_host}",
        "--local-addr": "{address}",
    }
    for option, value in options.items():
        torchrun += [option, value]
    return [*agent, *torchrun, "-m"]


def srun_command(nodes: str, *words: str) -> list[str]:
    """Runs a command once on each of this number of nodes. More options of srun may come first."""
    return ["srun", "--nodes", nodes, "--ntasks-per-node=1", *words]


def training_command(
    slurm: Slurm,
    *,
    python: str,
    nodes: str,
    selection: Sequence[str] = (),
    endpoint: str,
    name: str,
    recipe: Path,
    logs: str,
) -> list[str]:
    """What trains, with the output of each node in a file in `logs`. selection: options of srun that
    select the nodes of the allocation."""
    torchrun = torchrun_command(
        slurm,
        python=python,
        nodes=nodes,
        endpoint=endpoint,
        name=name,
        restarts=slurm.max_restarts,
    )
    output = f"--output={logs.replace('%', '%%')}/node_%N.log"
    shell = ("bash", "-c", 'trap "" USR1 TERM; exec "$@"', "bash")
    words = ("--kill-on-bad-exit=1", "--wait=60", output, *(slurm.srun_extra or ()), *shell)
    return srun_command(nodes, *selection, *words, *torchrun, "launcher.train", f"recipe={recipe}")


def missing_resources(slurm: Slurm, *, workers: int, host_memory: int | None) -> str | None:
    """What a node needs of the CPUs and the host memory that a job with GPUs does not ask for; None:
    it asks for both. workers: loader processes of a rank. host_memory: bytes by the plan; None: not
    planned."""
    if slurm.gpus_per_node is None:
        return None
    ranks, each, parts, missing = ranks_per_node(slurm), workers + 1, [], []
    if slurm.cpus is None:
        missing.append("cpus")
        parts.append(
            f"{plural(each, 'CPU')} for each GPU, for its rank and {plural(workers, 'loader process', 'es')} "
            f"(cpus={ranks * each})"
        )
    if slurm.host_memory is None:
        missing.append("host_memory")
        if host_memory is not None:
            size = math.ceil(host_memory / 2**30)
            parts.append(f"{bytes_as_text(host_memory)} of host memory (host_memory={size}G)")
    if not missing:
        return None
    without = (
        f"note: without {' and '.join(missing)}, the job gets what the cluster gives by default"
    )
    return without + (f"; a node needs {' and '.join(parts)}" if parts else "")


def _comment(words: Sequence[str]) -> list[str]:
    """A command as lines for a comment. A character that would end the comment is shown as ?."""
    text = "".join(char if char.isprintable() else "?" for char in shlex.join(words))
    return textwrap.wrap(text, 96, break_long_words=False, break_on_hyphens=False)


def _options(job: JobScript) -> list[str]:
    slurm, array = job.slurm, None
    if len(job.runs) > 1:
        array = f"0-{len(job.runs) - 1}" + (f"%{job.throttle}" if job.throttle else "")
    same_names = ("time", "partition", "account", "qos", "constraint", "exclude", "reservation")
    values = {
        "job-name": job.name,
        # --ntasks-per-node only for srun: of a range of nodes Slurm would take the fewest
        "nodes": slurm.nodes,
        "gpus-per-node": slurm.gpus_per_node,
        "cpus-per-task": slurm.cpus,
        "mem": slurm.host_memory,
        **{name: getattr(slurm, name) for name in same_names},
        "mail-user": slurm.mail,
        "mail-type": slurm.mail and "END,FAIL,REQUEUE",
        "array": array,
        "dependency": job.dependency,
        "signal": f"B:USR1@{job.lead}",
        "chdir": job.directory,
        "output": job.log,
    }
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    options += ["--requeue", "--open-mode=append"]
    options += [] if slurm.train_nodes is None else ["--no-kill"]  # of all nodes, if one is lost
    options += slurm.sbatch_extra or ()
    return options


def quote_for_sbatch(option: str) -> str:
    """An option for an #SBATCH line. Raises RecipeError for a character that no line can hold.

    Inside double quotes sbatch interprets only a backslash and a quote; outside, a backslash does
    not keep words together (seen with Slurm 22.05).
    """
    if not option.isprintable():
        what = "holds a character that cannot be written in a line of a script"
        raise RecipeError(f"{option!r} {what}")
    if re.fullmatch(r"[\w@%+=:,./\[\]-]*", option, flags=re.ASCII):
        return option
    name, equals, value = option.partition("=")
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{name}{equals}"{escaped}"'


def render(job: JobScript) -> str:
    """The script. Raises RecipeError if a value cannot be written in it."""
    import jinja2

    package = Path(__file__).resolve().parent.parent
    folders = (package.parent / "slurm", package / "_slurm")  # in a checkout, in a wheel
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sbatch"] = quote_for_sbatch
    environment.filters["shell"] = lambda value: shlex.quote(str(value))
    run_dir, recipe = job.runs[0]
    counts = node_counts(job.slurm)
    trains = training_command(
        job.slurm,
        python=job.slurm.python or str(job.python),
        nodes=str(counts[0]) if len(counts) == 1 else "NODES",
        selection=[] if job.slurm.train_nodes is None else ["--nodelist=NODES"],
        endpoint="HOST:PORT",
        name="JOB.RESTART",
        recipe=recipe,
        logs=f"{run_dir}/slurm/job_JOB/restart_RESTART",
    )
    nodes, ranks = nodes_text(job.slurm), plural(ranks_per_node(job.slurm), "rank")
    return environment.get_template("train.sbatch.j2").render(
        title=" ".join(f"{job.name}: {nodes}, {ranks} on each".split()),
        version=__version__,
        options=_options(job),
        job=job,
        trains=_comment(trains),
        slurm=job.slurm,
        environment=sorted((job.slurm.environment or {}).items()),
    )
