"""The section `slurm` of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool

from launcher.recipe.section import NonNegativeInt, PositiveInt, Section, Text, TextList


class Slurm(Section):
    """What `launcher submit` requests from Slurm. Its arguments win: `submit time=1:30:00`."""

    nodes: PositiveInt | Text = 1
    """Nodes; "2-4": as many of them as are free, another number after each requeue."""
    gpus_per_node: PositiveInt | None = None
    """GPUs per node; null: the ranks compute on the CPU."""
    ranks_per_node: PositiveInt | None = None
    """Ranks per node; null: one per GPU, or one."""
    cpus: PositiveInt | None = None
    """CPUs per node (sbatch --cpus-per-task); null: the partition's default."""
    host_memory: Text | None = None
    """Host memory per node (sbatch --mem): 500G; "0": all; null: the partition's default."""
    time: Text | None = None
    """Time limit of one allocation, in quotes: "12:00:00"; null: the partition's. The job continues
    in another allocation."""
    partition: Text | None = None
    """sbatch --partition."""
    account: Text | None = None
    """sbatch --account."""
    qos: Text | None = None
    """sbatch --qos."""
    constraint: Text | None = None
    """sbatch --constraint."""
    exclude: Text | None = None
    """Nodes to exclude (sbatch --exclude)."""
    reservation: Text | None = None
    """sbatch --reservation."""
    mail: Text | None = None
    """Address for mail when the job ends, fails or is requeued."""
    sbatch_extra: TextList | None = None
    """Other options of sbatch, such as --exclusive."""
    srun_extra: TextList | None = None
    """Other options of the srun that starts the ranks, such as --container-image=IMAGE."""
    setup: TextList | None = None
    """Lines of bash that prepare the environment of all nodes: module load, source .../activate.
    They run on the first node."""
    environment: Annotated[dict[str, Text], Field(min_length=1)] | None = None
    """Environment variables, set after setup: {NCCL_IB_HCA: mlx5}."""
    interface: Text | None = None
    """Network interface of NCCL, gloo and the rendezvous, such as ib0; null: chosen by them."""
    python: Text | None = None
    """Python of the ranks; null: the one that runs `launcher submit`."""
    max_restarts: NonNegativeInt = 3
    """Restarts within an allocation (torchrun --max-restarts)."""
    max_failures: PositiveInt = 3
    """Consecutive failures without a new checkpoint after which the job is not requeued."""
    lead: PositiveInt | None = None
    """Seconds before the time limit when the run is asked to save; null: at least twice the
    measured time of a step and a save."""
    preflight: StrictBool = False
    """Check every node before training (launcher doctor --node), then all together; a bad node is
    excluded and the job requeued."""
