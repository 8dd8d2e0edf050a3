"""Measures the index of a checkpoint on many ranks, simulated in one process.

    python benchmarks/checkpoint_index.py --ranks 1024

The tensors are those of Llama-3 70B and AdamW, sharded by FSDP. Prints the CPU seconds and the
change of the resident memory of rank 0 in a save, and of any rank in a save and in a resume, without
the exchange and without the tensors' bytes.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from launcher.checkpoint import files
from launcher.checkpoint.layout import index_of, plan, written_boxes
from launcher.checkpoint.reader import open_tensors
from launcher.distributed.host_memory import resident
from launcher.libraries.private import fake_store
from launcher.models.shards import chunk

WIDTH, KEYS, INNER, VOCABULARY, BLOCKS = 8192, 1024, 28672, 128256, 80


def shapes() -> dict[str, torch.Size]:
    """The shapes of all tensors by name."""
    block: dict[str, tuple[int, ...]] = {
        "q_proj": (WIDTH, WIDTH),
        "k_proj": (KEYS, WIDTH),
        "v_proj": (KEYS, WIDTH),
    }
    block |= {"o_proj": (WIDTH, WIDTH), "gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH)}
    block |= {"down_proj": (WIDTH, INNER), "norm1": (WIDTH,), "norm2": (WIDTH,)}
    model = {
        f"layers.{i}.{name}.weight": shape for i in range(BLOCKS) for name, shape in block.items()
    }
    model |= {"embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
    model["norm.weight"] = (WIDTH,)
    kinds = ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq")
    return {kind.format(name): torch.Size(shape) for kind in kinds for name, shape in model.items()}


@contextmanager
def measured(what: str) -> Iterator[None]:
    seconds, memory = time.process_time(), resident()
    yield
    seconds, memory = time.process_time() - seconds, resident() - memory
    print(f"{what:45}{seconds:8.2f} s {memory / 2**20:8.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1024)
    ranks = parser.parse_args().ranks
    rank = ranks // 2
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=ranks)
    mesh, world = init_device_mesh("cpu", (ranks,)), dist.group.WORLD
    assert world is not None
    every = {name: torch.empty(shape, device="meta") for name, shape in shapes().items()}
    own = {
        name: DTensor.from_local(
            tensor[: len(chunk(len(tensor), ranks, rank))],
            mesh,
            [Shard(0)],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        for name, tensor in every.items()
    }
    messages = []
    for number in range(ranks):
        rows = {name: chunk(len(tensor), ranks, number) for name, tensor in every.items()}
        boxes = {name: (part.start, len(part)) for name, part in rows.items() if part}
        messages.append(pickle.dumps(written_boxes(boxes, every)))
    with measured("save, each rank: plan"):
        planned = plan(own, {}, world)
    assert pickle.dumps(planned.written) == messages[rank]
    with measured("save, rank 0: index"):
        index = index_of(every, [pickle.loads(message) for message in messages])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / files.INDEX).write_bytes(index)
        with measured("resume, each rank: index"):
            open_tensors(Path(folder), own)
    print(f"{len(every)} tensors, {ranks} ranks, {len(messages[rank])} bytes from each rank")
    print(f"{files.INDEX}: {len(index) / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
