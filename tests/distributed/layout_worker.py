"""Trains tiny models whose rows, layers or experts are divided over four ranks, and on one rank.

    torchrun --nproc-per-node 4 layout_worker.py FOLDER LAUNCH

LAUNCH is a key of LAUNCHES or of PARTS. Reads train.jsonl from FOLDER and writes results.json. A
DeviceMesh is collective over all processes, so each variant runs on all four ranks.
"""

import contextlib
import functools
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.checkpoint.layout import holders
from launcher.checkpoint.reader import load, open_tensors
from launcher.checkpoint.state import model_and_optimizer, rank_state
from launcher.checkpoint.writer import Checkpointer
from launcher.diagnostics.selftest import differing_copies
from launcher.distributed.rank_layout import RankLayout
from launcher.models import experts
from launcher.models import head as head_module
from launcher.models.safetensors_files import StoredTensors
from launcher.models.shards import local_part
from launcher.objectives.next_token import NextToken
from launcher.recipe import schema
from launcher.strategies.compilation import graphs
from launcher.training.setup import assemble
from tests.distributed.equivalence_worker import Worker, weights, whole
from tests.distributed.launching import end_worker
from tests.distributed.layouts import (
    CP,
    EP,
    FAULTS,
    LAUNCHES,
    MODELS,
    ONE_KEY_HEAD,
    SAVED,
    STEPS,
    TIED,
    TP,
    VARIANTS,
    WHOLE_HEADS,
    reference_of,
)
from tests.run_files import write_lines


class LayoutWorker(Worker):
    def __init__(self, folder, steps):
        super().__init__(folder)
        self.steps, self.config, self.references = steps, WHOLE_HEADS, {}
        self.run_plain_loop = lambda training: None  # the reference is one rank
        if self.rank == 0:
            write_lines(folder / "pairs.jsonl", map(pair, range(60)))
        dist.barrier()

    def train_case(self, name, model, overrides, *, ranks, rows, mutate=None):
        """Trains and evaluates. Stores also which parameters differ between ranks that hold the
        same parts of them."""
        own = ["data.packing=true", "data.validation=FOLDER/train.jsonl"]
        own += [f"run.max_steps={self.steps if mutate is None else 1}", *overrides]
        own = [each.replace("FOLDER", str(self.folder)) for each in own]
        own.append(f"batch.micro_batch_size={rows}")
        options = {"ranks": ranks, "config": MODELS[model], "compare": False, "mutate": mutate}
        self.train(name, own, evaluate=mutate is None, **options)

    def after(self, note, training):
        note["copies"] = list(differing_copies(training.wrapped.module, training.ranks.group))
        note["graphs"] = graphs()[0]

    def compare(self, model, variant):
        """Trains a variant on four ranks, and its reference unless that was done."""
        reference, own = reference_of(model, variant)
        if reference not in self.references:
            self.train_case(reference, model, ["strategy.kind=ddp", *own], ranks=1, rows=4)
            self.references[reference] = self.last if self.rank == 0 else None
        torch._dynamo.reset()
        counters.clear()
        self.train_case(f"{model} {variant}", model, VARIANTS[variant], ranks=4, rows=2)
        self.note_deviation(f"{model} {variant}", self.references[reference])

    def note_deviation(self, name, expected):
        if self.rank == 0:
            differences = ((self.last[k] - expected[k]).abs().max().item() for k in expected)
            self.results[name]["from_one_rank"] = max(differences)

    def plant(self, fault):
        """Trains a step of a variant with a fault."""
        model, variant, mutate = FAULTS[fault]
        before = NextToken.loss, experts._DividedGradient.backward
        self.train_case(fault, model, VARIANTS[variant], ranks=4, rows=2, mutate=mutate)
        NextToken.loss, experts._DividedGradient.backward = before

    def train_one(self, overrides, *, ranks):
        """Trains the model of the config, and returns the training; None on other ranks."""
        training = None
        if self.rank < ranks:
            training = assemble(
                self.recipe(overrides, ranks, 1, self.config),
                ranks=RankLayout(
                    rank=self.rank, size=ranks, group=self.groups[ranks], device=torch.device("cpu")
                ),
                build_data=self.rank == 0,
            )
            for _ in training.all_steps:
                pass
        dist.barrier()
        return training

    def train_from(self, layouts, overrides, expected=None):
        """Trains a step from files in each layout (ranks, overrides), and exports. Yields the name
        and the training of each, the weights and the exported folder."""
        for name, (ranks, layout) in layouts.items():
            own = ["model.config=null", "run.max_steps=1", "strategy.kind=fsdp"]
            training = self.train_one([*own, *overrides, *layout], ranks=ranks)
            if training is None:
                continue
            self.last, out = weights(training), self.folder / f"exported {name}"
            training.export(out)
            if expected is None and self.rank == 0:
                expected = self.last
            self.results[name] = {}
            self.note_deviation(name, expected)
            yield name, self.last, out


def pair(number):
    """A row for preference tuning and for classification."""
    wrong = "pass" + " no" * (number % 5)
    row = {"prompt": f"def f{number}():\n ", "chosen": f"return {number}", "rejected": wrong}
    return row | {"label": "odd" if number % 2 else "even"}


def checkpoint_pairs(worker, model, variants):
    """Loads the checkpoint of each layout into each other one, exactly."""
    worker.config = MODELS[model]
    layouts = {"1 rank": (1, []), "no division": (4, [])}
    layouts |= {name: (4, VARIANTS[name]) for name in variants}
    trained = {}
    for number, (name, (ranks, overrides)) in enumerate(layouts.items()):
        kept = [f"run.seed={number}", "run.max_steps=1", "strategy.kind=fsdp", *overrides]
        trained[name] = worker.train_one(kept, ranks=ranks)
    for source, (ranks, _) in layouts.items():
        shared: list = [None, None]
        if worker.rank < ranks:
            training, group = trained[source], worker.groups[ranks]
            tensors, held = held_by(training)
            writer = Checkpointer(
                worker.folder / source.replace(" ", "_"),
                schema.Checkpoint(asynchronous=False),
                group=group,
                device=torch.device("cpu"),
                held=held,
            )
            local = rank_state(training.wrapped.module, torch.device("cpu"))
            writer.save(1, tensors, state={"step": 1}, local=local)
            (done,) = writer.finish()
            assert done.error is None, done.error
            shared = [whole(tensors, training.ranks), str(done.path)]
        dist.broadcast_object_list(shared, src=0)
        expected, path = shared
        stored = open_tensors(Path(path))  # as exports read it
        same = all(torch.equal(stored.read(name), expected[name]) for name in expected)
        worker.results[f"{source} -> export"] = same
        for target, (ranks, _) in layouts.items():
            if target != source and worker.rank < ranks:
                training, group = trained[target], worker.groups[ranks]
                tensors, held = held_by(training)
                with torch.no_grad():
                    for tensor in tensors.values():
                        local_part(tensor).fill_(7.0)
                load(Path(path), tensors, group=group, every=held.every)
                loaded = whole(tensors, training.ranks)
                equal = all(torch.equal(loaded[name], expected[name]) for name in expected)
                worker.results[f"{source} -> {target}"] = equal
        dist.barrier()


def held_by(training):
    """The tensors of this rank, and which ranks hold which."""
    tensors = model_and_optimizer(training.wrapped.module, training.optimizer)
    ranks = training.ranks
    first = ranks.rank - ranks.stage.rank
    stage = range(first, first + ranks.stage.size)
    return tensors, holders(tensors, stage=stage, group=ranks.group)


def save_pretrained(worker, config):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = worker.folder / "pretrained"
    if worker.rank == 0:
        torch.manual_seed(0)
        made = AutoConfig.for_model(**yaml.safe_load(config))
        AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    dist.barrier()
    return [f"model.path={folder}"]


def exports_what_it_has(out, trained):
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(out).state_dict()
    return all(torch.equal(exported[name], trained[name]) for name in trained)


@contextlib.contextmanager
def counting_reads():
    """Yields a list with how many numbers this rank has read from safetensors files."""
    read, original = [0], StoredTensors._file

    def counted(values):
        read[0] += values.numel()
        return values

    class Slice:
        def __init__(self, stored):
            self.stored = stored

        def __getitem__(self, index):
            return counted(self.stored[index])

    class File:
        def __init__(self, file):
            self.get_tensor = lambda name: counted(file.get_tensor(name))
            self.get_slice = lambda name: Slice(file.get_slice(name))

    StoredTensors._file = lambda self, path: File(original(self, path))
    yield read
    StoredTensors._file = original


def pretrained_layers(worker):
    """Loads a pretrained folder into layers with tensor parallelism, and counts the numbers that each rank reads."""
    layouts = {name: (4, VARIANTS[name][:1]) for name in ("tensor 2", "tensor 4", "context 2")}
    path = save_pretrained(worker, WHOLE_HEADS)
    with counting_reads() as read:
        for name, trained, out in worker.train_from({"1": (1, [])} | layouts, path):
            if worker.rank == 0:
                exported = exports_what_it_has(out, trained)
                worker.results[name] |= {"read": read[0], "exported": exported}
            read[0] = 0


def pretrained_experts(worker):
    """The same for divided experts; notes also which of them each rank reads."""
    names, original = set(), StoredTensors.read

    def recorded(self, name):
        names.update(re.findall(r"layers.0.*experts\.(\d+)", name))
        return original(self, name)

    layouts = {"1": (1, []), "experts 4": (4, [EP + "4"]), "experts 2": (4, [EP + "2"])}
    path = save_pretrained(worker, MODELS["mixtral"])
    StoredTensors.read = recorded
    with counting_reads() as read:
        for name, trained, out in worker.train_from(layouts, path):
            ranks = layouts[name][0]
            by_rank = [None] * ranks
            note = {"experts": sorted(names), "read": read[0]}
            dist.all_gather_object(by_rank, note, group=worker.groups[ranks])
            if worker.rank == 0:
                exported = exports_what_it_has(out, trained)
                worker.results[name] |= {"by_rank": by_rank, "exported": exported}
            names.clear()
            read[0] = 0
    StoredTensors.read = original


def adapters(worker):
    """Continues an adapter that four ranks have exported, which had trained whole modules, too."""
    layouts = {
        "1": (1, []),
        "tensor 2": (4, [TP + "2"]),
        "tensor 4": (4, [TP + "4"]),
        "context 2": (4, [CP + "2"]),
    }
    overrides = [*save_pretrained(worker, WHOLE_HEADS), "optimizer.learning_rate=0.1"]
    first = {"first": layouts["tensor 4"]}
    for name, trained, _ in worker.train_from(first, [*overrides, SAVED]):
        worker.results[name]["change"] = max(
            values.abs().max().item() for key, values in trained.items() if "lora_B" in key
        )
    dist.barrier()
    overrides.append(f"lora={{path: '{worker.folder / 'exported first'}'}}")
    for _ in worker.train_from(layouts, overrides):
        pass


PARTS = {
    "checkpoints of stages": lambda worker: checkpoint_pairs(
        worker, TIED, ("pipeline 2", "pipeline 4", "pipeline 2, tensor 2", "interleaved 2")
    ),
    "checkpoints of layers": lambda worker: checkpoint_pairs(
        worker,
        ONE_KEY_HEAD,
        ("tensor 2", "tensor 4", "tensor 2, 2 copies", "tensor 2, context 2"),
    ),
    "checkpoints of experts": lambda worker: checkpoint_pairs(
        worker, "qwen3_moe", ("experts 2", "experts 4", "experts 2, 2 copies")
    ),
    "pretrained layers": pretrained_layers,
    "pretrained experts": pretrained_experts,
    "adapters": adapters,
}


def main(folder, launch):
    # Chunks of 16 vocabulary entries
    head_module.WIDTH_MULTIPLE = head_module.CHUNK_ELEMENTS = 16
    worker = LayoutWorker(folder, STEPS[launch == "quick"])
    if launch.startswith("compiled"):  # a C++ compiler would take minutes
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    if launch in PARTS:
        PARTS[launch](worker)
    else:
        for case in LAUNCHES[launch]:
            worker.compare(*case)
    if launch == "quick":
        for fault in FAULTS:
            worker.plant(fault)
    end_worker(folder, worker.results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
