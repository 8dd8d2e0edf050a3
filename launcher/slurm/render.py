"""The job's script, as text: a pure function of what it depends on. The template is `slurm/train.sbatch.j2`."""

from __future__ import annotations

import functools
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
    """The job's log, as sbatch's --output: what Slurm fills in (%j) stays as it is."""
    directory: Path
    """Where the script runs: relative paths of the recipe start there."""
    runs: tuple[tuple[Path, Path], ...]
    """Run folder and recipe of each task of the job array; one: no array."""
    python: Path
    """Python with the launcher in it, for what the script asks on the first node."""
    throttle: int | None = None
    """Tasks of the array that run at a time; None: all."""
    dependency: str | None = None
    """sbatch --dependency."""


def ranks_per_node(slurm: Slurm) -> int:
    """One a GPU, or one, where the recipe does not say."""
    return slurm.ranks_per_node or slurm.gpus_per_node or 1


def node_counts(slurm: Slurm) -> range:
    """Numbers of nodes that the job may get."""
    first, _, last = str(slurm.nodes).partition("-")
    return range(int(first), int(last or first) + 1)


def file_pattern(path: Path) -> str:
    """A path as sbatch takes one for a file that it writes to: it fills in what follows a %."""
    return str(path).replace("%", "%%")


def _options(job: JobScript) -> list[str]:
    slurm = job.slurm
    array = None
    if len(job.runs) > 1:
        array = f"0-{len(job.runs) - 1}" + (f"%{job.throttle}" if job.throttle is not None else "")
    values = {
        "job-name": job.name,
        "nodes": slurm.nodes,  # with --ntasks-per-node, which the srun has, Slurm would take the fewest nodes of a range
        "gpus-per-node": slurm.gpus_per_node,
        "cpus-per-task": slurm.cpus,
        "mem": slurm.host_memory,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "reservation": slurm.reservation,
        "mail-user": slurm.mail,
        "mail-type": "END,FAIL,REQUEUE" if slurm.mail is not None else None,
        "array": array,
        "dependency": job.dependency,
        "signal": f"B:USR1@{job.lead}",
        "chdir": job.directory,
        "output": job.log,
    }
    flags = ["--requeue", "--open-mode=append"]
    return (
        [f"--{name}={value}" for name, value in values.items() if value is not None]
        + flags
        + list(slurm.sbatch_extra or ())
    )


def quote_for_sbatch(option: str) -> str:
    """An option as sbatch reads it from an #SBATCH line: inside double quotes only a backslash and a quote mean anything there,
    and outside a backslash does not keep words together (seen with Slurm 22.05).

    Raises RecipeError where it holds what cannot stand in a line.
    """
    if not option.isprintable():
        raise RecipeError(
            f"{option!r} cannot be told to Slurm: it holds a character that cannot stand in a line"
        )
    name, equals, value = option.partition("=")
    if re.fullmatch(r"[\w@%+=:,./\[\]-]*", option, flags=re.ASCII):
        return option
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{name}{equals}"{escaped}"'


@functools.cache
def _template() -> str:
    package = Path(__file__).resolve().parent.parent
    folders = [package.parent / "slurm", package / "_slurm"]  # in a checkout, in a wheel
    return next(
        folder / "train.sbatch.j2" for folder in folders if (folder / "train.sbatch.j2").is_file()
    ).read_text(encoding="utf-8")


def render(job: JobScript) -> str:
    """The script. Raises RecipeError where a value cannot be told to Slurm."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{%#",  # "{#" is bash: ${#array[@]}
        comment_end_string="#%}",
    )
    environment.filters["sbatch"] = quote_for_sbatch
    environment.filters["shell"] = lambda value: shlex.quote(str(value))
    slurm, nodes, ranks = job.slurm, job.slurm.nodes, ranks_per_node(job.slurm)
    title = (
        f"{job.name}: {nodes} node{'s' * (nodes != 1)}, {ranks} rank{'s' * (ranks != 1)} on each"
    )
    return environment.from_string(_template()).render(
        title=" ".join(title.split()),
        version=__version__,
        options=_options(job),
        lead=job.lead,
        runs=job.runs,
        python=job.python,
        ranks_python=slurm.python or job.python,
        ranks_per_node=ranks,
        setup=slurm.setup or (),
        environment=sorted((slurm.environment or {}).items()),
        interface=slurm.interface,
        srun_extra=slurm.srun_extra or (),
        max_restarts=slurm.max_restarts,
        max_failures=slurm.max_failures,
        preflight=slurm.preflight,
    )
