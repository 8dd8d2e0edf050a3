"""Runs that train layers of multi-token prediction: on other divisions, resumed, exported, and learning."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from tests import REPOSITORY
from tests.distributed.launching import forked
from tests.run_files import read_lines

TRAIN = REPOSITORY / "launcher/train.py"
RECIPE = """
run: {name: mtp, max_steps: 6, seed: 3}
model:
  mtp: {weight: 0.3, detach: false}
  config: {model_type: deepseek_v3, vocab_size: 64, hidden_size: 32, intermediate_size: 48, moe_intermediate_size: 16,
    num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 4, n_routed_experts: 4, num_experts_per_tok: 2, n_group: 1,
    topk_group: 1, first_k_dense_replace: 1, kv_lora_rank: 8, q_lora_rank: 8, qk_rope_head_dim: 8, v_head_dim: 8,
    qk_nope_head_dim: 8, max_position_embeddings: 64, num_nextn_predict_layers: 2}
data: {kind: tokens, train: [FOLDER/train.jsonl], validation: [FOLDER/validation.jsonl], sequence_length: 32,
  cache: FOLDER/cache}
batch: {global_batch_size: 8, micro_batch_size: 8}
strategy: {kind: ddp, mixed_precision: null}
optimizer: {learning_rate: 2.0e-3, max_grad_norm: null}
schedule: {kind: constant, warmup_steps: 2}
evaluation: {every_steps: 3}
checkpoint: {every_steps: 3, export: at_end}
"""
OFFLOAD = ["strategy.kind=fsdp", "strategy.cpu_offload={pin_memory: true}"]
CONTEXT = ["strategy.kind=fsdp", "strategy.context_parallel_size=2"]
RING = [*CONTEXT, "strategy.context_parallel_ring=2"]
DIVISIONS = {
    "ddp": (2, ["batch.micro_batch_size=2"]),
    "sharded optimizer": (2, ["batch.micro_batch_size=4", "strategy.shard_optimizer=true"]),
    "fsdp": (2, ["strategy.kind=fsdp", "batch.micro_batch_size=2"]),
    "one rank of fsdp": (1, ["strategy.kind=fsdp", "batch.micro_batch_size=4"]),
    "ZeRO-2": (
        2,
        ["strategy.kind=fsdp", "strategy.reshard_after_forward=false", "batch.micro_batch_size=1"],
    ),
    "checkpointed": (
        2,
        ["strategy.kind=fsdp", "activation_checkpointing.mode=full", "batch.micro_batch_size=2"],
    ),
    "offload": (
        2,
        [*OFFLOAD, "activation_checkpointing={mode: selective}", "batch.micro_batch_size=2"],
    ),
    "padded": (2, ["strategy.kind=fsdp", "data.packing=false", "batch.micro_batch_size=1"]),
    "context": (2, [*CONTEXT, "batch.micro_batch_size=2"]),
    "context, ddp": (2, [*CONTEXT, "strategy.kind=ddp", "batch.micro_batch_size=4"]),
    "context, two shards": (4, [*CONTEXT, "batch.micro_batch_size=2"]),
    "context, padded": (2, [*CONTEXT, "data.packing=false", "batch.micro_batch_size=2"]),
    "ring": (2, [*RING, "activation_checkpointing.mode=full", "batch.micro_batch_size=4"]),
    "ring, two copies": (
        4,
        [*RING, "strategy.replicate=2", "data.workers=1", "batch.micro_batch_size=2"],
    ),
    "ring of four": (
        4,
        [*RING, "strategy.context_parallel_size=4", "strategy.context_parallel_ring=4"],
    ),
    "ring of groups": (
        4,
        [*RING, "strategy.context_parallel_size=4", "activation_checkpointing.mode=selective"],
    ),
    "ring, padded": (2, [*RING, "data.packing=false", "batch.micro_batch_size=2"]),
}
QUICK = ("ddp", "checkpointed", "offload", "context", "ring")


def write(file, count, *, seed, longest=40, step=None):
    """Rows of tokens; `step`: each is the one before plus a number of the row, modulo 64."""
    generator, lines = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        length = int(torch.randint(2, longest, (1,), generator=generator))
        ids = torch.randint(64, (length,), generator=generator)
        if step is not None:
            first, by = torch.randint(64, (2,), generator=generator)
            ids = (first + (by % step + 1) * torch.arange(length)) % 64
        labels = ids.clone()
        if step is None:
            labels[torch.rand(length, generator=generator) < 0.3] = -100
        lines.append(json.dumps({"input_ids": ids.tolist(), "labels": labels.tolist()}))
    file.write_text("\n".join(lines) + "\n")


def prepare(folder, **data):
    write(folder / "train.jsonl", 60, seed=1, **data)
    write(folder / "validation.jsonl", 12, seed=2, **data)
    (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))


def trained(folder, name, *overrides, ranks=1):
    found = folder / name
    words = [TRAIN, f"recipe={folder}/recipe.yaml", f"run.dir={found}", *overrides]
    forked(*words, ranks=ranks, timeout=60).check()
    return found


def weights(run):
    found = {}
    for file in sorted((run / "hf").glob("*.safetensors")):
        found |= load_file(file)
    return found


def records(run, key="loss"):
    return [line for line in read_lines(run / "metrics.jsonl") if key in line]


def values(run):
    steps = [[line[key] for key in ("loss", "grad_norm", "mtp_loss")] for line in records(run)]
    return torch.tensor(steps, dtype=torch.float64)


def evaluations(run):
    keys = ("eval_loss", "eval_mtp_loss", "eval_mtp_accuracy_1", "eval_mtp_accuracy_2")
    found = [[line[key] for key in keys] for line in records(run, "eval_loss")]
    return torch.tensor(found, dtype=torch.float64)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run on one rank, with one micro-batch in each step."""
    folder = tmp_path_factory.mktemp("mtp")
    prepare(folder)
    trained(folder, "whole")
    trained(folder, "whole padded", "data.packing=false")
    return folder


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in DIVISIONS],
)
def test_losses_do_not_depend_on_ranks_and_micro_batches(whole, name):
    ranks, words = DIVISIONS[name]
    expected = whole / ("whole padded" if name.endswith("padded") else "whole")
    run = trained(whole, re.sub(r"\W+", "_", name), *words, ranks=ranks)
    torch.testing.assert_close(values(run), values(expected), rtol=2e-6, atol=0)
    torch.testing.assert_close(evaluations(run), evaluations(expected), rtol=2e-6, atol=0)
    for key, tensor in weights(expected).items():
        torch.testing.assert_close(weights(run)[key], tensor, rtol=0, atol=2e-5, msg=key)


def test_resumed_bit_for_bit(whole):
    trained(whole, "resumed", "run.max_steps=3")
    run = trained(whole, "resumed", "run.max_steps=6")
    expected = weights(whole / "whole")
    assert weights(run).keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights(run)[name], tensor), name
    assert torch.equal(values(run), values(whole / "whole"))


@pytest.mark.long
@pytest.mark.parametrize("first", ["whole rows", "parts of rows"])
def test_resumed_with_other_parts_of_rows(whole, first):
    sizes = {"whole rows": (1, []), "parts of rows": (2, [*RING, "batch.micro_batch_size=4"])}
    name = first.replace(" ", "_")
    ranks, words = sizes.pop(first)
    trained(whole, name, "run.max_steps=3", *words, ranks=ranks)
    ranks, words = next(iter(sizes.values()))
    run = trained(whole, name, "run.max_steps=6", *words, ranks=ranks)
    torch.testing.assert_close(values(run), values(whole / "whole"), rtol=2e-6, atol=0)
    torch.testing.assert_close(evaluations(run), evaluations(whole / "whole"), rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ["batch.micro_batch_size=8"]),
        pytest.param(2, ["batch.micro_batch_size=4"], marks=pytest.mark.long),
        pytest.param(2, CONTEXT, marks=pytest.mark.long),
    ],
    ids=["1", "2", "context"],
)
def test_a_trunk_without_gradients_of_the_layers_trains_as_without_them(whole, ranks, words):
    words = ["strategy.kind=fsdp", *words]
    label = f"{ranks}_{len(words)}"
    runs = {
        name: trained(whole, f"{name}_{label}", setting, *words, ranks=ranks)
        for name, setting in {
            "detached": "model.mtp.detach=true",
            "without": "model.mtp=null",
            "only": "model.mtp.only=true",
            "frozen": "model.mtp.train=false",
        }.items()
    }
    found = {name: weights(run) for name, run in runs.items()}
    layers = {
        name for name in found["detached"] if name.startswith(("model.layers.2", "model.layers.3"))
    }
    assert found["without"].keys() == found["detached"].keys() - layers
    for name, tensor in found["without"].items():
        assert torch.equal(found["detached"][name], tensor), name
        assert torch.equal(found["frozen"][name], tensor), name
    first = trained(whole, f"first_{label}", *words, "optimizer.learning_rate=1.0e-30", ranks=ranks)
    start = weights(first)
    for name, tensor in start.items():
        bias = "e_score_correction_bias" in name
        assert torch.equal(found["only"][name], tensor) == (name not in layers or bias), name
        if name in layers:
            assert torch.equal(found["frozen"][name], tensor), name
            assert torch.equal(found["detached"][name], found["without"].get(name, tensor)) == bias
    assert "mtp_loss" not in records(runs["frozen"])[0]
    assert len(evaluations(runs["frozen"])) == 2


def test_adapters_of_the_trunk_and_whole_layers(whole):
    base = whole / "whole" / "hf"
    words = ["model.config=null", f"model.path={base}", "lora={rank: 2}", "strategy.kind=fsdp"]
    words += ["checkpoint.export_merged=true", "batch.micro_batch_size=2"]
    runs = [trained(whole, f"lora_{ranks}", *words, ranks=ranks) for ranks in (1, 2)]
    torch.testing.assert_close(values(runs[1]), values(runs[0]), rtol=5e-6, atol=0)
    before, after = weights(whole / "whole"), weights(runs[0])
    assert before.keys() == after.keys()
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    for name in ("model.layers.2.eh_proj.weight", "model.layers.1.self_attn.o_proj.weight"):
        assert not torch.equal(after[name], before[name])


@pytest.mark.long
def test_the_layers_learn_a_text_that_can_be_guessed(tmp_path):
    prepare(tmp_path, step=3, longest=30)
    words = ["run.max_steps=300", "optimizer.learning_rate=5.0e-3", "evaluation.at_start=true"]
    words += ["evaluation.every_steps=300", "checkpoint.every_steps=300", "model.mtp.detach=true"]
    words += ["data.repeat_in_step=true", "batch={global_batch_size: 16, micro_batch_size: 16}"]
    found = evaluations(trained(tmp_path, "run", *words))
    print(found)
    assert found[0, 2:].max() < 0.1
    assert found[-1, 2:].min() > 0.7
