"""The section `slurm` of a recipe."""

from typing import Annotated

from pydantic import Field, StrictBool

from launcher.recipe.section import (
    ListOfOne,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    Section,
    Text,
    TextList,
    form,
)

_Line = Annotated[
    str, form(r"[^\x00-\x1f\x7f]+", "holds a character that cannot be written in a job script")
]
_Option = Annotated[
    str, form(r"--?[a-zA-Z][\w-]*(=[^\x00-\x1f\x7f]*)?", "must be options, --name or --name=value")
]
_Options = Annotated[tuple[_Option, ...], Field(min_length=1), ListOfOne]
_MOST_NODES = 99_999
_Nodes = Annotated[
    str,
    form(r"[1-9][0-9]{0,4}(-[1-9][0-9]{0,4})?", "must be a number, or a range such as 2-4"),
]
_Memory = Annotated[
    str, form(r"[0-9]{1,15}[KMGTkmgt]?", "must be a number with K, M, G or T, such as 500G")
]
_TIME = r"(?i)N+(:N+){0,2}|N+-N+(:N+){0,2}|UNLIMITED|INFINITE".replace("N+", "[0-9]{1,9}")
_Time = Annotated[str, form(_TIME, "must be minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS")]
_Variable = Annotated[
    str, form(r"[A-Za-z_][A-Za-z0-9_]*", "must be the name of an environment variable")
]


class Slurm(Section):
    """What `launcher submit` requests from Slurm. Its arguments win: `submit time=1:30:00`."""

    nodes: Annotated[PositiveInt, Field(le=_MOST_NODES)] | _Nodes = 1
    """Nodes; "2-4": as many of them as are free, another number after each requeue."""
    gpus_per_node: PositiveInt | None = None
    """GPUs per node; null: the ranks compute on the CPU."""
    ranks_per_node: PositiveInt | None = None
    """Ranks per node; null: one per GPU, or one."""
    cpus: PositiveInt | None = None
    """CPUs per node (sbatch --cpus-per-task); null: the partition's default."""
    host_memory: _Memory | None = None
    """Host memory per node (sbatch --mem): 500G; "0": all; null: the partition's default."""
    time: _Time | None = None
    """Time limit of one allocation, in quotes: "12:00:00"; null: the partition's. The job continues
    in another allocation."""
    partition: _Line | None = None
    """sbatch --partition."""
    account: _Line | None = None
    """sbatch --account."""
    qos: _Line | None = None
    """sbatch --qos."""
    constraint: _Line | None = None
    """sbatch --constraint."""
    exclude: _Line | None = None
    """Nodes to exclude (sbatch --exclude)."""
    reservation: _Line | None = None
    """sbatch --reservation."""
    mail: _Line | None = None
    """Address for mail when the job ends, fails or is requeued."""
    sbatch_extra: _Options | None = None
    """Other options of sbatch, such as --exclusive."""
    srun_extra: _Options | None = None
    """Other options of the srun that starts the ranks, such as --container-image=IMAGE."""
    setup: TextList | None = None
    """Lines of bash that prepare the environment of all nodes: module load, source .../activate.
    They run on the first node."""
    environment: Annotated[dict[_Variable, Text], Field(min_length=1)] | None = None
    """Environment variables, set after setup: {NCCL_IB_HCA: mlx5}."""
    interface: _Line | None = None
    """Network interface of NCCL, gloo and the rendezvous, such as ib0; null: chosen by them."""
    python: _Line | None = None
    """Python of the ranks; null: the one that runs `launcher submit`."""
    max_restarts: NonNegativeInt = 3
    """Restarts within an allocation (torchrun --max-restarts)."""
    max_failures: PositiveInt = 3
    """Consecutive failures without a new checkpoint after which the job is not requeued."""
    lead: Seconds | None = None
    """Seconds before the time limit when the run is asked to save; null: at least twice the
    measured time of a step and a save."""
    preflight: StrictBool = False
    """Check every node before training (launcher doctor --node), then all together; a bad node is
    excluded and the job requeued."""
