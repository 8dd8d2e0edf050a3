"""Measures the cost of saving and loading checkpoints.

    python benchmarks/checkpoint.py                     # 2 ranks, about 200 MB, fsdp: a minute
    python benchmarks/checkpoint.py --strategy ddp --megabytes 1000 --folder /lustre/scratch

The floor, for comparison, is torch.save and fsync of each rank's part, and torch.load of it. A step
is a forward pass, a backward pass and an optimizer step of a stack of linear layers.

The stall of an asynchronous save is the extra time of the save and the steps after it, compared
with the same number of steps without a save, measured right before. Its blocking time is the time
that training waits for it, in the call and before the next optimizer step. All numbers are medians
over --repeats but those of the first save, which allocates its buffer, and of the second one. All
ranks start each measurement together. On a shared machine the CPU time is more reliable.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import torchrun

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

STEPS = 6
"""Steps after an asynchronous save. They take longer than the save itself."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="fsdp")
    parser.add_argument(
        "--megabytes", type=int, default=204, help="size of a checkpoint over all ranks"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--rows", type=int, default=48, help="rows per step and rank; more rows: longer steps"
    )
    parser.add_argument("--folder", help="parent of the temporary folder for checkpoints")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.worker:
        worker(options)
        return
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=options.folder))
    try:
        words = [__file__, *sys.argv[1:], "--folder", folder, "--worker"]  # the last folder counts
        subprocess.run(torchrun(options.ranks, *words), check=True, timeout=1800)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def worker(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from launcher.checkpoint.reader import find_checkpoint, load
    from launcher.checkpoint.state import model_and_optimizer, rank_state
    from launcher.checkpoint.writer import Checkpointer, checkpoint_group
    from launcher.distributed.rank_layout import RankLayout
    from launcher.optimizers.optimizer import make_optimizer
    from launcher.recipe.schema import Checkpoint, Optimizer

    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= options.ranks
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    folder, width, layers = Path(options.folder), 1024, 0
    layers = max(1, round(options.megabytes * 1e6 / (12 * width * width)))
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device)
    if options.strategy == "fsdp":
        mesh = init_device_mesh(device.type, (options.ranks,))
        for layer in module.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    model = module if options.strategy == "fsdp" else nn.parallel.DistributedDataParallel(module)
    optimizer = make_optimizer(module, Optimizer(learning_rate=1e-5))
    batch = torch.randn(options.rows, width, device=device)

    savers: list[Checkpointer] = []

    def step() -> None:
        model(batch).square().mean().backward()
        for saver in savers:
            saver.wait_staged()
        optimizer.step()
        optimizer.zero_grad()

    def synchronize() -> None:
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()

    def time_call(what: Callable[[], Any]) -> float:
        synchronize()
        started = time.perf_counter()
        what()
        synchronize()
        return time.perf_counter() - started

    for _ in range(4):
        step()
    ranks = RankLayout(rank=rank, size=options.ranks, group=world, device=device)
    group = checkpoint_group(ranks)
    tensors = model_and_optimizer(module, optimizer)
    settings: dict[str, Any] = {"group": group, "device": device}
    synchronous = Checkpointer(
        folder / "synchronous", Checkpoint(asynchronous=False, keep_last=1), **settings
    )
    asynchronous = Checkpointer(folder / "asynchronous", Checkpoint(keep_last=1), **settings)
    savers += [synchronous, asynchronous]
    number = 0

    def steps_timed(first: Callable[[], None]) -> tuple[float, float]:
        """Seconds and CPU seconds of `first` and the steps after it.

        Each step completes before the next one starts, as it does if every loss is logged.
        """

        def steps() -> None:
            first()
            for _ in range(STEPS):
                step()
                synchronize()

        cpu = time.process_time()
        seconds = time_call(steps)
        return seconds, time.process_time() - cpu

    def save(checkpointer: Checkpointer) -> None:
        nonlocal number
        number += 1
        checkpointer.save(number, tensors, state={"step": number}, local=rank_state(module, device))

    # The floor: one file with each rank's part (with ddp, every n-th tensor)
    from launcher.models.shards import local_rows

    part = {
        name: local_rows(tensor)[0]
        for index, (name, tensor) in enumerate(tensors.items())
        if options.strategy == "fsdp" or index % world.size() == rank
    }
    file = folder / f"floor_{rank}.pt"

    def floor() -> None:
        with file.open("wb") as out:
            torch.save(part, out)
            out.flush()
            os.fsync(out.fileno())

    asynchronous.prepare(tensors, local=rank_state(module, device))
    plain, _ = steps_timed(lambda: None)
    with_first_save, _ = steps_timed(lambda: save(asynchronous))
    (ended,) = asynchronous.finish()
    # The first save allocates the buffer and plans the save
    first = {"first_stall": with_first_save - plain, "first_blocking": ended.blocked}
    if rank == 0:  # in case that the time is up before the end
        print(json.dumps({name: 1e3 * seconds for name, seconds in first.items()}), flush=True)
    save(synchronous)
    names = "step floor synchronous blocking stall cpu lasted floor_load verify load"
    found: dict[str, list[float]] = {name: [] for name in names.split()}
    for _ in range(options.repeats):
        found["floor"].append(time_call(floor))
        found["synchronous"].append(time_call(lambda: save(synchronous)))
        assert all(outcome.error is None for outcome in synchronous.finish())
        plain, plain_cpu = steps_timed(lambda: None)
        with_save, with_save_cpu = steps_timed(lambda: save(asynchronous))
        (ended,) = asynchronous.finish()
        assert ended.error is None, ended
        found["step"].append(plain / STEPS)
        found["stall"].append(with_save - plain)
        found["cpu"].append(with_save_cpu - plain_cpu)
        found["blocking"].append(ended.blocked)
        found["lasted"].append(ended.seconds)
        path = Path()

        def verify() -> None:
            nonlocal path
            path = find_checkpoint(folder / "asynchronous", group=group) or path

        found["floor_load"].append(
            time_call(lambda: _copy(torch.load(file, weights_only=True), part))
        )
        found["verify"].append(time_call(verify))
        found["load"].append(time_call(lambda: load(path, tensors, group=group)))  # noqa: B023
    gathered: list[Any] = [None] * options.ranks
    medians = {name: statistics.median(values) for name, values in found.items()}
    medians |= first | {"second_stall": found["stall"][0]}
    dist.all_gather_object(gathered, medians)
    if rank == 0:
        m = {name: max(each[name] for each in gathered) * 1e3 for name in medians}
        rows = [
            ("torch.save + fsync (the floor)", m["floor"], ""),
            (
                "synchronous save",
                m["synchronous"],
                f"{m['synchronous'] / m['floor']:.2f} x the floor; goal 1.50",
            ),
            (
                "asynchronous: blocking",
                m["blocking"],
                f"{m['blocking'] / m['synchronous']:.0%} of a synchronous save; goal 15 %",
            ),
            (
                "asynchronous: total stall",
                m["stall"],
                f"{m['stall'] / m['synchronous']:.0%} of a synchronous save; goal 60 %",
            ),
            ("the first one: blocking", m["first_blocking"], "it allocates the buffer"),
            ("the first one: total stall", m["first_stall"], ""),
            ("the second one: total stall", m["second_stall"], ""),
            ("asynchronous: CPU time of a rank", m["cpu"], ""),
            ("asynchronous: until it is valid", m["lasted"], ""),
            ("torch.load + copy (the floor)", m["floor_load"], ""),
            ("load", m["load"], f"{m['load'] / m['floor_load']:.2f} x the floor; goal 1.50"),
            ("verify, before it", m["verify"], ""),
            ("a step, for comparison", m["step"], ""),
        ]
        print(
            f"{sum(t.nbytes for t in tensors.values()) / 1e6:.0f} MB, {options.ranks} ranks, {options.strategy} on {device.type}, "
            f"median of {options.repeats}"
        )
        for name, value, note in rows:
            print(f"{name:34}{value:9.1f} ms  {note}")
        print(json.dumps(m))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def _copy(source: Any, target: Any) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])


if __name__ == "__main__":
    main()
