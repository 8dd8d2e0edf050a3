"""Which kernels attention, weights in NF4 and the optimizer launch, and the values of kernels."""

import json
import sys

import pytest

from tests.distributed.launching import run

OPTIMIZER = """
import torch
from torch import nn
from launcher.optimizers import low_precision
from launcher.optimizers.low_precision import LowPrecisionAdamW

def optimizer_of(shape, state_dtype, device, count=1):
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(shape, device=device)) for _ in range(count)]
    named = [(f"w{i}", weight) for i, weight in enumerate(weights)]
    optimizer = LowPrecisionAdamW(
        [{"params": named, "weight_decay": 0.1}],
        state_dtype=state_dtype, seed=5, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
    )
    for weight in weights:
        optimizer.state[weight] = optimizer.initial_state(optimizer.param_groups[0], weight)
    return weights, optimizer
"""
BITS = """
import numpy as np
from triton.runtime import interpreter

def fused(self, x, y, z):
    exact = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)

interpreter.InterpreterBuilder.create_fma = fused  # its own one rounds the product
for state_dtype in ("int8", "bfloat16"):
    # Widths: whole blocks, a block in part, less than a counter of Philox. The numbers fill vectors
    for shape in ((8, 512), (4, 300), (4, 8)):
        (expected,), eager = optimizer_of(shape, state_dtype, "cpu")
        (found,), kernel = optimizer_of(shape, state_dtype, "cpu")
        for step in range(4):
            expected.grad = torch.randn(shape)
            found.grad = expected.grad.clone()
            eager.grad_scale = kernel.grad_scale = torch.tensor(3.0) if step == 1 else None
            eager.found_inf = kernel.found_inf = torch.tensor(float(step == 2))
            eager.step()
            plain, low_precision.has_kernel = low_precision.has_kernel, lambda weights: True
            kernel.step()
            low_precision.has_kernel = plain
            where = (state_dtype, shape, step)
            assert torch.equal(found, expected), where
            for key, value in eager.state[expected].items():
                assert torch.equal(kernel.state[found][key], value), (where, key)
print("same bits")
"""
LAUNCHES = """
import json
from tests.nullgpu.devices import preloaded

counts = {}
for name in ("kernel", "operators"):
    if name == "operators":
        low_precision.has_kernel = lambda weights: False
    weights, optimizer = optimizer_of((2048, 4096), "int8", "cuda", count=4)
    optimizer.found_inf = torch.zeros((), device="cuda")
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    before, held = preloaded().nullgpu_launches(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    counts[name] = preloaded().nullgpu_launches() - before
    counts[name + " bytes"] = torch.cuda.max_memory_allocated() - held
    del weights, optimizer
print("COUNTS", json.dumps(counts))
"""
ATTENTION = """
import json, pathlib, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from launcher.models import attention

PACKAGE = '''
import torch
calls = []
class Calls:
    def fwd(self, query, *rest):
        calls.append("forward")
        scores = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
        return torch.empty_like(query), scores, None, None
    def bwd(self, *rest):
        calls.append("backward")
torch.ops.flash_attn_3 = Calls()
'''
if len(sys.argv) > 1:
    (pathlib.Path(sys.argv[1]) / "flash_attn_interface.py").write_text(PACKAGE)
    sys.path.insert(0, sys.argv[1])
config = AutoConfig.for_model("llama", vocab_size=64, hidden_size=512, num_hidden_layers=1,
    intermediate_size=512, num_attention_heads=8, num_key_value_heads=2)
cuda, found = torch.device("cuda", 0), {}
for dtype in (torch.float16, torch.float32):
    for rows in ("packed", "padded"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        options = dict(device=cuda, compute_dtype=dtype)
        if rows == "packed":
            attention.isolate_documents(model, sequence_length=512, **options)
        else:
            attention.drop_causal_mask(model)
        kernels = attention.attention_kernels(model, packed=rows == "packed", **options)
        found[f"{rows} {str(dtype).removeprefix('torch.')}"] = kernels
for dtype in (torch.float16, torch.float32):
    options = dict(device=cuda, dtype=dtype, requires_grad=True)
    query, key = (torch.empty(1, heads, 4096, 64, **options) for heads in (8, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention.varlen_attention(None, query, key, key, None)[0].sum().backward()
    found[f"bytes {str(dtype).removeprefix('torch.')}"] = torch.cuda.max_memory_allocated() - before
if len(sys.argv) > 1:
    query, key = (tensor.detach().half().requires_grad_() for tensor in (query, key))
    bounds = torch.tensor([0, 4096], dtype=torch.int32, device=cuda)
    options = dict(cu_seq_lens_q=bounds, max_length_q=4096)
    attention.varlen_attention(None, query, key, key, None, **options)[0].sum().backward()
    import flash_attn_interface
    found["calls"] = flash_attn_interface.calls
print("FOUND", json.dumps(found))
"""
RANDOM = """
import json, re
import torch
from torch import nn
from torch.nn import functional
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint
from launcher.strategies.compilation import prepare_compile

class OutputProjection(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (256, 256), (256, 8), (8, 256)
        self.base, self.down, self.up = (nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, heads):
        hidden = heads.transpose(1, 2).contiguous().flatten(2)
        return self.base(hidden) + self.up(self.down(functional.dropout(hidden, 0.05)))

def drawn():
    torch._dynamo.reset()
    model = torch.compile(OutputProjection().cuda().bfloat16())
    options = dict(device="cuda", dtype=torch.bfloat16, requires_grad=True)
    heads = torch.empty(2, 4, 512, 64, **options)
    def step():
        checkpoint(model, heads, use_reentrant=False).sum().backward()
    _, codes = run_and_get_code(step)
    return re.findall(r"(\\w+\\.rand\\w*)\\(", "\\n".join(codes))

found = [drawn()]
prepare_compile(torch.device("cuda", 0))
print("DRAWN", json.dumps([*found, drawn()]))
"""
NF4 = """
import torch
from launcher.models import nf4

def packed(shape, device="cpu"):
    made = torch.empty(*shape[:-1], nf4.row_bytes(shape[-1]), dtype=torch.uint8)
    nf4.quantize(torch.randn(shape), made)
    return made.to(device)
"""
NF4_BITS = """
import triton.language as tl
from triton.runtime import interpreter

plain = interpreter.InterpreterBuilder.create_fp_trunc

def rounded(self, source, type):
    if type.scalar != tl.bfloat16:
        return plain(self, source, type)
    bits = torch.from_numpy(source.data).bfloat16().view(torch.int16).numpy().view("uint16")
    return interpreter.TensorHandle(bits, type.scalar)

interpreter.InterpreterBuilder.create_fp_trunc = rounded  # its own one cuts the lower half off
torch.manual_seed(0)
# Rows that end inside of a program, experts, a block, rows at odd addresses, several programs
weights = [packed(shape) for shape in ((96, 256), (3, 70, 128), (1, 64), (5, 1088), (2, 4096))]
weights[0][:8] = 0  # rows of zeros
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    expected = [nf4.dequantize(weight, dtype) for weight in weights]
    plain_choice, nf4.has_kernel = nf4.has_kernel, lambda device: True
    found = [nf4.dequantize(weight, dtype) for weight in weights]
    nf4.has_kernel = plain_choice
    assert all(map(torch.equal, found, expected)), dtype
print("same bits")
"""
NF4_LAUNCHES = """
import json
from tests.nullgpu.devices import preloaded

weight, counts, kernel = packed((2048, 4096), "cuda"), {}, nf4.has_kernel
assert kernel(weight.device)
for name, choice in (("operators", lambda device: False), ("kernel", kernel)):
    nf4.has_kernel = choice
    nf4.dequantize(weight, torch.bfloat16)
    before, held = preloaded().nullgpu_launches(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = nf4.dequantize(weight, torch.bfloat16)
    counts[name] = preloaded().nullgpu_launches() - before
    counts[name + " bytes"] = torch.cuda.max_memory_allocated() - held - made.nbytes
    del made
print("COUNTS", json.dumps(counts))
"""
EXIT = """
import os, sys
sys.stdout.flush()
os._exit(0)  # like the launcher: threads of torch can abort a normal exit of the interpreter
"""


def printed(output, word):
    line = next(line for line in output.splitlines() if line.startswith(word))
    return json.loads(line.removeprefix(word))


def test_kernel_of_the_optimizer_has_the_bits_of_the_cpu():
    variables = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = run([sys.executable, "-c", OPTIMIZER + BITS], timeout=200, **variables).check()
    assert "same bits" in result.output


@pytest.mark.long
def test_optimizer_launches_one_kernel_a_matrix(null_gpus, tmp_path):
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    words = [sys.executable, "-c", OPTIMIZER + LAUNCHES + EXIT]
    result = run(words, timeout=200, **null_gpus(count=1).variables, **variables).check()
    counts = printed(result.output, "COUNTS")
    print(counts)
    assert counts["kernel"] <= 4 + 16, "one for each matrix, and some for scalars"
    assert counts["operators"] > 100 * counts["kernel"]
    assert counts["kernel bytes"] <= 4096


def test_compiled_dropout_draws_each_number_alone(null_gpus, tmp_path):
    """Dropout on the input of an adapter of o_proj, after a transpose: torch 2.13 draws four numbers
    at once, by indices that are not consecutive, and elements get equal numbers."""
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    variables |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    words = [sys.executable, "-c", RANDOM + EXIT]
    result = run(words, timeout=300, **null_gpus(count=1).variables, **variables).check()
    torchs, ours = printed(result.output, "DRAWN")
    assert set(torchs) == {"triton_helpers.rand4x"}, "torch draws each number alone: is it mended?"
    assert set(ours) == {"tl.rand"}


def test_kernel_of_nf4_has_the_bits_of_the_operators():
    variables = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = run([sys.executable, "-c", NF4 + NF4_BITS], timeout=200, **variables).check()
    assert "same bits" in result.output


@pytest.mark.long
def test_nf4_launches_one_kernel_a_weight(null_gpus, tmp_path):
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    words = [sys.executable, "-c", NF4 + NF4_LAUNCHES + EXIT]
    result = run(words, timeout=200, **null_gpus(count=1).variables, **variables).check()
    counts = printed(result.output, "COUNTS")
    print(counts)
    assert counts["kernel"] == 1
    assert counts["operators"] > 5
    assert counts["kernel bytes"] == 0
    assert counts["operators bytes"] > 2**25


@pytest.mark.parametrize(
    ("capability", "packed", "padded"),
    [
        (75, "efficient attention", "efficient attention"),
        (80, "packed rows FlashAttention-2", "flash attention"),
        (90, "packed rows FlashAttention-3", "cudnn attention"),
    ],
)
def test_attention_uses_fused_kernels(null_gpus, tmp_path, capability, packed, padded):
    """With grouped heads, the math kernel would keep 4096 x 4096 scores of each head."""
    gpus = null_gpus(count=1, capability=capability)
    installed = [tmp_path] if "3" in packed else []
    words = [sys.executable, "-c", ATTENTION + EXIT, *map(str, installed)]
    result = run(words, timeout=200, **gpus.variables).check()
    found = printed(result.output, "FOUND")
    print(found)
    assert found["packed float16"].startswith(packed)
    assert found["padded float16"].startswith(padded)
    masked = "efficient attention of scaled_dot_product_attention, with a mask"
    assert found["packed float32"] == masked
    assert found["padded float32"] == masked.removesuffix(", with a mask")
    assert found["bytes float16"] < found["bytes float32"] < 2**27, "scores would take 256 MiB"
    if installed:
        assert found["calls"] == ["forward", "backward"]
