"""Runs with model.new_tokens train to the same losses under every strategy, resume and export."""

import json

import pytest
import torch
import transformers

from launcher.cli.main import main
from tests.distributed.launching import torchrun
from tests.run_files import read_lines

RECIPE = """
run: {name: new, dir: FOLDER/run, max_steps: 4}
model: {path: FOLDER/base, new_tokens: [<call>, </call>, "<|turn|>"]}
data: {kind: chat, train: FOLDER/chat.jsonl, tokenizer: bytes, sequence_length: 64, workers: 0, cache: FOLDER/cache}
batch: {global_batch_size: 4, micro_batch_size: 2}
strategy: {kind: ddp, mixed_precision: null}
optimizer: {learning_rate: 1.0e-2, ema: 0.9}
schedule: {kind: constant, warmup_steps: 0}
checkpoint: {every_steps: 2}
"""
FSDP = "strategy.kind=fsdp"
STRATEGIES = {
    "fsdp": [FSDP],
    "offload": [FSDP, "strategy.cpu_offload={what: all}"],
    "context": [FSDP, "strategy.context_parallel_size=2"],
    "tensor": [FSDP, "strategy.tensor_parallel_size=2"],
}


@pytest.mark.long
@pytest.mark.parametrize("adapters", [False, True])
def test_losses_and_exports_under_each_strategy(tmp_path, capsys, adapters):
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    texts = [("user", f"add {i}<|turn|>", "assistant", f"<call>{i}+1</call>") for i in range(40)]
    rows = [
        {"messages": [{"role": a, "content": b}, {"role": c, "content": d}]} for a, b, c, d in texts
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = tmp_path / "new.yaml"
    recipe.write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    lora = ["lora={rank: 4, alpha: 8}"] if adapters else []

    def train(name, *overrides, ranks):
        words = ["launcher/train.py", f"recipe={recipe}", f"run.dir={tmp_path / name}"]
        words += [*lora, *overrides]
        done = torchrun(*words, ranks=ranks, timeout=120, OMP_NUM_THREADS="1")
        lines = read_lines(tmp_path / name / "metrics.jsonl") if done.status == 0 else []
        return {line["step"]: line["loss"] for line in lines if "loss" in line}, done

    losses, done = train("one", ranks=1)
    done.check()
    for name, overrides in STRATEGIES.items():
        if name != "tensor" or not adapters:
            found, done = train(name, *overrides, ranks=2)
            done.check()
            assert found == pytest.approx(losses, rel=1e-6), name
    first = f"checkpoint.resume={tmp_path / 'offload/checkpoints/step_00000002'}"
    resumed, done = train("resumed", first, ranks=1)
    assert resumed == pytest.approx({step: losses[step] for step in (3, 4)}, rel=1e-6)
    _, done = train("one", "model.new_tokens=[<call>]", ranks=1)
    assert done.status != 0
    assert "model.new_tokens: [" in done.output
    for options in ([], ["weights=ema"], *([["--merged"]] if adapters else [])):
        out = tmp_path / f"out {' '.join(options)}"
        words = [str(tmp_path / "offload"), f"out={out}", *options, "--verify"]
        assert main(["export", *words]) == 0, capsys.readouterr().out
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert tokenizer("a</call><|turn|>")["input_ids"] == [97, 261, 262]
