"""Training on pairs of answers: strategies, the reference of a run, and resumes."""

import shutil
import signal
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForSequenceClassification

from tests import REPOSITORY
from tests.distributed.launching import run, torchrun, wait_until
from tests.run_files import read_lines, status, write_lines

KILL_TRAIN = REPOSITORY / "tests/distributed/kill_train.py"
TRAIN = REPOSITORY / "launcher/train.py"
RECIPE = """
run: {name: pairs, max_steps: 6, seed: 7}
model: {config: {model_type: llama, vocab_size: 257, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
  num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 256}}
data: {kind: preference, train: [pairs.jsonl], validation: [far.jsonl], tokenizer: bytes, sequence_length: 192, prompt_format: text,
  workers: 0, cache: cache}
preference: {loss: dpo}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: fsdp, mixed_precision: null}
optimizer: {learning_rate: 1.0e-3}
schedule: {warmup_steps: 2, kind: constant}
evaluation: {every_steps: 3, at_start: true}
checkpoint: {every_steps: 3}
"""
COMPARED = ("loss", "eval_loss", "rewards/margins", "eval_rewards/margins", "logps/chosen")


def pair(number):
    wrong = "pass  # no" + " no" * (number % 5)
    return {"prompt": f"def f{number}():\n ", "chosen": f"return {number}", "rejected": wrong}


def train(folder, name, *overrides, ranks):
    words = ["recipe=pairs.yaml", f"run.dir=runs/{name}", *overrides]
    if ranks == 1:
        return run([sys.executable, TRAIN, *words], cwd=folder).check().output
    return torchrun(TRAIN, *words, ranks=ranks, cwd=folder).check().output


def lines(folder, name):
    kept = ("step", "loss", "grad_norm", "eval_loss", "loss_tokens")
    return [
        {key: value for key, value in line.items() if key in kept or "/" in key}
        for line in read_lines(folder / "runs" / name / "metrics.jsonl")
    ]


def assert_close(some, others):
    assert [line["step"] for line in some] == [line["step"] for line in others]
    for one, other in zip(some, others, strict=True):
        for key in one.keys() & set(COMPARED):
            assert one[key] == pytest.approx(other[key], rel=1e-6, abs=1e-6), (one["step"], key)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs on two ranks with FSDP, stopped after step 3, and on one with DDP to the end."""
    folder = tmp_path_factory.mktemp("pairs")
    write_lines(folder / "pairs.jsonl", [pair(number) for number in range(60)])
    write_lines(folder / "far.jsonl", [pair(number) for number in range(60, 70)])
    (folder / "pairs.yaml").write_text(RECIPE)
    train(folder, "two", "run.max_steps=3", ranks=2)
    train(folder, "one", "strategy.kind=ddp", "batch.micro_batch_size=4", ranks=1)
    return folder


@pytest.mark.long
def test_losses_and_rewards_do_not_depend_on_the_strategy(folder):
    one = lines(folder, "one")
    assert_close(lines(folder, "two"), one[:5])
    assert {line["loss_tokens"] for line in one if "loss" in line} == {8}  # pairs of a step
    train(folder, "padded", "data.packing=false", "batch.micro_batch_size=1", ranks=2)
    assert_close(lines(folder, "padded"), one)
    train(folder, "tokens", "batch={micro_batch_size: null, micro_batch_tokens: 400}", ranks=1)
    assert_close(lines(folder, "tokens"), one)
    assert one[0]["eval_loss"] == pytest.approx(0.693147, abs=1e-6)  # ln 2: nothing is trained yet
    assert one[-1]["eval_rewards/accuracies"] == 1.0
    assert one[-1]["eval_rewards/margins"] > 0.5


@pytest.mark.long
def test_a_resume_reads_the_reference(folder):
    """The file is the only source: the loss is another one if the file is, and a damaged file is
    computed again."""
    path = folder / "runs/two"
    shutil.copytree(path, folder / "runs/damaged")
    output = train(folder, "two", "strategy.kind=ddp", "run.max_steps=6", ranks=1)
    assert "reference: log-probabilities" not in output
    assert_close(lines(folder, "two"), lines(folder, "one"))
    file = folder / "runs/damaged/reference.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    output = train(folder, "damaged", "strategy.kind=ddp", "run.max_steps=6", ranks=1)
    assert "is damaged (its checksum differs): the reference is computed again" in output
    assert "reference: log-probabilities of 60 pairs" in output
    assert_close(lines(folder, "damaged"), lines(folder, "one"))


@pytest.mark.long
@pytest.mark.parametrize("packing", [True, False])
def test_an_interrupted_pass_goes_on(folder, packing):
    """Also with other sequences of the same pairs."""
    name, reached = f"stopped_{packing}", folder / f"reached_{packing}"
    words = ["recipe=pairs.yaml", f"run.dir=runs/{name}", "strategy.kind=ddp"]

    def during(process):
        assert wait_until(reached.exists, process=process), "the pass was not reached"
        process.send_signal(signal.SIGTERM)

    command = [sys.executable, KILL_TRAIN, *words, "data.packing=false"]
    run(command, cwd=folder, during=during, SLOW_PASS=f"{reached}:4").check(75)
    assert status(folder / "runs" / name)["state"] == "stopped"
    file = folder / "runs" / name / "reference.safetensors"
    [part] = load_file(file).values()
    assert np.isnan(part).any(1).sum() == 60 - 4 * 2
    words += [f"data.packing={packing}", "batch.micro_batch_size=4"]
    output = run([sys.executable, TRAIN, *words], cwd=folder).check().output
    assert "reference: log-probabilities of " in output
    assert packing or "reference: log-probabilities of 52 pairs" in output
    whole = load_file(folder / "runs/one/reference.safetensors")
    arrays = load_file(file)
    assert arrays.keys() == whole.keys()
    for key, array in arrays.items():
        np.testing.assert_allclose(array, whole[key], rtol=0, atol=1e-4)


@pytest.mark.long
def test_a_resume_gives_the_same_bits(folder):
    train(folder, "whole", ranks=2)
    train(folder, "parts", "run.max_steps=3", ranks=2)
    train(folder, "parts", "run.max_steps=6", ranks=2)
    assert lines(folder, "parts") == lines(folder, "whole")


@pytest.mark.long
@pytest.mark.parametrize("loss", ["simpo", "orpo", "ipo"])
def test_adapters_and_other_losses(folder, loss):
    words = (f"preference.loss={loss}", "lora.rank=4", "run.max_steps=3")
    train(folder, f"{loss}-two", *words, ranks=2)
    train(folder, f"{loss}-one", *words, "strategy.kind=ddp", "data.packing=true", ranks=1)
    assert_close(lines(folder, f"{loss}-two"), lines(folder, f"{loss}-one"))
    assert (folder / f"runs/{loss}-two/reference.safetensors").exists() == (loss == "ipo")


@pytest.mark.long
def test_a_reward_model(folder):
    """Losses and metrics do not depend on strategy, packing and ranks, nor on a resume with other
    ranks, and transformers loads the export with the weights that were evaluated."""
    rows = [pair(number) | {"gap": number / 30} for number in range(60)]
    write_lines(folder / "margins.jsonl", rows)
    write_lines(folder / "far_margins.jsonl", [pair(n) | {"gap": 1} for n in range(60, 70)])
    words = [
        *("model.task=reward", "preference=null", "data.train=[margins.jsonl]"),
        "data.validation=[far_margins.jsonl]",
        *("data.margin_column=gap", "model.config.pad_token_id=0", "model.init=random"),
    ]
    one = [*words, "strategy.kind=ddp", "batch.micro_batch_size=4", "checkpoint.export=at_end"]
    train(folder, "reward-one", *one, ranks=1)
    train(folder, "reward-two", *words, "run.max_steps=3", ranks=2)
    train(folder, "reward-two", *words, "strategy.kind=ddp", "run.max_steps=6", ranks=1)
    whole = list(read_lines(folder / "runs/reward-one/metrics.jsonl"))
    parts = list(read_lines(folder / "runs/reward-two/metrics.jsonl"))
    assert [line["step"] for line in parts] == [line["step"] for line in whole]
    names = ("loss", "accuracy", "margin", "mean_reward")
    for first, second in zip(parts, whole, strict=True):
        for name in (*names, *(f"eval_{name}" for name in names)):
            assert (name in first) == (name in second)
            if name in first:
                assert first[name] == pytest.approx(second[name], rel=1e-6, abs=1e-6), name
    assert whole[-1]["eval_accuracy"] > 0.5
    exported, info = AutoModelForSequenceClassification.from_pretrained(
        folder / "runs/reward-one/hf", output_loading_info=True
    )
    assert not any(info.values())
    assert exported.config.num_labels == 1
    margins = []
    for number in range(60, 70):
        texts = [pair(number)["prompt"] + pair(number)[which] for which in ("chosen", "rejected")]
        with torch.no_grad():
            ids = [torch.tensor([[*text.encode(), 256]]) for text in texts]
            chosen, rejected = (exported(input_ids=each).logits.item() for each in ids)
        margins.append(chosen - rejected)
    assert sum(margins) / 10 == pytest.approx(whole[-1]["eval_margin"], abs=1e-4)
