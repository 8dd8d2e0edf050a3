"""Runs whose blocks are divided over the stages of a pipeline."""

import re
import signal
import sys

import pytest
import yaml
from safetensors.torch import load_file

from tests import REPOSITORY
from tests.distributed.launching import forked, run, torchrun, wait_until
from tests.run_files import read_lines, status, write_texts
from tests.unit.models import recurrent_families

TRAIN = REPOSITORY / "launcher/train.py"
FAULTY = REPOSITORY / "tests/distributed/faulty_train.py"
RECIPE = """
run: {name: stages, max_steps: 6, seed: 3, device: cpu}
model: {config: {model_type: llama, vocab_size: 260, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4,
  num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}}
data: {train: [FOLDER/text.jsonl], validation: [FOLDER/text.jsonl], tokenizer: bytes, sequence_length: 32, workers: 0,
  cache: FOLDER/cache}
batch: {global_batch_size: 6, micro_batch_size: 1}
strategy: {kind: fsdp, mixed_precision: null}
optimizer: {learning_rate: 2.0e-3, max_grad_norm: 0.5}
schedule: {kind: constant, warmup_steps: 2}
evaluation: {every_steps: 3, max_batches: 4}
checkpoint: {every_steps: 3, keep_last: 20, export: at_end}
logging: {every_steps: 1}
"""
STAGES = "strategy.pipeline_parallel_size=2"
INTERLEAVED = "strategy.pipeline_schedule=interleaved_1f1b"
LAYOUTS = {
    "one rank": (1,),
    "2 stages": (2, STAGES),
    "4 stages on 2 ranks": (2, STAGES, INTERLEAVED),
}


_SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOKENS = {name: _SIZES[name] for name in _SIZES if "token" in name or name == "vocab_size"}
FAMILIES = {
    "falcon": {
        **_TOKENS,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "bloom": {**_TOKENS, "hidden_size": 32, "n_head": 4, "n_layer": 4},
    "mpt": {**_TOKENS, "d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 64},
    "cohere2": _SIZES | {"sliding_window": 9, "tie_word_embeddings": True, "logit_scale": 0.5},
    "exaone4": _SIZES
    | {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma2": _SIZES | {"head_dim": 8, "sliding_window": 9},
    "falcon_h1": recurrent_families.FAMILIES["falcon_h1"]
    | {"vocab_size": 260, "num_hidden_layers": 4, "head_dim": 8},
    "glm4": _SIZES | {"head_dim": 8, "partial_rotary_factor": 0.5},
    "granite": _SIZES
    | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "lfm2": _SIZES | {"full_attn_idxs": [1, 3], "block_multiple_of": 16},
    "nemotron_h": {
        key: value
        for key, value in recurrent_families.FAMILIES["nemotron_h"].items()
        if key != "num_hidden_layers"  # it follows from layers_block_type
    }
    | {"vocab_size": 260},
    "nemotron": _SIZES | {"head_dim": 8},
    "phi": _SIZES | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "qwen2_moe": _SIZES
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "stablelm": _SIZES | {"use_qkv_bias": True, "attention_dropout": 0.0},
    "starcoder2": _SIZES | {"sliding_window": 9, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}
"""Configs of families that layouts.py does not have."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    write_texts(folder / "text.jsonl", seed=1)
    (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    return folder


def train(folder, run_dir, ranks, *overrides, recipe="recipe", **options):
    arguments = [f"recipe={folder}/{recipe}.yaml", f"run.dir={run_dir}", *overrides]
    return forked(TRAIN, *arguments, ranks=ranks, **options)


@pytest.fixture(scope="module")
def trained(folder):
    """A function that trains a layout, once."""
    done = {}

    def trained(name):
        if name not in done:
            done[name] = folder / name.replace(" ", "_")
            train(folder, done[name], *LAYOUTS[name]).check()
        return done[name]

    return trained


def numbers(run_dir, *, first=1):
    """Losses, norms and evaluations of the steps from the first one on."""
    keys = ("step", "loss", "grad_norm", "tokens", "loss_tokens", "eval_loss")
    found = []
    for line in read_lines(run_dir / "metrics.jsonl"):
        if line.get("step", 0) >= first:
            found += [line[key] for key in keys if key in line]
    return found


def exported(run_dir):
    return load_file(run_dir / "hf/model.safetensors")


@pytest.mark.parametrize(
    "name", ["4 stages on 2 ranks", pytest.param("2 stages", marks=pytest.mark.long)]
)
def test_a_run_of_stages_is_that_of_one_rank(trained, name):
    """Six micro-batches, which four stages on two ranks take in groups of two."""
    run_dir, alone = trained(name), trained("one rank")
    assert numbers(run_dir) == pytest.approx(numbers(alone), rel=1e-6)
    mine, other = exported(run_dir), exported(alone)
    assert mine.keys() == other.keys()
    assert max((mine[key] - other[key]).abs().max().item() for key in mine) < 1e-6
    config = "hf/config.json"
    assert (run_dir / config).read_text() == (alone / config).read_text()
    assert status(run_dir)["state"] == "finished"
    parts = (alone / "checkpoints/step_00000006", run_dir / "checkpoints/step_00000006")
    alone_bytes, own_bytes = (sum(f.stat().st_size for f in part.iterdir()) for part in parts)
    assert own_bytes < 1.2 * alone_bytes  # the shared weight is written once


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one rank", "2 stages"),
        ("2 stages", "one rank"),
        ("2 stages", "4 stages on 2 ranks"),
        ("4 stages on 2 ranks", "4 stages on 2 ranks"),
    ],
)
def test_a_run_is_resumed_with_other_stages(trained, folder, tmp_path, before, after):
    start = trained(before) / "checkpoints/step_00000003"
    ranks, *overrides = LAYOUTS[after]
    train(folder, tmp_path / "run", ranks, *overrides, f"checkpoint.resume={start}").check()
    expected = numbers(trained("one rank"), first=4)
    assert numbers(tmp_path / "run", first=4) == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["2 stages", "4 stages on 2 ranks"])
def test_stages_share_the_rows_of_new_tokens(folder, tmp_path, name):
    """Adapters freeze the shared embedding, but not these rows, which both stages train."""
    rows = ["model.new_tokens=['<new>']", "lora={rank: 4, target_modules: [q_proj, o_proj]}"]
    for run_name in ("one rank", name):
        ranks, *overrides = LAYOUTS[run_name]
        train(folder, tmp_path / run_name, ranks, *overrides, *rows).check()
    alone, run_dir = tmp_path / "one rank", tmp_path / name
    assert numbers(run_dir) == pytest.approx(numbers(alone), rel=1e-6)
    file = "hf/adapter_model.safetensors"
    mine, other = load_file(run_dir / file), load_file(alone / file)
    assert mine.keys() == other.keys()
    assert max((mine[key] - other[key]).abs().max().item() for key in mine) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("name", ["2 stages", "4 stages on 2 ranks"])
def test_a_stopped_run_of_stages_saves_and_continues(folder, tmp_path, name):
    ranks, *overrides = LAYOUTS[name]
    run_dir = tmp_path / "run"
    arguments = [f"recipe={folder}/recipe.yaml", f"run.dir={run_dir}", *overrides]
    command = [sys.executable, "-m", "launcher", "train", f"gpus={ranks}", *arguments]
    metrics = run_dir / "metrics.jsonl"

    def stop(process):
        assert wait_until(lambda: metrics.exists() and metrics.stat().st_size, process=process)
        process.send_signal(signal.SIGTERM)

    run([*command, "run.max_steps=100000", "checkpoint.export=null"], during=stop).check(75)
    assert status(run_dir)["state"] == "stopped"
    steps = status(run_dir)["step"]
    run([*command, f"run.max_steps={steps + 2}", "checkpoint.export=null"]).check()
    assert [line["step"] for line in read_lines(metrics) if "loss" in line] == [
        *range(1, steps + 3)
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        # In the second micro-batch of the second step; the other stage waits
        ("raise:1:8", "rank 1 of 2 failed in step 2: ValueError: a fault of this test"),
        ("raise:0:8", "rank 0 of 2 failed in step 2: ValueError: a fault of this test"),
        ("memory:1:8:0", "rank 1 of 2 ran out of"),
        ("kill:1:8", "rank 1 of 2 ended without an error message"),
    ],
)
def test_a_stage_that_fails_is_named_with_its_error(folder, tmp_path, fault, says):
    arguments = [f"recipe={folder}/recipe.yaml", f"run.dir={tmp_path}/run", STAGES]
    failed = torchrun(FAULTY, *arguments, ranks=2, timeout=90, FAULT=fault)
    assert failed.status not in (0, 75)
    assert says in failed.output, failed.output


def test_each_stage_has_its_times(trained, folder):
    run_dir = trained("4 stages on 2 ranks")
    records = [line for line in read_lines(run_dir / "metrics.jsonl") if "loss" in line]
    for record in records:
        assert len(record["stages"]) == 2
        for stage in record["stages"]:
            assert all(seconds > 0 for seconds in stage.values()), stage
    log = (run_dir / "log/rank_0.log").read_text()
    assert re.search(r"stage [12] of 2 computes longest, \d+% of a step; the stages wait for", log)
    page = folder / "report.html"
    run([sys.executable, "-m", "launcher", "report", run_dir, f"out={page}"]).check()
    assert "Stages of the pipeline" in (text := page.read_text())
    assert "stage 1, blocks 0 and 2" in text
    assert "stage 2, blocks 1 and 3" in text


@pytest.fixture(scope="module")
def alone(folder):
    """A function that trains a model of a family on one rank, once."""
    done = {}

    def alone(family):
        if family not in done:
            done[family] = folder / family
            train(folder, done[family], 1, *SHORT, recipe=recipe_of(family, folder)).check()
        return done[family]

    return alone


SHORT = ["run.max_steps=4", "checkpoint.every_steps=2"]


def recipe_of(family, folder):
    """The name of the recipe of a model of a family."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["model"]["config"] = {"model_type": family} | FAMILIES[family]
    (folder / f"{family}.yaml").write_text(yaml.safe_dump(recipe))
    return family


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("falcon", 2),
        *(
            pytest.param(family, ranks, marks=pytest.mark.long)
            for family in FAMILIES
            for ranks in (2, 4)
            if (family, ranks) != ("falcon", 2)
        ),
    ],
)
def test_a_family_trains_in_stages_and_goes_on_without(alone, folder, tmp_path, family, ranks):
    """Two stages of one rank, or of two, which shard it."""
    run_dir, recipe = tmp_path / "run", recipe_of(family, folder)
    share = f"evaluation.max_batches={8 // ranks}"  # of the same four
    train(folder, run_dir, ranks, *SHORT, STAGES, share, recipe=recipe).check()
    assert numbers(run_dir) == pytest.approx(numbers(alone(family)), rel=2e-6)
    resumed, start = tmp_path / "resumed", run_dir / "checkpoints/step_00000002"
    train(folder, resumed, 1, *SHORT, f"checkpoint.resume={start}", recipe=recipe).check()
    expected = numbers(alone(family), first=3)
    assert numbers(resumed, first=3) == pytest.approx(expected, rel=2e-6)
    assert exported(resumed).keys() == exported(alone(family)).keys()


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_planned_in_stages(folder, family):
    recipe = f"recipe={folder}/{recipe_of(family, folder)}.yaml"
    arguments = [recipe, STAGES, "run.device=auto", "gpu=h100", "gpus=2"]
    command = [sys.executable, "-m", "launcher", "plan", *arguments]
    output = run([*command, "--no-search"]).check().output
    assert "blocks over 2 ranks" in output, output
    assert "a GPU at the start of the pipeline needs" in output


def test_a_plan_for_cpus_names_ranks(folder):
    arguments = [f"recipe={folder}/recipe.yaml", STAGES, "gpu=cpu", "gpus=2", "--no-search"]
    output = run([sys.executable, "-m", "launcher", "plan", *arguments]).check().output
    assert "a rank at the start of the pipeline needs" in output, output
    assert "a GPU" not in output
