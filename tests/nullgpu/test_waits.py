"""Steps without logging do not wait for the device, allocate memory or use other devices."""

import json
import random
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.distributed.launching import torchrun
from tests.image_models import NEEDS, make_image, make_model
from tests.run_files import write_lines

LAYERS = 2
PARAMETERS = 9 * LAYERS + 3
"""Number of parameter tensors of the model."""
RECIPE = {
    "run": {"name": "waits", "max_steps": 8, "max_skipped_steps": 100},
    "model": {
        "config": {
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        }
    },
    "data": {"tokenizer": "bytes", "sequence_length": 512, "workers": 0},
    "batch": {"micro_batch_size": 2},
    "strategy": {
        "kind": "fsdp",
        "mixed_precision": {"param_dtype": "bfloat16"},
        "reshard_after_forward": True,
        "sync_every_micro_batch": True,
    },
    "logging": {"every_steps": 5},
    "checkpoint": {"every_steps": None},
}
PADDED = ["data.packing=false", "data.train=[padded.jsonl]"]
DDP = ["strategy.kind=ddp", "strategy.sync_every_micro_batch=auto", "run.max_steps=14"]
STATE = "strategy.cpu_offload={what: optimizer}"
OFFLOAD = ["strategy.cpu_offload={pin_memory: true}"]
TO_HOST = [
    "activation_checkpointing={mode: full, offload_to_cpu: true}",
    "model.config.num_hidden_layers=4",
]
SHARED = ["strategy.context_parallel_size=2", "run.max_steps=12"]
STAGES = ["strategy.pipeline_parallel_size=2", "run.max_steps=12"]
LAYERS_OVER_RANKS = ["strategy.tensor_parallel_size=2", "run.max_steps=12"]
EXPERTS = [
    "strategy.expert_parallel_size=2",
    "run.max_steps=12",
    "model.config.model_type=qwen3_moe",
    "model.config.head_dim=16",
    "model.config.num_experts=4",
    "model.config.num_experts_per_tok=2",
    "model.config.moe_intermediate_size=64",
]
RECURRENT = [
    "model.config.model_type=qwen3_5_text",
    "model.config.head_dim=16",
    "model.config.layer_types=[linear_attention, full_attention]",
    "model.config.linear_num_key_heads=2",
    "model.config.linear_num_value_heads=2",
    "model.config.linear_key_head_dim=16",
    "model.config.linear_value_head_dim=16",
]
"""Without the kernels of its layers: documents become padded rows of them."""
REDUCE_ONCE = ["strategy.sync_every_micro_batch=false"]
STEADY = 7
"""First steady step. Earlier steps allocate memory, reorder DDP's buckets and pin memory for
records."""
TIMED = 11
"""Up to this step, DDP waits for its own timers eight times per step. torch cannot disable that."""


def run_trainings(folder, gpus, trainings, *, ranks):
    """Runs the trainings with two micro-batches per step; returns each rank's log, by training."""
    rng = random.Random(0)
    for name, lengths in (("packed", [127] * 400), ("padded", rng.choices([300, 500], k=300))):
        rows = ({"text": "".join(rng.choices("abcdefgh ", k=length))} for length in lengths)
        write_lines(folder / f"{name}.jsonl", rows)
    recipe = json.loads(json.dumps(RECIPE))
    recipe["batch"]["global_batch_size"] = 4 * ranks
    recipe["data"]["train"] = ["packed.jsonl"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    all_arguments = {
        name: ["recipe=recipe.yaml", f"run.dir={folder}/{name.partition('-')[0]}", *arguments]
        for name, arguments in trainings.items()
    }
    script = Path(__file__).parent / "trainings.py"
    torchrun(
        script, json.dumps(all_arguments), ranks=ranks, timeout=300, cwd=folder, **gpus.variables
    ).check()
    found = []
    for log in gpus.ranks():
        parts = {}
        for event in log.events:
            if event.kind == "mark" and event.arguments[0] == "training":
                parts[event.arguments[1]] = []
            elif parts:
                parts[list(parts)[-1]].append(event)
        found.append({name: replace(log, events=events) for name, events in parts.items()})
    assert len(found) == ranks
    assert all(list(parts) == list(trainings) for parts in found)
    return found


def unexpected(log, *, every_steps=5, first=STEADY, each_step=None, pageable=False, grows=False):
    """Lists the unexpected waits and allocations of a rank, from step `first` on.

    The numbers of a logged step are read with one wait after the next step was launched, so the
    wait is logged one step later. each_step: waits expected in every step, by what is waited for. grows:
    the caches of memory may still grow.
    """
    steps, found = log.steps(), []
    last = max(steps)
    for step in range(first, last + 1):
        logged = (step - 2) % every_steps == 0
        waits = Counter(each_step or {}) + Counter({"event": 1} if logged else {})
        if log.waits(step) != waits:
            found.append(f"step {step} waits for {dict(log.waits(step))}, not {dict(waits)}")
        taken = [
            event.kind
            for event in steps[step]
            if event.kind in ("free", "unpin", "refuse")
            or (event.kind in ("allocate", "pin") and not grows)
        ]
        taken += [event.kind for event in steps[step] if event.kind == "pageable" and not pageable]
        if taken:
            found.append(f"step {step}: {dict(Counter(taken))}")
    return found


def check(found, checks):
    failures = [
        f"rank {rank}, {name}: {what}"
        for rank, parts in enumerate(found)
        for name, options in checks.items()
        for what in unexpected(parts[name], **options)
    ]
    assert not failures, "\n".join(failures)


# With CPU offload, FSDP2 waits after the last backward pass for the copy of each gradient, and the
# optimizer on the host for the number of targets, which is 0 if the step must change nothing
COPY_WAITS = {"event": PARAMETERS, "copy": 1}
# With a second reduction, each gradient is copied twice, and the host adds it
ADD_WAITS = COPY_WAITS | {"event": 2 * PARAMETERS}


def test_two_ranks_have_no_unexpected_waits(null_gpus, tmp_path):
    """No strategy has unexpected waits.

    Each rank uses only its own device, also with checkpoints, evaluation, loader processes, export
    and resume.
    """
    gpus = null_gpus(count=2)
    everything = ["data.workers=1", "data.validation=[padded.jsonl]", "evaluation={every_steps: 3, max_batches: 2}",
                  "checkpoint={every_steps: 2, export: at_end}"]  # fmt: skip
    found = run_trainings(
        tmp_path,
        gpus,
        {
            "hybrid_padded": ["strategy.replicate=2", *PADDED],
            "fsdp_packed": ["run.max_steps=12"],
            "fsdp_padded": [*PADDED, "logging.every_steps=1", "run.max_steps=12"],
            "ddp_padded": [*DDP, *PADDED],
            "everything": [*everything, "run.max_steps=4"],
            "everything-resumed": [*everything, STATE, "run.max_steps=7"],
            "offload_packed": [*OFFLOAD, *REDUCE_ONCE, "logging.every_steps=1"],
            "activations_on_the_host": [*TO_HOST, "logging.every_steps=1"],
            "state_on_the_host": [STATE, "logging.every_steps=1"],
            "shared": SHARED,
        },
        ranks=2,
    )
    check_contexts(gpus)
    check(
        found,
        {
            "hybrid_padded": {},
            "fsdp_packed": {},
            # Widths of rows change, and the allocator may need one more segment for a new order
            "fsdp_padded": {"every_steps": 1, "first": STEADY + 3},
            "ddp_padded": {"first": TIMED + 1},
            "offload_packed": {"each_step": COPY_WAITS, "pageable": True, "every_steps": 1},
            "activations_on_the_host": {"every_steps": 1},
            "state_on_the_host": {"every_steps": 1},
            "shared": {},
        },
    )
    check_order(found, ranks=2)
    for parts in found:
        timed = [sum(parts["ddp_padded"].waits(step).values()) for step in range(STEADY, TIMED + 1)]
        assert max(timed) <= 9, f"DDP waits {timed} times for its timers"
        assert list(parts["everything-resumed"].steps()) == [5, 6, 7]
        log = parts["everything"]
        assert any(event.thread != log.main_thread for event in log.of_kind("wait")), (
            "the checkpoint is not copied in a separate thread"
        )


def collectives(found, name, *, ranks):
    """Counts the collectives of a steady step by name, size of the group and bytes.

    The ranks launch them in one order. Those of different communicators could otherwise wait for
    each other for ever.
    """
    orders = []
    for parts in found:
        calls = [event for event in parts[name].steps()[STEADY] if event.kind == "nccl"]
        orders.append([(call, of, size) for call, _, of, size in (e.arguments for e in calls)])
    assert len(orders) == ranks
    assert all(order == orders[0] for order in orders)
    return Counter(orders[0])


def check_order(found, *, ranks):
    """The collectives of context and tensor parallel ranks (both: in four micro-batches of
    2 x 512 tokens) and of expert parallel ranks (in two), beside those of FSDP."""
    counts, tokens = {}, 2 * 512
    for name in {"shared", "layers", "experts"} & set(found[0]):
        counts = collectives(found, name, ranks=ranks)
        pair, calls = "ranks=2", Counter()
        for (call, of, _), count in counts.items():
            calls[call, of] += count
        if ranks > 2 or name == "shared":
            assert calls["all_gather", pair if name != "shared" else f"ranks={ranks}"] > 2 * LAYERS
        if name == "shared":
            # Queries, keys, values and outputs, and in the backward pass their gradients
            assert calls["all_to_all", pair] == 4 * LAYERS * 2 * 4
        elif name == "layers":
            # The outputs of attention and MLP, and in the backward pass the gradients of their
            # inputs, in bfloat16. Newer plans of transformers than 5.17's divide the embedding, too
            sums = counts["all_reduce", pair, f"bytes={tokens * 64 * 2}"]
            assert sums in (4 * 4 * LAYERS, 4 * (4 * LAYERS + 1))
        else:
            # The numbers of rows. The rows and their results, half of them to each rank, and in the
            # backward pass their gradients
            assert calls["all_to_all", pair] == 2 * LAYERS
            rows = f"bytes={tokens // 2 * 2 * 64 * 2}"
            assert counts["send", pair, rows] == 2 * LAYERS * 4 * 2


def check_contexts(gpus):
    """Each rank has a context on its own device only. torchrun and loader processes have none."""
    for log in gpus.logs():
        own = {log.rank} if log.of_kind("mark") else set()
        assert log.contexts == own, (log.rank, log.process, log.contexts)


@pytest.mark.long
def test_one_rank_has_no_unexpected_waits(null_gpus, tmp_path):
    trainings = {
        "fsdp": PADDED,
        "ddp": DDP,
        "offload": OFFLOAD,
        "offload_padded": [*OFFLOAD, *REDUCE_ONCE, *PADDED],
        "recurrent": RECURRENT,
    }
    found = run_trainings(tmp_path, null_gpus(count=1), trainings, ranks=1)
    offload = {"pageable": True}
    check(
        found,
        {
            "fsdp": {},
            "ddp": {},
            "recurrent": {},
            "offload": {"each_step": ADD_WAITS, **offload},
            "offload_padded": {"each_step": COPY_WAITS, **offload},
        },
    )


def test_stages_have_no_unexpected_waits(null_gpus, tmp_path):
    """Transfers between stages are launched like other kernels: the host waits for none."""
    gpus = null_gpus(count=2)
    found = run_trainings(tmp_path, gpus, {"stages": STAGES}, ranks=2)
    check(found, {"stages": {}})
    check_contexts(gpus)


FOUR_RANKS = {
    "hybrid": ["strategy.replicate=2"],
    "shared": SHARED,
    "layers": LAYERS_OVER_RANKS,
    "nf4": [
        *(*LAYERS_OVER_RANKS, "lora={rank: 4, quantize: nf4}", "model.config.hidden_size=128"),
        "model.config.intermediate_size=128",
    ],
    "experts": EXPERTS,
    "stages": [
        *STAGES,
        "strategy.pipeline_schedule=interleaved_1f1b",
        "model.config.num_hidden_layers=4",
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_groups_of_four_ranks_have_no_unexpected_waits(null_gpus, tmp_path, name):
    """One training for each process: in a second one, split_group of torch 2.13 crashes here."""
    # On older GPUs, torch's products of groups of rows wait for the device
    gpus = null_gpus(count=4, capability=90 if name == "experts" else 80)
    found = run_trainings(tmp_path, gpus, {name: FOUR_RANKS[name]}, ranks=4)
    # In each layer and micro-batch, the host needs the numbers of rows for each rank
    waits = {"copy": 2 * LAYERS} if name == "experts" else None
    check(found, {name: {"each_step": waits}})
    if name not in ("hybrid", "stages"):  # each stage has collectives of its own
        check_order(found, ranks=4)
    check_contexts(gpus)


def test_towers_of_images_have_no_unexpected_waits(null_gpus, tmp_path):
    """The host knows the sizes of images, and where their tokens are. A rank without images computes
    the tower on a blank one."""
    picture = make_image(tmp_path / "picture.png").name
    for name, image in (("pictures", True), ("words", False)):
        question = {"role": "user", "content": "<image>What is it?" if image else "What is it?"}
        turns = [question, {"role": "assistant", "content": "It is an image of many colours."}]
        row = {"messages": turns} | ({"images": [picture]} if image else {})
        write_lines(tmp_path / f"{name}.jsonl", [row] * 400)
    frozen = ["images.train=none", "data.packing=false"]
    cases = {
        "qwen2_5_vl_all": [],
        "qwen2_5_vl_blank": ["data.train=[words.jsonl]"],
        "qwen3_vl_all": [],
        "qwen3_vl_frozen": frozen,
        "gemma3_all": [],
        "gemma3_frozen": frozen,
        "gemma4_all": [],
        "gemma4_frozen": frozen,
        "idefics3_all": [],
        "idefics3_frozen": frozen,
        "internvl_all": [],
        "internvl_frozen": frozen,
        "mistral3_all": [],
        "mistral3_frozen": frozen,
        "smolvlm_all": [],
    }
    missing = {family for family, needs in NEEDS.items() if not all(map(find_spec, needs))}
    cases = {name: case for name, case in cases.items() if name.split("_")[0] not in missing}
    trainings = {}
    for name, changes in cases.items():
        folder = make_model(tmp_path / name.rpartition("_")[0], name.rpartition("_")[0])
        data = ["data.tokenizer=null", "data.kind=chat", "data.train=[pictures.jsonl]"]
        model = ["model.config=null", f"model.path={folder}", "images={train: all}"]
        trainings[name] = [*model, *data, "run.max_steps=10", *changes]
    found = run_trainings(tmp_path, null_gpus(count=2), trainings, ranks=2)
    # A micro-batch has some twenty tensors, whose pinned memory is free again at varying times
    check(found, {name: {"grows": True} for name in cases})
