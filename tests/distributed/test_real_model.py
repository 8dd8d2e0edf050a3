"""Fine-tunes a real model, which `make real-model` writes. Random weights hide what this one shows."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from launcher.reliability.json_files import read_jsonl
from tests import REPOSITORY
from tests.distributed.launching import run, torchrun

MODEL = Path(os.environ.get("REAL_MODEL") or REPOSITORY / "runs/SmolLM2-135M-Instruct")
SCRIPT = REPOSITORY / "recipes/smollm2.py"


def loss_of_answers(folder, file):
    """The mean over the tokens of the answers, without the line break after their end, and the
    number of these tokens: one chat at a time, without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = count = 0
    for line in file.read_text("utf-8").splitlines():
        messages = json.loads(line)["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
        asked = tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        start = len(tokenizer(asked, add_special_tokens=False).input_ids)
        with torch.no_grad():
            logits = model(ids).logits[0, start - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum").item()
        count += ids.shape[1] - start
    return total / count, count


@pytest.mark.long
@pytest.mark.skipif(not MODEL.is_dir(), reason="`make real-model` writes the model")
def test_adapters_teach_a_real_model_a_format(tmp_path):
    """Before, it answers as an assistant; after 13 steps, orders become JSON, also unseen ones."""
    orders = tmp_path / "orders"
    run([sys.executable, SCRIPT, "generate", orders], timeout=60).check()
    torchrun(
        "launcher/train.py",
        "recipe=smollm2",
        f"model.path={MODEL}",
        f"run.dir={tmp_path}/run",
        f"data.train=[{orders}/train.jsonl]",
        f"data.validation=[{orders}/test.jsonl]",
        ranks=2,
        timeout=900,
    ).check()
    lines = read_jsonl(tmp_path / "run/metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] > 1
    assert losses[-1] < 0.15
    (evaluated,) = [line for line in lines if "eval_loss" in line]
    expected, count = loss_of_answers(tmp_path / "run/hf", orders / "test.jsonl")
    assert evaluated["eval_tokens"] == count == 1500
    # The exported weights are in bfloat16
    assert evaluated["eval_loss"] == pytest.approx(expected, abs=2e-3)
    shares = []
    for folder in (MODEL, tmp_path / "run/hf"):
        done = run([sys.executable, SCRIPT, "accuracy", folder, orders], timeout=300)
        done.check()
        shares.append(float(done.output.rsplit(": ", 1)[1].split("%")[0]))
    assert shares[0] == 0
    assert shares[1] >= 80
    done = run([sys.executable, SCRIPT, "answers", MODEL], timeout=300)
    done.check()
    assert "The capital of France is Paris." in done.output


@pytest.mark.long
@pytest.mark.skipif(not MODEL.is_dir(), reason="`make real-model` writes the model")
def test_vectors_of_a_real_model_find_functions(tmp_path):
    """Twelve steps; and the vectors of the export are those of the evaluation."""
    pairs = tmp_path / "pairs"
    script = REPOSITORY / "recipes/docstrings.py"
    run([sys.executable, script, pairs], timeout=120).check()
    few = pairs.joinpath("validation.jsonl").read_text("utf-8").splitlines()[:60]
    (pairs / "few.jsonl").write_text("\n".join(few), "utf-8")
    torchrun(
        "launcher/train.py",
        "recipe=embedding",
        f"model.path={MODEL}",
        f"run.dir={tmp_path}/run",
        f"data.train=[{pairs}/train.jsonl]",
        f"data.validation=[{pairs}/few.jsonl]",
        *("data.limit=400", "data.sequence_length=64", "checkpoint.export_dtype=float32"),
        ranks=2,
        timeout=1200,
    ).check()
    lines = read_jsonl(tmp_path / "run/metrics.jsonl")
    before, after = [line for line in lines if "eval_loss" in line]
    assert after["eval_recall@10"] > before["eval_recall@10"] + 0.3
    model = AutoModel.from_pretrained(tmp_path / "run/hf", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/hf")
    sides = []
    for name in ("query", "positive"):
        vectors = []
        for line in few:
            ids = tokenizer(json.loads(line)[name], truncation=True, max_length=64).input_ids
            with torch.no_grad():
                hidden = model(torch.tensor([ids])).last_hidden_state[0, -1]
            vectors.append(torch.nn.functional.normalize(hidden, dim=0))
        sides.append(torch.stack(vectors))
    similarities = sides[0] @ sides[1].T
    place = (similarities >= similarities.diagonal()[:, None]).sum(1)
    assert after["eval_recall@10"] == pytest.approx((place <= 10).double().mean().item())
    loss = torch.nn.functional.cross_entropy(similarities / 0.05, torch.arange(len(few)))
    assert after["eval_loss"] == pytest.approx(loss.item(), rel=1e-4)
