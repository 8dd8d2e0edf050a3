"""Tests of the GPU code paths on real GPUs: `pytest -m gpu tests/gpu`.

One GPU is enough. More GPUs run more of the tests on several ranks. Null GPUs (tests/nullgpu) run the tests
without comparing what kernels compute.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from torch.utils.checkpoint import checkpoint as checkpointed

from launcher.errors import EXIT_DONE, EXIT_NO
from launcher.strategies.compilation import prepare_compile
from tests import REPOSITORY
from tests.distributed.launching import run, torchrun
from tests.run_files import read_lines

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no CUDA device here")]
NULL = "NULLGPU_COUNT" in os.environ
"""Whether the GPUs are null GPUs, which compute no values."""
UNCHECKED = ["data.packing=false"] if NULL else []
"""Overrides without which a start checks the values of logits: a mask must separate documents."""
DEVICE = "cuda"
TRAIN = REPOSITORY / "launcher/train.py"
FAULTY_TRAIN = REPOSITORY / "tests/distributed/faulty_train.py"
MODEL = [
    *(
        "model.config.hidden_size=512",
        "model.config.intermediate_size=1536",
        "model.config.num_hidden_layers=4",
    ),
    *(
        "model.config.num_attention_heads=8",
        "model.config.num_key_value_heads=4",
        "data.sequence_length=512",
    ),
    *("data.validation=null", "checkpoint.export=null", "run.max_steps=12"),
    "model.compile=false",  # compiling takes longer than training; some tests switch it on
]
DETERMINISTIC = [
    *("run.deterministic=true", "schedule.kind=constant", "schedule.warmup_steps=2"),
    *("model.config.attention_dropout=0.1", "model.attention=eager", "checkpoint.every_steps=3"),
    *UNCHECKED,
]


def quick(first, *others):
    """Values of a parameter. `benchmarks/gpu.py --quick` tests only the first one."""
    return [first, *(pytest.param(other, marks=pytest.mark.long) for other in others)]


def start(recipe, run_dir, *overrides, ranks=1, script=TRAIN, restarts=0, **options):
    """Starts a training with two micro-batches per step on each rank."""
    batch = [f"batch.global_batch_size={8 * ranks}", "batch.micro_batch_size=4"]
    words = [f"recipe={recipe}", *MODEL, *batch, f"run.dir={run_dir}", *overrides]
    arguments = ["--max-restarts", restarts, script, *words]
    return torchrun(*arguments, ranks=ranks, timeout=300, device=DEVICE, **options)


def read(run_dir, name="metrics"):
    return read_lines(run_dir / f"{name}.jsonl")


def train(recipe, run_dir, *overrides, **options):
    result = start(recipe, run_dir, *overrides, **options).check()
    return read(run_dir), result.output


def figures(records):
    keys = ("step",) if NULL else ("step", "loss", "grad_norm")
    return [tuple(record[key] for key in keys) for record in records]


def learns(records):
    return NULL or records[-1]["loss"] < records[0]["loss"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A cached function that returns a recipe's records of an uninterrupted deterministic run."""

    @functools.cache
    def records(recipe):
        folder = tmp_path_factory.mktemp(recipe)
        return train(recipe, folder / "run", *DETERMINISTIC, ranks=GPUS)[0]

    return records


@pytest.mark.parametrize("ranks", sorted({1, GPUS}))
@pytest.mark.parametrize(
    "precision", quick("{param_dtype: bfloat16}", "null", "{param_dtype: float16}")
)
def test_selftest_finds_equal_losses(precision, ranks):
    command = [
        sys.executable,
        "-m",
        "launcher.cli.main",
        "selftest",
        "recipe=fsdp",
        "--shrink",
        "data.sequence_length=128",
        *UNCHECKED,
    ]
    result = run([*command, f"gpus={ranks}", f"strategy.mixed_precision={precision}"], timeout=300)
    print(result.output)
    assert result.status == EXIT_DONE or (NULL and result.status == EXIT_NO), result.output
    assert torch.cuda.get_device_name(0) in result.output


@pytest.mark.parametrize("recipe", quick("fsdp", "ddp", "fsdp_offload"))
def test_recipes_reduce_the_loss(recipe, tmp_path):
    records, output = train(recipe, tmp_path / "run", "model.compile=auto", ranks=GPUS)
    print(output)
    assert learns(records)
    if any(name in torch.cuda.get_device_name(0) for name in ("A100", "H100", "H200", "B200")):
        assert 0 < records[-1]["mfu"] < 1
    memory = torch.cuda.get_device_properties(0).total_memory
    assert NULL or 0 < records[-1]["peak_memory_bytes"] < memory


def test_offload_uses_less_gpu_memory(tmp_path):
    kept = train("fsdp", tmp_path / "fsdp")[0][-1]["peak_memory_bytes"]
    offloaded = train("fsdp_offload", tmp_path / "offload")[0][-1]["peak_memory_bytes"]
    assert NULL or offloaded < kept


@pytest.mark.parametrize("recipe", quick("fsdp", "ddp"))
def test_deterministic_runs_are_bit_identical(recipe, tmp_path):
    first, second = (
        train(recipe, tmp_path / name, "run.deterministic=true")[0] for name in ("a", "b")
    )
    assert figures(first) == figures(second)


@pytest.mark.parametrize("kind", quick("fsdp", "ddp"))
def test_compiled_blocks_have_close_losses(kind, tmp_path):
    plain = train("fsdp", tmp_path / "plain", f"strategy.kind={kind}")[0]
    compiled = train("fsdp", tmp_path / "compiled", f"strategy.kind={kind}", "model.compile=true")[
        0
    ]
    for a, b in zip(plain, compiled, strict=True):
        assert NULL or b["loss"] == pytest.approx(a["loss"], rel=5e-3)


def test_profile_writes_trace_and_memory_snapshot(tmp_path):
    train("fsdp", tmp_path / "run", "profile={start_step: 3, steps: 2, memory_snapshot: true}")
    assert (tmp_path / "run/profile/memory_rank_0.pickle").stat().st_size > 0
    assert (tmp_path / "run/profile/rank_0.pt.trace.json").stat().st_size > 0


@pytest.mark.skipif(NULL, reason="null GPUs compute no values")
def test_compiled_dropout_has_one_mask_of_independent_numbers():
    """pytorch#198333: after a transpose, torch 2.13 gives groups of four channels equal numbers, and a
    recomputation other ones than the forward pass."""
    prepare_compile(torch.device("cuda", 0))

    def dropped(heads):
        return torch.nn.functional.dropout(heads.transpose(1, 2).contiguous(), 0.5)

    heads = torch.ones(8, 64, 4096, device="cuda", requires_grad=True)
    output = checkpointed(torch.compile(dropped), heads, use_reentrant=False)
    output.sum().backward()
    forward, backward = output > 0, heads.grad.transpose(1, 2) > 0
    assert torch.equal(forward, backward)
    share = forward.double().mean().item()
    assert abs(share - 0.5) < 5 * 0.5 / forward.numel() ** 0.5
    equal = (forward[..., 0::4] == forward[..., 1::4]).double().mean().item()
    assert abs(equal - 0.5) < 0.01, "adjacent channels have equal masks"


@pytest.mark.parametrize("model_type", quick("mistral", "llama"))
def test_varlen_attention_matches_separate_documents(model_type):
    """Packed documents have the same logits and gradients as documents in separate rows.

    Covers grouped-query attention and a sliding window.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from launcher.models.attention import VARLEN, isolate_documents

    sizes = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    window = {"sliding_window": 64} if model_type == "mistral" else {}
    settings = AutoConfig.for_model(
        model_type, **sizes, **window, num_key_value_heads=2, max_position_embeddings=512
    )
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    masking = isolate_documents(
        shape, sequence_length=256, device=torch.device("cuda"), compute_dtype=torch.bfloat16
    )
    assert masking == "varlen", "torch's variable-length kernel is used"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        settings, dtype=torch.bfloat16, attn_implementation="eager"
    ).cuda()
    ids = torch.randint(512, (2, 256), device="cuda")
    documents = [[100, 156], [7, 200, 49]]
    alone = torch.empty(2, 256, 512, device="cuda")
    for row, lengths in enumerate(documents):
        end = 0
        for length in lengths:
            alone[row, end : end + length] = model(
                input_ids=ids[row : row + 1, end : end + length], use_cache=False
            ).logits.float()
            end += length
    alone.square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation(VARLEN)
    bounds = torch.tensor([0, 100, 256, 263, 463, 512], dtype=torch.int32, device="cuda")
    position_ids = torch.stack(
        [torch.cat([torch.arange(length) for length in lengths]) for lengths in documents]
    ).cuda()
    lengths = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": 256,
        "max_length_k": 256,
    }
    packed = model(
        input_ids=ids, position_ids=position_ids, use_cache=False, **lengths
    ).logits.float()
    difference = float((packed - alone).detach().abs().max() / alone.detach().abs().max())
    assert NULL or difference < 3e-2
    packed.square().mean().backward()
    for name, gradient in expected.items():
        difference = (
            model.get_parameter(name).grad - gradient
        ).float().norm() / gradient.float().norm()
        assert NULL or float(difference) < 5e-2, name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    config = LlamaConfig(**sizes, num_key_value_heads=4, max_position_embeddings=512)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="8MB")
    return folder


@pytest.mark.parametrize("recipe", quick("fsdp", "ddp", "fsdp_offload"))
@pytest.mark.parametrize("adapters", [False, True])
def test_checkpoint_is_loaded_trained_and_exported(checkpoint, recipe, adapters, tmp_path):
    more = [
        "model.config=null",
        f"model.path={checkpoint}",
        "checkpoint.export=at_end",
        *(["lora={rank: 8}"] if adapters else []),
    ]
    overrides = [
        override for override in MODEL if not override.startswith(("model.config.", "checkpoint."))
    ]
    overrides += [f"batch.global_batch_size={8 * GPUS}", "batch.micro_batch_size=4"]
    run_dir = tmp_path / "run"
    command = [
        f"recipe={recipe}",
        *overrides,
        "run.max_steps=4",
        f"run.dir={run_dir}",
        *more,
        "optimizer.learning_rate=1e-3",
    ]
    output = torchrun(TRAIN, *command, ranks=GPUS, timeout=300, device=DEVICE).check().output
    records = read(run_dir)
    assert learns(records)
    assert "kept apart by variable-length attention" in output
    written = {file.name for file in (run_dir / "hf").iterdir()}
    assert (
        {"adapter_config.json", "adapter_model.safetensors"} <= written
        if adapters
        else "config.json" in written
    )


@pytest.mark.parametrize("asynchronous", quick("true", "false"))
@pytest.mark.parametrize("recipe", quick("fsdp", "ddp", "fsdp_offload"))
def test_resumed_run_is_bit_identical(recipe, asynchronous, uninterrupted, tmp_path):
    """Covers asynchronous saves through pinned memory, synchronous saves and the GPU's RNG."""
    settings = [*DETERMINISTIC, f"checkpoint.asynchronous={asynchronous}"]
    train(recipe, tmp_path / "run", *settings, "run.max_steps=7", ranks=GPUS)
    resumed, output = train(recipe, tmp_path / "run", *settings, ranks=GPUS)
    assert "step_00000007, step 7" in output
    assert figures(resumed) == figures(uninterrupted(recipe))


@pytest.mark.parametrize("recipe", quick("fsdp", "ddp"))
def test_run_with_killed_rank_has_equal_losses(recipe, uninterrupted, tmp_path):
    """A rank gets SIGKILL in step 8, and the restart resumes from step 6.

    If there are other ranks, they report the lost rank.
    """
    settings = [
        *DETERMINISTIC,
        "checkpoint.asynchronous=false",
    ]  # step 6 is saved before step 7 starts
    run_dir, last = tmp_path / "run", GPUS - 1
    fault = {
        "FAULT": f"kill:{last}:15",
        "ONCE": str(tmp_path / "killed"),
    }  # two micro-batches per step
    options = {"script": FAULTY_TRAIN, "ranks": GPUS, **fault}
    if GPUS > 1:
        start(recipe, run_dir, *settings, **options).check(1)
        status = json.loads((run_dir / "status.json").read_text())
        assert (status["state"], status["reason"]) == ("failed", "rank_lost"), status["error"]
        assert f"rank {last} of {GPUS}" in status["error"]
        start(recipe, run_dir, *settings, **options).check()
    else:
        start(recipe, run_dir, *settings, restarts=1, **options).check()
    assert (tmp_path / "killed").exists()
    assert json.loads((run_dir / "status.json").read_text())["state"] == "finished"
    assert [line["step"] for line in read(run_dir, "events") if line["event"] == "resumed"] == [6]
    assert figures(read(run_dir)) == figures(uninterrupted(recipe))


def contexts():
    """Number of processes with a CUDA context on each GPU, by the UUID of the GPU."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    printed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    return Counter(line.split(",")[0].strip() for line in printed.splitlines() if line.strip())


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi")
def test_each_gpu_has_one_cuda_context(tmp_path):
    """Only the GPU's own rank has a context: no other rank, torchrun, loader or saving process."""
    run_dir, before, most = tmp_path / "run", contexts(), Counter()

    def watch(process):
        deadline, steps = time.monotonic() + 200, 0
        while process.poll() is None and time.monotonic() < deadline and steps < 30:
            most.update((contexts() - before) - most)  # maximum over time
            steps = len(read(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0
        if run_dir.exists():
            (run_dir / "stop").touch()

    settings = ["run.max_steps=100000", "data.workers=2", "checkpoint.every_steps=10"]
    settings.append("run.max_skipped_steps=100")  # null GPUs compute no values
    start("fsdp", run_dir, *settings, ranks=GPUS, during=watch).check()
    assert len(read(run_dir)) >= 30
    if not most:
        pytest.skip("nvidia-smi shows no processes here, as in some containers")
    gpus = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(GPUS)]
    assert most == dict.fromkeys(gpus, 1)


def test_out_of_memory_error_suggests_overrides(tmp_path):
    batch = ["batch.global_batch_size=16384", "batch.micro_batch_size=16384"]
    start("ddp", tmp_path / "run", *batch, "run.max_steps=2").check(1)
    status = json.loads((tmp_path / "run/status.json").read_text())
    print(status["error"])
    assert status["reason"] == "out_of_memory"
    assert status["error"].startswith("rank 0 of 1 ran out of GPU memory in step 1: in the ")
    assert re.search(
        r"the plan is .+ a rank, and there are .+: the recipe does not", status["error"]
    )
    assert "what fits by plan, the fastest first, as overrides:" in status["error"]
    assert (tmp_path / "run/out_of_memory_rank_0.pickle").stat().st_size > 0


def test_auto_strategy_trains(tmp_path):
    overrides = [
        "strategy.kind=auto",
        "batch.micro_batch_size=auto",
        f"batch.global_batch_size={16 * GPUS}",
    ]
    records, output = train("fsdp", tmp_path / "run", *overrides, ranks=GPUS)
    print(output)
    assert "The fastest that fits: by plan" in output
    assert learns(records)


def test_plan_matches_the_allocator(tmp_path):
    """benchmarks/memory.py fails if the plan is more than 5 % above or 2 % below the peak."""
    table = tmp_path / "table.md"
    command = [
        sys.executable,
        REPOSITORY / "benchmarks/memory.py",
        "--sizes",
        "0.1b",
        "1b",
        "--output",
        table,
        "--ranks",
        GPUS,
    ]
    result = run(command, timeout=600)
    print(table.read_text())
    result.check()
