"""The limit of open files: the process that hosts the ranks' store has connections to all of them."""

from __future__ import annotations

import contextlib
import resource

from launcher.distributed.environment import Environment

FILES_OF_RANK = 4
"""Connections of each rank to the process that hosts the ranks' store: two to the store, one of NCCL's
monitor, and one of gloo to rank 0."""
_OTHER_FILES = 500
_ENOUGH_FILES = 65536


def open_files_needed(ranks: int) -> int:
    """Files and connections that the first rank's process, or its agent, may have open at once."""
    return FILES_OF_RANK * ranks + _OTHER_FILES


def allow_open_files(environment: Environment) -> None:
    """Raises the limit of open files as far as the ranks need and the system allows: of this process,
    whose loader processes inherit it, and of torchrun's agent, which may host the store."""
    wanted = max(_ENOUGH_FILES, open_files_needed(environment.world_size))
    agent = environment.torchrun and environment.local_rank == 0
    for process in (0, environment.parent) if agent else (0,):
        with contextlib.suppress(ValueError, OSError):  # a container may forbid it
            soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
            allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            if soft != resource.RLIM_INFINITY and soft < allowed:
                resource.prlimit(process, resource.RLIMIT_NOFILE, (allowed, hard))


def too_few_open_files(ranks: int) -> str | None:
    """Why this process may not host the store of this number of ranks; None: it may. Connections above
    the limit are accepted and closed, so the other ranks would try again until `run.init_timeout`."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_needed(ranks)
    if most == resource.RLIM_INFINITY or most >= needed:
        return None
    return (
        f"a process may have {most:,} files open (ulimit -Hn), and {ranks:,} ranks need {needed:,} in the "
        "first one, which all connect to; raise the limit of this system: LimitNOFILE=65536 of the "
        "service that starts jobs, such as slurmd, or `nofile` in /etc/security/limits.conf"
    )
