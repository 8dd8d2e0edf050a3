"""The job's script, as text, from slurm/train.sbatch.j2."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from launcher import __version__
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
    """Numbers of nodes that the job may get."""
    first, _, last = str(slurm.nodes).partition("-")
    return range(int(first), int(last or first) + 1)


def plural(count: int | str, what: str) -> str:
    """`1 node`, `2 nodes`, `2-4 nodes`."""
    return f"{count} {what}{'s' * (count != 1)}"


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
    nodes, ranks = plural(job.slurm.nodes, "node"), plural(ranks_per_node(job.slurm), "rank")
    return environment.get_template("train.sbatch.j2").render(
        title=" ".join(f"{job.name}: {nodes}, {ranks} on each".split()),
        version=__version__,
        options=_options(job),
        job=job,
        slurm=job.slurm,
        environment=sorted((job.slurm.environment or {}).items()),
    )
