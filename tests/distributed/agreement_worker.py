"""Compares ranks before and during training, on four ranks.

    torchrun --nproc-per-node 4 agreement_worker.py FOLDER

Rank 0 writes results.json.
"""

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from launcher.checkpoint.replicas import Replicas
from launcher.distributed import process_group
from launcher.distributed.environment import read_environment
from launcher.distributed.process_group import gather
from launcher.errors import RecipeError, TrainingError
from launcher.models.shards import local_part
from launcher.recipe.load import load_recipe
from launcher.run import agreement
from tests.distributed.launching import end_worker


def problem(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (RecipeError, TrainingError) as error:
        return str(error)
    return ""


def compare(ranks):
    """What each kind of difference on rank 3 leads to."""
    recipe = load_recipe(["recipe=quickstart"], ranks=2).recipe
    last = ranks.rank == 3
    own = replace(
        recipe,
        run=replace(recipe.run, dir=f"/mnt/{ranks.rank}/run"),
        data=replace(
            recipe.data, cache=f"/local/{ranks.rank}", train=(f"/{ranks.rank}/a.txt",), workers=last
        ),
    )
    rate = replace(recipe, optimizer=replace(recipe.optimizer, learning_rate=0.5 if last else 0.1))
    os.environ["AGREEMENT_TOKEN"] = "b" if last else "a"
    words = ["model.builder=code:build", "model.config=null", "data.builder=code:build"]
    words += ["data.train=null", "data.validation=null", "data.tokenizer=null"]
    words += ["model.arguments.token=${oc.env:AGREEMENT_TOKEN}"]
    environment = load_recipe(["recipe=quickstart", *words], ranks=2).recipe
    fingerprints = {"files": {f"/{ranks.rank}/a": 9}, "content": "y" if last else "x"}
    data = SimpleNamespace(fingerprint=fingerprints, validation={})
    same = SimpleNamespace(fingerprint=fingerprints | {"content": "x"}, validation={})
    options = {"several_machines": True}
    recipes = partial(problem, agreement.compare_recipes, **options)
    versions = agreement._versions
    # Ranks 0 and 2 are the first ones of two machines, of which the second has another torch
    agreement._versions = lambda: versions() | {"version of torch": f"2.{ranks.rank}"}
    older = recipes(recipe, ranks, reads=ranks.rank in (0, 2))
    agreement._versions = lambda: {"rank": ranks.rank}
    unread = recipes(recipe, ranks, reads=ranks.rank == 0)
    agreement._versions = versions
    return {
        "own": recipes(own, ranks, reads=True),
        "rate": recipes(rate, ranks, reads=True),
        "environment": recipes(environment, ranks, reads=True),
        "older": older,
        "unread": unread,
        "data": problem(agreement.compare_content, recipe, data, ranks, reads=True, **options),
        "same": problem(
            agreement.compare_content, recipe, same, ranks, reads=ranks.rank in (0, 2), **options
        ),
    }


def replicas(ranks):
    """Checks of copies before and after a parameter of rank 3 changes."""
    found = {}
    for name, shape in (("ddp", None), ("fsdp", (1, 4)), ("hybrid", (2, 2))):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3).bfloat16())
        if shape is not None:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            fully_shard(model, mesh=mesh)
        tensors = {f"model.{key}": each.detach() for key, each in model.named_parameters()}
        copies = Replicas(tensors, ranks.group)
        found[name] = [copies.exist, problem(copies.check)]
        if ranks.rank == 3:
            weight = tensors["model.1.weight"]
            local = local_part(weight)
            local.view(torch.int16).flatten()[0:1].bitwise_xor_(1)  # the least bit
        found[name].append(problem(copies.check))
    return found


def main():
    folder = Path(sys.argv[1])
    group = process_group.process_group(read_environment(), device="cpu", init_timeout=60)
    with group as (ranks, _):
        everyone = gather(compare(ranks) | replicas(ranks), ranks.group)
        assert all(each == everyone[0] for each in everyone), "all ranks must agree"
        end_worker(folder, everyone[0])


if __name__ == "__main__":
    main()
