"""Saves checkpoints under every strategy on 1 to 4 ranks, and loads each one under every other.

It also tests asynchronous saves, failing saves and damaged checkpoints.

    torchrun --nproc-per-node 4 checkpoint_worker.py FOLDER quick|all

Writes results.json to FOLDER.
"""

import errno
import faulthandler
import functools
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.checkpoint import files
from launcher.checkpoint.reader import find_checkpoint, load, read_local
from launcher.checkpoint.state import model_and_optimizer, rank_state, restore_rank_state
from launcher.checkpoint.writer import Checkpointer, checkpoint_group
from launcher.distributed.rank_layout import RankLayout
from launcher.models.build import build_model
from launcher.models.description import describe
from launcher.models.load import starting_weights
from launcher.models.lora import add_adapters
from launcher.optimizers.optimizer import create_state, make_optimizer
from launcher.recipe import schema
from launcher.recipe.load import load_recipe
from launcher.strategies.wrap import Parts, wrap
from tests.distributed.launching import end_worker
from tests.distributed.messages import logged

CPU = torch.device("cpu")
RECIPE = """
run: {name: checkpoints, max_steps: 10, seed: 7}
model:
  config: {model_type: llama, vocab_size: 61, hidden_size: 32, intermediate_size: 44, num_hidden_layers: 2, num_attention_heads: 4,
           num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}
data: {kind: tokens, train: FOLDER/rows.jsonl, sequence_length: 32, packing: false}
batch: {global_batch_size: 12, micro_batch_size: 1}
strategy: {mixed_precision: null}
optimizer: {learning_rate: 2.0e-3}
"""
OFFLOAD = ["strategy.cpu_offload={pin_memory: true}", "activation_checkpointing={mode: full}"]
STRATEGIES = {
    "ddp": ["strategy.kind=ddp"],
    "fsdp": [],
    "offload": OFFLOAD,
    "hybrid": ["strategy.replicate=2"],
    "state": ["strategy.cpu_offload={what: optimizer}"],
    "in files": ["strategy.cpu_offload={what: optimizer, optimizer_path: FOLDER/state}"],
    "zero": ["strategy.kind=ddp", "strategy.shard_optimizer=true"],
}
RUNS = {
    "all": [
        *(("ddp", 4), ("fsdp", 4), ("hybrid", 4), ("zero", 3), ("offload", 2), ("ddp", 1)),
        *(("state", 2), ("in files", 3)),
    ],
    "quick": [("fsdp", 4), ("zero", 3), ("offload", 2), ("ddp", 1), ("in files", 3)],
}
LORA = ["lora={rank: 2}"]  # fewer rows than four ranks: two ranks have empty shards
MUON = ["optimizer.state_dtype=int8", "optimizer.name=muon"]


def unsharded(tensors):
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in tensors.items()
    }


class Run:
    """A model on the first `size` ranks, and its checkpointer."""

    def __init__(self, worker, strategy, size, *, overrides=(), asynchronous=True, folder=None):
        self.name, self.size, self.takes_part = f"{strategy}@{size}", size, worker.rank < size
        self.folder = worker.folder / (folder or f"{self.name}{''.join(overrides)[:4]}")
        if not self.takes_part:
            return
        file = worker.folder / f"recipe_{worker.rank}.yaml"
        file.write_text(RECIPE.replace("FOLDER", str(worker.folder)))
        arguments = [
            f"recipe={file}",
            f"batch.global_batch_size={size}",
            *(one.replace("FOLDER", str(worker.folder)) for one in STRATEGIES[strategy]),
            *overrides,
        ]
        self.recipe = recipe = load_recipe(arguments, ranks=size).recipe
        self.ranks = RankLayout(rank=worker.rank, size=size, group=worker.groups[size], device=CPU)
        self.group = worker.checkpoint_groups[size]
        model = build_model(recipe.model, sequence_length=32, labels=None)
        blocks = describe(model).blocks
        init_fn, *_ = starting_weights(recipe.model, model, seed=size)
        if recipe.lora is not None:
            add_adapters(model, recipe.lora, base_dtype=torch.float32)
        self.wrapped = wrap(
            model,
            Parts(blocks),
            strategy=recipe.strategy,
            checkpointing=recipe.activation_checkpointing,
            ranks=self.ranks,
            init_fn=init_fn,
        )
        self.optimizer = make_optimizer(
            self.wrapped.module,
            recipe.optimizer,
            optimized=self.wrapped.optimized,
            cpu_offload=recipe.strategy.cpu_offload,
            blocks=blocks.values(),
        )
        self.checkpointer = Checkpointer(
            self.folder,
            schema.Checkpoint(asynchronous=asynchronous),
            group=self.group,
            device=CPU,
        )

    def step(self):
        ids = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(self.ranks.rank))
        with self.wrapped.micro_batch(last=True):
            self.wrapped.call(lambda model: model(input_ids=ids, labels=ids).loss).backward()
        self.checkpointer.wait_staged()
        self.wrapped.before_step()
        self.optimizer.step()
        self.wrapped.after_step()
        self.optimizer.zero_grad()

    def tensors(self):
        return model_and_optimizer(self.wrapped.module, self.optimizer)

    def save(self, step):
        self.checkpointer.save(
            step, self.tensors(), state={"step": step}, local=rank_state(self.wrapped.module, CPU)
        )

    def finish(self):
        (outcome,) = self.checkpointer.finish()
        return outcome


class Worker:
    def __init__(self, folder):
        dist.init_process_group("gloo")
        self.folder, self.rank = folder, dist.get_rank()
        self.groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3, 4)}
        self.checkpoint_groups = {
            size: dist.new_group(list(range(size)), backend="gloo") for size in (1, 2, 3)
        }
        self.checkpoint_groups[4] = checkpoint_group(
            RankLayout(rank=self.rank, size=4, group=self.groups[4], device=CPU)
        )
        self.results = {}
        if self.rank == 0:
            (folder / "rows.jsonl").write_text('{"input_ids": [1, 2]}\n')
        dist.barrier()

    def note(self, **more):
        """Stores for each name the list of the values of all ranks."""
        for name, value in more.items():
            found = [None] * 4
            dist.all_gather_object(found, value)
            self.results[name] = found


def deviation(found, expected):
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(
        (found[name].double() - expected[name].double()).abs().max().item() for name in found
    )


def load_every_pair(worker, amount):
    """Loads the checkpoint of each run into every other run."""
    for index, overrides in enumerate(((), LORA, MUON)):
        chosen = RUNS[amount] if index == 0 else [("fsdp", 4), ("ddp", 2), ("zero", 3)]
        runs = [
            Run(worker, *which, overrides=overrides, asynchronous=number % 3 != 2)
            for number, which in enumerate(chosen)
        ]
        deviations, names = {}, []
        for source in runs:
            shared: list[Any] = [None]
            if source.takes_part:
                for _ in range(2):
                    source.step()
                source.save(7)
                outcome = source.finish()
                assert outcome.error is None, outcome
                expected, names = unsharded(source.tensors()), sorted(source.tensors())
                assert expected[names[-1]] >= 2, names[-1]
                shared = [(expected, str(outcome.path))]
            dist.broadcast_object_list(shared, src=0)
            ((expected, path),) = shared
            for target in runs:
                if target.takes_part and target is not source:
                    tensors = target.tensors()
                    before = deviation(unsharded(tensors), expected)
                    assert find_checkpoint(source.folder, group=target.group) == Path(path)
                    load(Path(path), tensors, group=target.group)
                    deviations[f"{source.name} -> {target.name}"] = deviation(
                        unsharded(tensors), expected
                    )
                    assert before > 0
                    if target.recipe.strategy.cpu_offload is None:
                        target.optimizer.state.clear()
                        create_state(target.optimizer)
                    with torch.no_grad():
                        for tensor in target.tensors().values():
                            if tensor.is_floating_point():
                                tensor.mul_(1.5).add_(0.01)
            if (
                source.takes_part
            ):  # checkpoints of other runs were loaded into it, and will be again
                load(Path(path), source.tensors(), group=source.group)
                source.step()
                after = unsharded(source.tensors())
                load(Path(path), source.tensors(), group=source.group)
                source.step()
                resumed = unsharded(source.tensors())
                if source.size > 1:
                    same = all(torch.equal(resumed[name], after[name]) for name in after)
                    deviations[f"{source.name} resumed"] = 0.0 if same else 1.0
            dist.barrier()
        worker.note(**{f"deviations{index}": deviations, f"names{index}": names})


def save_asynchronously(worker):
    """Asynchronous saves contain the state at the time of the call, even if the copy is slow.

    A save waits for the previous one. The states of random number generators are restored.
    """
    run = Run(worker, "fsdp", 4, folder="asynchronous")
    stage, polled = Checkpointer._stage, threading.Event()

    def slow(*arguments):
        polled.wait()
        time.sleep(0.3)
        stage(*arguments)

    run.step()
    expected = unsharded(run.tensors())
    torch.manual_seed(worker.rank)
    Checkpointer._stage = slow
    run.save(1)
    early = run.checkpointer.poll()
    polled.set()
    drawn = torch.rand(3)
    run.step()
    Checkpointer._stage = stage
    changed = deviation(unsharded(run.tensors()), expected)
    run.save(2)  # waits for the first
    first = run.checkpointer.poll()
    second = run.finish()
    load(first[0].path, run.tensors(), group=run.group)
    snapshot = deviation(unsharded(run.tensors()), expected)
    restore_rank_state(read_local(first[0].path, worker.rank), run.wrapped.module, CPU)
    worker.note(
        snapshot=snapshot,
        changed=changed,
        early=len(early),
        blocked=first[0].blocked,
        ended=[first[0].step, first[0].error, second.step, second.error],
        random=torch.equal(torch.rand(3), drawn),
    )
    # A synchronous save writes the same bytes
    run.save(3)
    third = run.finish().path
    other = Checkpointer(
        run.folder,
        schema.Checkpoint(asynchronous=False),
        group=run.group,
        device=CPU,
    )
    other.save(4, run.tensors(), state={}, local=rank_state(run.wrapped.module, CPU))
    (fourth,) = other.finish()
    name = files.rank_file(worker.rank)
    worker.note(
        same_bytes=(third / name).read_bytes() == (fourth.path / name).read_bytes(),
    )
    dist.barrier()
    worker.note(listed=sorted(os.listdir(run.folder)))
    return run


def fail_saves(worker, run):
    """Failing saves.

    The disk of rank 2 is full, rank 0 cannot create the folder, and another job owns the folder.
    """
    pwrite, notes = os.pwrite, []

    def full(descriptor, data, at):
        raise OSError(errno.ENOSPC, "No space left on device")

    def attempt(step):
        run.save(step)
        outcome = run.finish()
        dist.barrier()
        found = find_checkpoint(run.folder, group=run.group)
        notes.append(
            [
                outcome.error,
                outcome.path is None,
                run.checkpointer.failures,
                found.name,
                sorted(os.listdir(run.folder)),
            ]
        )
        dist.barrier()  # before the next save creates its temporary folder

    os.pwrite = full if worker.rank == 2 else pwrite
    attempt(10)
    attempt(11)
    os.pwrite = pwrite
    run.checkpointer.folder = run.folder / "step_00000004" / "commit.json" / "x"
    attempt(12)
    run.checkpointer.folder = run.folder
    calls = []

    def lose_lock():
        calls.append(1)
        if len(calls) == 2:  # just before the commit
            raise PermissionError("another job owns this folder")

    run.checkpointer._before_write = lose_lock
    attempt(13)
    attempt(14)
    worker.note(
        failed_saves=notes,
        threads=[
            thread.name for thread in threading.enumerate() if thread.name.startswith("save step")
        ],
    )


def damage_checkpoints(worker, run):
    """Flips a bit in the newest checkpoint, in one rank's file: all ranks select the older one.

    Then damages the older one, too: no valid checkpoint is left.
    """
    found = []
    with logged() as messages:
        for step in (14, 4):
            if worker.rank == 0:
                file = run.folder / files.checkpoint_name(step) / files.rank_file(3)
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(data)
            dist.barrier()
            try:
                found.append(find_checkpoint(run.folder, group=run.group).name)
            except files.NoneLeftError as error:
                found.append(str(error))
    worker.note(messages=messages, found=found)


def main(folder, amount):
    # Shows where the ranks hang, before the time limit of the parent process (720 s)
    faulthandler.dump_traceback_later(700, exit=True)
    worker = Worker(folder)
    every_pair = functools.partial(load_every_pair, amount=amount)
    for name, part in (("every pair", every_pair), ("asynchronous", save_asynchronously)):
        started = time.monotonic()
        run = part(worker)
        print(f"{time.monotonic() - started:.2f} s  {name}")
    fail_saves(worker, run)
    damage_checkpoints(worker, run)
    end_worker(folder, worker.results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
