"""Complete runs of launcher/train.py on null GPUs: training, resume, export and failures."""

import json
import pickle
import re
import sys
from collections import Counter

import pytest
import yaml

from tests import REPOSITORY
from tests.distributed.launching import run, torchrun
from tests.run_files import read_lines, write_lines

TRAIN = REPOSITORY / "tests/nullgpu/train.py"
# Device memory contains zeros or garbage, so gradients may be non-finite
RECIPE = """
run: {name: runs, max_steps: 4, seed: 3, max_skipped_steps: 1000}
model: {config: {model_type: llama, vocab_size: 260, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 2, max_position_embeddings: 128}}
data: {train: [FOLDER/text.jsonl], validation: [FOLDER/text.jsonl], tokenizer: bytes, sequence_length: 128, workers: 0, cache: FOLDER/cache}
batch: {global_batch_size: 16, micro_batch_size: 4}
strategy: {kind: fsdp}
evaluation: {every_steps: 2, max_batches: 2}
checkpoint: {every_steps: 2}
schedule: {kind: constant, warmup_steps: 0}
"""

STAGING = """
import logging, pathlib, sys
import torch
import torch.distributed as dist
from launcher.checkpoint import staging
from launcher.checkpoint.writer import Checkpointer
from launcher.recipe.schema import Checkpoint
from tests.nullgpu.devices import preloaded

logging.basicConfig(format="LOG %(levelname)s %(message)s")
failing, library = len(sys.argv) > 2, preloaded()
staging.PIECE = 2**20
cudart = torch.cuda.cudart()
register, calls = cudart.cudaHostRegister, []

def refused(*memory):
    calls.append(memory)
    return 2 if len(calls) == 2 else register(*memory)

if failing:
    cudart.cudaHostRegister = refused
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
weight = torch.nn.Parameter(torch.zeros(700_000, device=device))
optimizer = torch.optim.SGD([weight])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
checkpointer = Checkpointer(
    pathlib.Path(sys.argv[1]), Checkpoint(), group=dist.group.WORLD, device=device,
)
tensors = {"model.weight": weight.detach()}
local = {"rng": torch.zeros(10)}
checkpointer.prepare(tensors, local=local)
checkpointer._buffer.wait()
library.nullgpu_mark(b"prepared")
for step in (1, 2):
    checkpointer.save(step, tensors, state={}, local=local)
    checkpointer.wait_staged()
    optimizer.step()
(_, second) = checkpointer.finish()
assert second.error is None, second.error
print("SIZE", (second.path / "rank_00000.safetensors").stat().st_size)
library.nullgpu_mark(b"saved")
checkpointer.close()
library.nullgpu_mark(b"end")
"""


SYNCHRONOUS = """
import pathlib, sys
import torch
import torch.distributed as dist
from launcher.checkpoint import reader, writer
from launcher.recipe.schema import Checkpoint
from tests.nullgpu.devices import preloaded

writer.CHUNK, library = 4096, preloaded()  # null GPUs carry out small copies only
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
sizes = (0, 1, 700, 3, 5000)
tensors = {f"model.{size}": torch.arange(size, dtype=torch.float32) for size in sizes}
on_gpu = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
for name, tensor in tensors.items():
    for to, part in zip(on_gpu[name].split(500), tensor.split(500)):
        to.copy_(part)
on_gpu["model.3"] = tensors["model.3"]  # some are in host memory
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
checkpointer = writer.Checkpointer(
    pathlib.Path(sys.argv[1]), Checkpoint(asynchronous=False), group=dist.group.WORLD,
    device=device,
)
library.nullgpu_mark(b"begin")
checkpointer.save(1, on_gpu, state={}, local={"rng": torch.arange(5)})
library.nullgpu_mark(b"end")
(save,) = checkpointer.finish()
assert save.error is None, save.error
found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
reader.load(save.path, found, group=dist.group.WORLD)
assert all(torch.equal(found[name], tensors[name]) for name in tensors)
assert reader.read_local(save.path, 0)["rng"].tolist() == [0, 1, 2, 3, 4]
print("same values")
"""


def test_a_synchronous_save_goes_through_page_locked_memory(tmp_path, null_gpus):
    """While a chunk is written, the GPU copies the next one."""
    gpus = null_gpus(count=2)
    words = [sys.executable, "-c", SYNCHRONOUS, tmp_path / "checkpoints"]
    assert "same values" in run(words, **gpus.variables).check().output
    (log,) = (log for log in gpus.logs() if log.of_kind("mark"))
    texts = [" ".join([event.kind, *event.arguments[:1]]) for event in log.events]
    saved = Counter(texts[texts.index("mark begin") : texts.index("mark end")])
    assert saved["pin 4096"] == 2
    assert saved["wait copy"] == 0, "a copy into pageable memory waits"
    assert saved["wait event"] == 7, "one wait for each chunk: the header and 22,836 bytes"
    assert log.contexts == {1}


@pytest.mark.parametrize("failing", [pytest.param(False, marks=pytest.mark.long), True])
def test_memory_for_checkpoints_is_page_locked_in_pieces(tmp_path, null_gpus, failing):
    """Its size is exact, and it is released at the end. No other device gets a context."""
    gpus = null_gpus(count=2)
    words = [sys.executable, "-c", STAGING, tmp_path / "checkpoints", *["failing"] * failing]
    output = run(words, **gpus.variables).check().output
    size = int(output.partition("SIZE ")[2].split()[0])
    assert 700_000 * 4 < size < 700_000 * 4 + 2**16
    (log,) = (log for log in gpus.logs() if log.of_kind("mark"))
    pinned = [int(event.arguments[0]) for event in log.of_kind("pin")]
    unpinned = [int(event.arguments[0]) for event in log.of_kind("unpin")]
    pieces = [2**20, 2**20, -(-size // 4096) * 4096 - 2 * 2**20]
    assert pinned == pieces[: 1 if failing else 3]
    assert sorted(unpinned) == sorted(pinned)
    marks = [event.arguments for event in log.of_kind("mark")]
    held = {
        name: f"pinned={0 if name == 'end' else sum(pinned)}"
        for name in ("prepared", "saved", "end")
    }
    assert {name: rest[1] for name, *rest in marks} == held
    assert {event.arguments[0] for event in log.of_kind("context")} == {"1"}
    lines = [line for line in output.splitlines() if line.startswith("LOG ")]
    assert len(lines) == failing, lines
    if failing:
        assert "could not be page-locked (CUDA error 2 after 1.0 MiB)" in lines[0]


@pytest.fixture
def folder(tmp_path):
    documents = [{"text": "null devices compute nothing " * (1 + i % 7)} for i in range(200)]
    write_lines(tmp_path / "text.jsonl", documents)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    return tmp_path


def train(folder, gpus, *overrides, ranks=1, restarts=0, timeout=240, **variables):
    words = [
        TRAIN,
        f"recipe={folder}/recipe.yaml",
        "run.device=cuda",
        f"run.dir={folder}/run",
        *overrides,
    ]
    variables = gpus.variables | variables
    if ranks == 1 and not restarts:
        return run([sys.executable, *words], timeout=timeout, **variables)
    return torchrun("--max-restarts", restarts, *words, ranks=ranks, timeout=timeout, **variables)


def caches(folder):
    """Environment of a run that compiles: it uses no kernels of earlier runs."""
    return {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile workers would exit seconds after the run
        "USE_PYTORCH_KERNEL_CACHE": "0",  # of kernels that NVRTC compiles, such as that of exp2
    }


def status(folder):
    return json.loads((folder / "run/status.json").read_text())


def records(folder, kind="metrics"):
    return read_lines(folder / f"run/{kind}.jsonl")


def steps(folder):
    return [record["step"] for record in records(folder) if "loss" in record]


def test_run_is_evaluated_saved_resumed_and_exported(folder, null_gpus):
    gpus = null_gpus(count=2)
    profile = "profile={start_step: 2, steps: 2, memory_snapshot: true}"
    train(folder, gpus, "data.workers=1", profile, ranks=2).check()
    assert status(folder)["state"] == "finished"
    ends = (".pt.trace.json", "_memory.txt", "_time.txt")
    names = {f"rank_{rank}{end}" for rank in (0, 1) for end in ends}
    written = {path.name: path for path in (folder / "run/profile").iterdir()}
    assert written.keys() == names | {"memory_rank_0.pickle", "memory_rank_1.pickle"}
    trace = json.loads(written["rank_1.pt.trace.json"].read_text())["traceEvents"]
    assert {"forward", "backward", "optimizer"} <= {event["name"] for event in trace}
    snapshot = pickle.loads(written["memory_rank_1.pickle"].read_bytes())
    assert any(segment["device"] == 1 for segment in snapshot["segments"])
    assert any(snapshot["device_traces"])
    assert [record["step"] for record in records(folder) if "eval_loss" in record] == [2, 4]
    train(folder, gpus, "run.max_steps=6", ranks=2).check()
    lines = {line["step"]: line for line in records(folder) if "loss" in line}
    timed = [step for step, line in lines.items() if line["communication_seconds"] is not None]
    assert timed == [2], "communication is timed in one of ten steps"
    output = train(folder, gpus, "run.max_steps=8", "checkpoint.export=at_end").check().output
    assert "step_00000006, step 6" in output
    assert steps(folder) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [
        record["ranks"] for record in records(folder, "events") if record["event"] == "saved"
    ] == [2, 2, 2, 1]
    built = [record for record in records(folder, "events") if record["event"] == "built"]
    assert [record["ranks_per_node"] for record in built] == [2, 2, 1]
    assert built[0]["device_memory"] == int(79.6 * 2**30)
    assert built[0]["versions"]["nccl"]
    assert 1.9 < built[2]["held"]["parameters"] / built[0]["held"]["parameters"] < 2.1, (
        "one rank holds twice the shard"
    )
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "run/hf")
    assert model.config.hidden_size == 64
    for log in gpus.ranks():
        assert log.contexts == {log.rank}
    others = [log for log in gpus.logs() if not log.of_kind("mark")]
    assert not any(log.contexts for log in others), "torchrun and loader processes have no context"


@pytest.mark.long
def test_model_too_large_for_gpu_is_reported(folder, null_gpus):
    """The caching allocator runs out of memory, without an injected fault."""
    large = [
        "model.config.hidden_size=1024",
        "model.config.intermediate_size=4096",
        "model.config.num_hidden_layers=8",
    ]
    result = train(folder, null_gpus(count=1, gib=1), *large)
    assert result.status == 1
    outcome = status(folder)
    assert (outcome["state"], outcome["reason"]) == ("failed", "out_of_memory")
    assert "ran out of GPU memory" in outcome["error"]
    assert "optimizer state" in outcome["error"]
    # On a slow machine, planning may exceed its limit of a minute
    assert re.search(
        "what fits by plan, the fastest first, as overrides:|planning took more than",
        outcome["error"],
    )
    assert "Traceback" not in outcome["error"]


@pytest.mark.long
def test_auto_reduces_micro_batch_after_out_of_memory(folder, null_gpus):
    auto = ["strategy.kind=auto", "batch.micro_batch_size=auto"]
    result = train(
        folder, null_gpus(count=2), *auto, ranks=2, restarts=1, FAULT="out_of_memory:1:2"
    ).check()
    assert status(folder)["state"] == "finished"
    (failed,) = [event for event in records(folder, "events") if event["event"] == "failed"]
    assert (failed["reason"], failed["micro_batch_size"]) == ("out_of_memory", 8)
    assert yaml.safe_load((folder / "run/recipe.yaml").read_text())["batch"][
        "micro_batch_size"
    ] in (1, 2, 4)
    assert steps(folder) == [1, 2, 3, 4]
    assert "The fastest that fits: by plan" in result.output


@pytest.mark.long
def test_lost_device_is_reported(folder, null_gpus):
    """torch may abort the process, because freeing page-locked memory raises in a destructor."""
    result = train(folder, null_gpus(count=2), ranks=2, FAULT="lose_device:1:2")
    assert result.status == 1
    outcome = status(folder)
    assert outcome["state"] == "failed"
    assert outcome["reason"] in ("rank_lost", "error")
    assert "rank 1" in outcome["error"]


@pytest.mark.long
def test_fewer_gpus_than_ranks_is_refused(folder, null_gpus):
    result = train(folder, null_gpus(count=1), ranks=2)
    assert result.status == 1
    assert "1 GPU" in result.output
    assert "run.device" in result.output


@pytest.mark.long
def test_a_teacher_and_new_tokens(folder, null_gpus):
    """The pass of the teacher gathers its predictions over NCCL. A new token has a row of the
    embeddings and one of the head, which adapters train whole: 128 parameters more."""
    import transformers

    config = yaml.safe_load(RECIPE)["model"]["config"]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.save_pretrained(folder / "base")
    gpus, base = null_gpus(count=2), f"{folder}/base"
    train(folder, gpus, f"distillation={{teacher: {base}, top_k: 8}}", ranks=2).check()
    assert steps(folder) == [1, 2, 3, 4]
    assert all("kl" in line for line in records(folder) if "loss" in line)
    about = json.loads((folder / "run/teacher_top_k.json").read_text())
    assert about["written"] == about["rows"]
    model = f"model={{path: {base}, config: null, new_tokens: [<call>]}}"
    whole, adapters = "107.46 K parameters", "8.32 K of them trained"
    for name, words, size in (
        ("new", [], whole),
        ("lora", ["lora={rank: 4}"], adapters),
        ("offload", ["strategy.cpu_offload={what: all}"], whole),
    ):
        options = [model, f"run.dir={folder}/{name}", *words]
        assert size in train(folder, gpus, *options, ranks=2).check().output
        assert json.loads((folder / name / "status.json").read_text())["state"] == "finished"


@pytest.mark.long
def test_hybrid_sharding_on_eight_ranks(folder, null_gpus):
    """Two replicas of the model, each sharded over four devices."""
    gpus = null_gpus(count=8)
    train(
        folder,
        gpus,
        "strategy.replicate=2",
        "evaluation.every_steps=null",
        "data.validation=null",
        "run.max_steps=2",
        "batch.micro_batch_size=1",
        ranks=8,
    ).check()
    assert steps(folder) == [1, 2]
    for log in gpus.ranks():
        assert log.contexts == {log.rank}
        calls = [event.arguments for event in log.steps()[2] if event.kind == "nccl"]
        large = {
            (name, ranks)
            for name, _, ranks, size in calls
            if int(size.removeprefix("bytes=")) > 1024
        }
        assert large == {
            ("all_gather", "ranks=4"),
            ("reduce_scatter", "ranks=4"),
            ("all_reduce", "ranks=2"),
        }


@pytest.mark.long
def test_compiled_blocks_run(folder, null_gpus):
    """Inductor and Triton compile kernels, which the fake driver loads and launches."""
    result = train(
        folder,
        null_gpus(count=1),
        "model.compile=auto",
        "data.validation=null",
        timeout=400,
        **caches(folder),
    ).check()
    assert steps(folder) == [1, 2, 3, 4]
    for expected in ("auto: model.compile=true", "compile: the first step", "until step 1"):
        assert expected in result.output
    recipe = yaml.safe_load((folder / "run/recipe.yaml").read_text())
    assert recipe["model"]["compile"] is True
    assert list((folder / "triton").glob("*/*.cubin"))


@pytest.mark.long
@pytest.mark.parametrize("packing", [True, False])
def test_compiled_dropout_of_adapters_draws_each_number_alone(folder, null_gpus, packing):
    """pytorch#198333: `lora.dropout` on o_proj, with activation checkpointing."""
    train(
        folder,
        null_gpus(count=1),
        "model.compile=true",
        "data.validation=null",
        f"data.packing={str(packing).lower()}",
        "activation_checkpointing={mode: full}",
        "lora={rank: 4, dropout: 0.05}",
        timeout=400,
        **caches(folder),
    ).check()
    kernels = "\n".join(file.read_text() for file in (folder / "inductor").rglob("*.py"))
    assert "tl.rand(" in kernels
    assert "rand4x" not in kernels


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_float8(folder, null_gpus, ranks, compiled):
    """Output, gradient of the input and gradient of the weight of each linear layer in the blocks
    are products of float8, which are not emulated."""
    pytest.importorskip("torchao")
    words = [
        "strategy.mixed_precision={param_dtype: bfloat16, float8: rowwise}",
        "model.compile=true" if compiled else "model.compile=false",
        "profile={start_step: 2, steps: 1}",
        "data.validation=null",
    ]
    gpus = null_gpus(count=ranks, capability=90)
    result = train(folder, gpus, *words, ranks=ranks, timeout=400, **caches(folder)).check()
    assert steps(folder) == [1, 2, 3, 4]
    assert "float8: 14 linear layers" in result.output
    assert "emulated" not in result.output
    assert bool(list((folder / "triton").glob("*/*.cubin"))) == compiled
    micro_batches = 4 // ranks
    for rank in range(ranks):
        trace = json.loads((folder / f"run/profile/rank_{rank}.pt.trace.json").read_text())
        names = [event["name"] for event in trace["traceEvents"]]
        assert names.count("aten::_scaled_mm") == 3 * 14 * micro_batches


@pytest.mark.long
def test_doctor_finds_the_devices(null_gpus):
    result = run(
        [sys.executable, "-m", "launcher.cli.main", "doctor"],
        timeout=200,
        **null_gpus(count=2).variables,
    )
    assert "A100" in result.output
    assert "Traceback" not in result.output
