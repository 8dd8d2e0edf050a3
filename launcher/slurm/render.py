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
    """What a script is rendered from."""

    name: str
    """Of the job."""
    slurm: Slurm
    lead: int
    """Seconds before the time limit at which Slurm warns."""
    log: Path
    """The job's log, as sbatch's --output, in which Slurm replaces %j."""
    directory: Path
    """Where the script runs: relative paths of the recipe start there."""
    runs: tuple[tuple[Path, Path], ...]
    """Run folder and recipe of each task of the job array; one: no array."""
    python: Path
    """Python with the launcher, on the first node."""
    throttle: int | None = None
    """Tasks of the array that run at a time; None: all."""
    dependency: str | None = None
    """sbatch --dependency."""


def ranks_per_node(slurm: Slurm) -> int:
    """One for each GPU, or one, unless the recipe sets another number."""
    return slurm.ranks_per_node or slurm.gpus_per_node or 1


def node_counts(slurm: Slurm) -> range:
    """Numbers of nodes that the job may get."""
    first, _, last = str(slurm.nodes).partition("-")
    return range(int(first), int(last or first) + 1)


_SAME_NAMES = ("time", "partition", "account", "qos", "constraint", "exclude", "reservation")
"""Keys of the section slurm that are options of sbatch."""


def _options(job: JobScript) -> list[str]:
    slurm, array = job.slurm, None
    if len(job.runs) > 1:
        array = f"0-{len(job.runs) - 1}" + (f"%{job.throttle}" if job.throttle is not None else "")
    values = {
        "job-name": job.name,
        # --ntasks-per-node only for srun: of a range of nodes Slurm would take the fewest
        "nodes": slurm.nodes,
        "gpus-per-node": slurm.gpus_per_node,
        "cpus-per-task": slurm.cpus,
        "mem": slurm.host_memory,
        **{name: getattr(slurm, name) for name in _SAME_NAMES},
        "mail-user": slurm.mail,
        "mail-type": "END,FAIL,REQUEUE" if slurm.mail is not None else None,
        "array": array,
        "dependency": job.dependency,
        "signal": f"B:USR1@{job.lead}",
        "chdir": job.directory,
        "output": job.log,
    }
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    return [*options, "--requeue", "--open-mode=append", *(slurm.sbatch_extra or ())]


def quote_for_sbatch(option: str) -> str:
    """An option for an #SBATCH line. Raises RecipeError for a character that no line can hold.

    Inside double quotes sbatch interprets only a backslash and a quote; outside, a backslash does
    not keep words together (seen with Slurm 22.05).
    """
    if not option.isprintable():
        what = "holds a character that cannot be written in a line of a script"
        raise RecipeError(f"{option!r} {what}")
    name, equals, value = option.partition("=")
    if re.fullmatch(r"[\w@%+=:,./\[\]-]*", option, flags=re.ASCII):
        return option
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
    slurm, ranks = job.slurm, ranks_per_node(job.slurm)
    nodes = f"{slurm.nodes} node{'s' * (slurm.nodes != 1)}"
    title = f"{job.name}: {nodes}, {ranks} rank{'s' * (ranks != 1)} on each"
    return environment.get_template("train.sbatch.j2").render(
        title=" ".join(title.split()),
        version=__version__,
        options=_options(job),
        job=job,
        slurm=slurm,
        environment=sorted((slurm.environment or {}).items()),
    )
