"""Compares the launcher's kernels with float64 or with CPU values on one GPU, and times them.

    python benchmarks/gpu_kernels.py               # one GPU: about a minute
    python benchmarks/gpu_kernels.py --tiny        # small sizes, also on a CPU: does it run?

Prints a Markdown table: errors with the limits that they must not exceed, times with the time of the
first call, which compiles or plans, and other figures. A section that fails has its reason in a row,
and the sections after it run all the same. Exit status: 1 if an error exceeds its limit or a section
failed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher.distributed.environment import prepare_cuda

prepare_cuda(deterministic=False)  # before torch is imported, as a training run has it

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

HALF = torch.bfloat16
COLUMNS = "what | error | limit | holds | ms | ms of the first call | ms for 10^9 numbers | figure"
NULL = "NULLGPU_COUNT" in os.environ
"""Whether the GPU is a null GPU (tests/nullgpu), which computes no values."""


class Report:
    """Prints rows as they are found."""

    def __init__(self, device: torch.device, *, tiny: bool) -> None:
        self.device = device
        self.tiny = tiny
        self.failed: list[str] = []
        print(f"| {COLUMNS} |\n|---|{'---|' * COLUMNS.count('|')}", flush=True)

    @property
    def cuda(self) -> bool:
        """Whether the kernels of a GPU are compared."""
        return self.device.type == "cuda"

    def error(self, name: str, error: float, limit: float) -> None:
        """A deviation from the exact result, or a share of numbers that differ."""
        good = error <= limit
        verdict = "yes" if good else "NO"
        if NULL:
            verdict = "no values"
        elif not good:
            self.failed.append(name)
        self._row(name, error=f"{error:.2e}", limit=f"{limit:.0e}", holds=verdict)

    def value(self, name: str, value: object) -> None:
        """A figure, or a property of the machine."""
        text = f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
        self._row(name, figure=text)

    def timed(
        self, name: str, body: Callable[[], object], *, repeats: int = 10, numbers: float = 0
    ) -> float:
        """Seconds of a call, the median of `repeats`. With `numbers`, the row has milliseconds for
        10^9 numbers, too."""
        seconds = []
        for _ in range(2 if self.tiny else repeats + 1):
            self.synchronize()
            started = time.perf_counter()
            body()
            self.synchronize()
            seconds.append(time.perf_counter() - started)
        first, median = seconds[0], statistics.median(seconds[1:])
        each = f"{1e12 * median / numbers:.2f}" if numbers else ""
        self._row(name, ms=f"{1000 * median:.3f}", first=f"{1000 * first:.1f}", each=each)
        return median

    def section(self, function: Callable[[Report], None]) -> None:
        """Runs a section and frees its memory."""
        started = time.monotonic()
        try:
            function(self)
        except Exception as error:  # the others run all the same
            self.failed.append(function.__name__)
            text = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            self.value(f"{function.__name__} failed", text)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        self.value(f"{function.__name__}, seconds", round(time.monotonic() - started, 1))

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()

    def _row(
        self,
        name: str,
        *,
        error: str = "",
        limit: str = "",
        holds: str = "",
        ms: str = "",
        first: str = "",
        each: str = "",
        figure: str = "",
    ) -> None:
        cells = (name, error, limit, holds, ms, first, each, figure)
        print(f"| {' | '.join(cells)} |", flush=True)


def relative(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference, relative to that of the exact result."""
    there, expected = found.detach().double().cpu(), exact.detach().double().cpu()
    return float((there - expected).norm() / expected.norm())


def unequal(found: Tensor, expected: Tensor) -> float:
    """The share of numbers that differ in any bit."""
    return float((found.detach().cpu() != expected.detach().cpu()).double().mean())


def machine(report: Report) -> None:
    """The machine and its software."""
    import importlib.metadata

    from launcher.models import nf4
    from launcher.strategies.compilation import why_eager

    for package in ("torch", "triton", "transformers", "torchao", "bitsandbytes"):
        try:
            report.value(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            report.value(package, "not installed")
    report.value("compiles", why_eager(report.device.type, check_triton=True) or "yes")
    report.value("CPU cores", os.cpu_count())
    if report.cuda:
        free, total = torch.cuda.mem_get_info()
        report.value("GPU", torch.cuda.get_device_name(0))
        report.value("memory, GiB", total / 2**30)
        report.value("CUDA context, GiB", (total - free) / 2**30)
        report.value("CUDA", torch.version.cuda)
        report.value("NCCL", torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        if not NULL:
            cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
            report.value("cuDNN", cudnn)
        report.value("FlashAttention", torch.nn.attention.list_flash_attention_impls())
        report.value("kernel for NF4", nf4.has_kernel(report.device))


def rates(report: Report) -> None:
    """Products, and copies within the device and to the host."""
    n = 64 if report.tiny else 8192
    size = 2**12 if report.tiny else 2**30
    a = torch.randn(n, n, device=report.device, dtype=HALF)
    b = torch.randn(n, n, device=report.device, dtype=HALF)
    source = torch.ones(size, dtype=torch.uint8, device=report.device)
    target = torch.empty_like(source)
    product = report.timed(f"product of {n} x {n}", lambda: a @ b)
    report.value("products, TFLOP/s", 2 * n**3 / product / 1e12)
    copy = report.timed("copy on the device", lambda: target.copy_(source))
    report.value("copies, TB/s read and written", 2 * size / copy / 1e12)
    if report.cuda:  # as of a checkpoint's buffer
        started = time.perf_counter()
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        report.value("page-locking, GB/s", size / (time.perf_counter() - started) / 1e9)
        download = report.timed(
            "copy to the host", lambda: host.copy_(source, non_blocking=True), repeats=3
        )
        report.value("to the host, GB/s", size / download / 1e9)


def exact_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Causal attention of one document, (1, heads, tokens, size), with all scores."""
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    outside = (distance < 0) | (distance >= (window or tokens))
    scores = query @ key.repeat_interleave(groups, 1).mT / query.shape[3] ** 0.5
    shares = scores.masked_fill(outside, -torch.inf).softmax(-1)
    out: Tensor = shares @ value.repeat_interleave(groups, 1)
    return out.transpose(1, 2)


def packed_attention(
    heads: list[Tensor], bounds: Tensor, longest: int, window: int | None = None
) -> Tensor:
    """The launcher's attention of packed documents, of which `bounds` has the starts."""
    from launcher.models.attention import varlen_attention

    query, key, value = heads
    options: dict[str, Any] = {"cu_seq_lens_q": bounds, "max_length_q": longest}
    if window is not None:
        options["sliding_window"] = window
    return varlen_attention(nn.Module(), query, key, value, None, **options)[0]


def attention(report: Report) -> None:
    """Packed rows against one document at a time, with and without a sliding window."""
    lengths = [1, 7, 200, 48, 129, 127]
    for name, window in (("causal", None), ("window of 40", 40)):
        bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(report.device)
        packed = [
            torch.randn(1, heads, sum(lengths), 64, device=report.device, dtype=HALF)
            for heads in (4, 2, 2)
        ]
        exact = [tensor.double().cpu().requires_grad_() for tensor in packed]
        for tensor in packed:
            tensor.requires_grad_()
        out = packed_attention(packed, bounds, 512, window)
        documents = zip(*(torch.split(tensor, lengths, 2) for tensor in exact), strict=True)
        expected = torch.cat([exact_attention(q, k, v, window) for q, k, v in documents], 1)
        weight = torch.randn_like(out)
        torch.autograd.backward((out * weight).sum())
        torch.autograd.backward((expected * weight.double().cpu()).sum())
        report.error(f"attention, {name}: output", relative(out, expected), 2e-2)
        for part, ours, theirs in zip("qkv", packed, exact, strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            error = relative(ours.grad, theirs.grad)
            report.error(f"attention, {name}: gradient of {part}", error, 2e-2)


def attention_times(report: Report) -> None:
    """Forward and backward pass of 32 heads of 128. cuDNN plans each width at its first call."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not report.cuda:
        return
    total = 256 if report.tiny else 8192

    def timed(name: str, tokens: int, run: Callable[[list[Tensor]], Tensor]) -> None:
        made = [
            torch.randn(1, heads, tokens, 128, device=report.device, dtype=HALF, requires_grad=True)
            for heads in (32, 8, 8)
        ]

        def both() -> None:
            out = run(made)
            torch.autograd.backward(out, torch.ones_like(out))

        report.timed(name, both, repeats=5)

    def packed(documents: int, longest: int) -> Callable[[list[Tensor]], Tensor]:
        step = total // documents
        bounds = torch.arange(0, total + 1, step, dtype=torch.int32, device=report.device)
        return lambda heads: packed_attention(heads, bounds, longest)

    def dense(heads: list[Tensor]) -> Tensor:
        query, key, value = heads
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )

    timed("varlen, 2 documents", total, packed(2, total // 2))
    timed("varlen, 64 documents", total, packed(64, total // 64))
    timed("varlen, 64 documents, the row as the longest", total, packed(64, total // 2))
    for width in (64, 63) if report.tiny else (4096, 4095, 3001, 3072):
        timed(f"padded rows of {width}", width, dense)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for width in (64, 61) if report.tiny else (4096, 3003):
            timed(f"padded rows of {width}, FlashAttention", width, dense)


def loss(report: Report) -> None:
    """The loss in chunks against full logits in float64, eager and compiled."""
    from launcher.models.head import Chunking, Transform, chunk_width, linear_cross_entropy

    def draw(tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.randn(tokens, width, device=report.device, dtype=HALF)
        weight = torch.randn(vocabulary, width, device=report.device, dtype=HALF) / width**0.5
        labels = torch.randint(vocabulary, (tokens,))  # on the CPU: null GPUs draw no numbers
        labels.masked_fill_(torch.arange(tokens) % 7 == 0, -100)
        return hidden, weight, labels

    def run(compiled: bool, transform: Transform, width: int) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden.detach().clone().requires_grad_()
        w = weight.detach().clone().requires_grad_()
        found = linear_cross_entropy(x, w, None, there, Chunking(transform, width, compiled))
        torch.autograd.backward(found)
        assert x.grad is not None
        assert w.grad is not None
        return found, x.grad, w.grad

    ways = (False, True) if report.cuda and not report.tiny else (False,)
    hidden, weight, labels = draw(*((32, 16, 300) if report.tiny else (1024, 256, 20000)))
    there = labels.to(report.device)
    for transform in (Transform(), Transform(0.5, 30.0)):
        x, w = (tensor.double().cpu().requires_grad_() for tensor in (hidden, weight))
        logits = x @ w.T * transform.scale
        if transform.softcap:
            logits = torch.tanh(logits / transform.softcap) * transform.softcap
        exact = functional.cross_entropy(logits, labels, reduction="sum")
        torch.autograd.backward(exact)
        for compiled in ways:
            name = f"loss, {'compiled' if compiled else 'eager'}, softcap {transform.softcap}"
            found = run(compiled, transform, len(weight) // 4)
            expected = (exact, x.grad, w.grad)
            parts = ("value", "gradient of its input", "gradient of the head")
            for part, ours, theirs in zip(parts, found, expected, strict=True):
                assert theirs is not None
                report.error(f"{name}: {part}", relative(ours, theirs), 2e-2)
    if report.cuda:
        shape = (256, 64, 2048) if report.tiny else (4096, 4096, 128256)
        hidden, weight, labels = draw(*shape)
        there = labels.to(report.device)
        for compiled in ways:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            name = f"loss of 8B, {'compiled' if compiled else 'eager'}"
            width = chunk_width(shape[0], shape[2])
            report.timed(name, lambda: run(compiled, Transform(), width), repeats=5)  # noqa: B023
            most = torch.cuda.max_memory_allocated() - before
            report.value(f"{name}: peak, GiB", most / 2**30)


def optimizer(report: Report) -> None:
    """AdamW with states in low precision gives the same bits as on the CPU."""
    from launcher.optimizers.low_precision import LowPrecisionAdamW, has_kernel

    def make(weight: nn.Parameter, dtype: Any) -> LowPrecisionAdamW:
        group = {"params": [("w", weight)], "weight_decay": 0.1}
        made = LowPrecisionAdamW(
            [group], state_dtype=dtype, seed=5, lr=1e-3, betas=(0.9, 0.95), eps=1e-8
        )
        made.state[weight] = made.initial_state(made.param_groups[0], weight)
        made.found_inf = torch.zeros((), device=weight.device)
        return made

    shape = (64, 64) if report.tiny else (2**15, 2**12)
    big = nn.Parameter(torch.randn(*shape, device=report.device))
    big.grad = torch.randn_like(big)
    start = torch.randn(64, 304)
    for dtype in ("int8", "bfloat16"):
        there, here = nn.Parameter(start.to(report.device)), nn.Parameter(start.clone())
        ours, expected = make(there, dtype), make(here, dtype)
        for _ in range(4):
            here.grad = torch.randn_like(start) / 8
            there.grad = here.grad.to(report.device)
            ours.step()
            expected.step()
        report.value(f"kernel for AdamW in {dtype}", has_kernel(there))
        report.error(
            f"AdamW in {dtype}: weights, share with other bits", unequal(there, here), 1e-3
        )
        for key, state in expected.state[here].items():
            name = f"AdamW in {dtype}: {key}, share with other bits"
            report.error(name, unequal(ours.state[there][key], state), 1e-3)
        report.timed(f"AdamW in {dtype}", make(big, dtype).step, numbers=big.numel())
    fused = torch.optim.AdamW([big], fused=True)
    report.timed("AdamW in float32, fused", fused.step, numbers=big.numel())


def quantization(report: Report) -> None:
    """NF4 gives the same bits as on the CPU."""
    from launcher.models import nf4

    weight = torch.randn(16 if report.tiny else 512, 1024)
    shape = (len(weight), nf4.row_bytes(1024))
    here = torch.empty(shape, dtype=torch.uint8)
    there = torch.empty(shape, dtype=torch.uint8, device=report.device)
    nf4.quantize(weight, here)
    nf4.quantize(weight.to(report.device), there)
    values = nf4.dequantize(here.to(report.device), HALF)
    report.error(
        "NF4: values, share with other bits", unequal(values, nf4.dequantize(here, HALF)), 0.0
    )
    report.error("NF4: codes, share with other bits", unequal(there, here), 0.0)
    big = there.repeat(1 if report.tiny else 64, 1)
    report.timed("NF4 to bfloat16", lambda: nf4.dequantize(big, HALF), numbers=big.shape[0] * 1024)


def random_numbers(report: Report) -> None:
    """Initial weights are the same as on the CPU, up to the rounding of logarithm and cosine."""
    from launcher.models import philox

    key, count = philox.named_key(0, "w"), 2**12 if report.tiny else 2**22
    there = philox.normal(key, 5, count, report.device)
    here = philox.normal(key, 5, count, torch.device("cpu"))
    report.error("normal numbers: relative error", relative(there, here), 1e-6)
    report.error("normal numbers: share with other bits", unequal(there, here), 1e-4)
    report.timed(
        "normal numbers", lambda: philox.normal(key, 0, count, report.device), numbers=count
    )


def offload(report: Report) -> None:
    """State of the optimizer and activations in host memory give the same bits: they are copied on
    streams of their own."""
    from launcher.optimizers.optimizer import make_optimizer
    from launcher.recipe import schema
    from launcher.strategies.activation_checkpointing import checkpoint_blocks

    width, rows = (32, 8) if report.tiny else (2048, 4096)

    def train(state: schema.CpuOffload | None, *, to_host: bool) -> Tensor:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)]
        model = nn.Sequential(*layers).to(report.device)
        settings = schema.ActivationCheckpointing(mode="full", offload_to_cpu=to_host)
        checkpoint_blocks(model, {str(n): block for n, block in enumerate(model)}, settings)
        made = make_optimizer(model, schema.Optimizer(), cpu_offload=state)
        made.found_inf = torch.zeros((), device=report.device)  # type: ignore[attr-defined]
        for _ in range(4):
            x = torch.randn(rows, width, device=report.device, requires_grad=True)
            model(x * 1).square().mean().backward()
            made.step()
            made.zero_grad(set_to_none=True)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    plain = train(None, to_host=False)
    activations = train(None, to_host=True)
    report.error(
        "activations on the host: weights, share with other bits", unequal(activations, plain), 0.0
    )
    state = train(schema.CpuOffload(what="optimizer"), to_host=False)
    report.error("state on the host: weights, share with other bits", unequal(state, plain), 0.0)


def timed_by_events(body: Callable[[], object], *, repeats: int = 20) -> float:
    """Seconds of a call on the GPU without the time to launch it, the mean of `repeats`."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    body()
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        body()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000 / repeats


def variants(report: Report) -> None:
    """The launcher's Triton kernels with other sizes of a program than those in the source."""
    from launcher.models import nf4, nf4_kernel
    from launcher.optimizers import low_precision_kernel
    from launcher.optimizers.low_precision import LowPrecisionAdamW

    if not report.cuda:
        return
    rows = 16 if report.tiny else 14336
    packed = torch.randint(255, (rows, nf4.row_bytes(4096)), dtype=torch.uint8, device="cuda")
    for numbers, warps in itertools.product((1024, 2048, 4096), (1, 2, 4, 8)):
        nf4_kernel.NUMBERS, nf4_kernel.WARPS = numbers, warps
        seconds = timed_by_events(lambda: nf4.dequantize(packed, HALF))
        each = 1e12 * seconds / rows / 4096
        name = f"NF4 to bfloat16, {numbers} numbers, {warps} warps: ms for 10^9 numbers"
        report.value(name, each)
    weight = nn.Parameter(torch.randn(rows, 4096, device="cuda"))
    weight.grad = torch.randn_like(weight)
    group = {"params": [("w", weight)], "weight_decay": 0.1}
    for dtype in ("int8", "bfloat16"):
        made = LowPrecisionAdamW(
            [group], state_dtype=dtype, seed=5, lr=1e-3, betas=(0.9, 0.95), eps=1e-8
        )
        made.state[weight] = made.initial_state(made.param_groups[0], weight)
        made.found_inf = torch.zeros((), device="cuda")
        for blocks, warps in itertools.product((2, 4, 8), (2, 4, 8)):
            low_precision_kernel.BLOCKS, low_precision_kernel.WARPS = blocks, warps
            each = 1e12 * timed_by_events(made.step) / weight.numel()
            report.value(f"AdamW in {dtype}, {blocks} blocks, {warps} warps: ms for 10^9", each)


def float8(report: Report) -> None:
    """A product in float8 against float64, and its time. A failure without torchao."""
    from launcher.models.float8 import use_float8

    size = 32 if report.tiny else 2048
    block = nn.Sequential(nn.Linear(size, size, bias=False))
    weight = block.get_parameter("0.weight").detach().double()
    use_float8({"block": block}, "rowwise", device=report.device, dtype=HALF)
    block.to(report.device)
    x = torch.randn(size, size, device=report.device, dtype=HALF, requires_grad=True)
    error = relative(block(x), x.double().cpu() @ weight.T)
    report.error("float8: output of a linear layer", error, 8e-2)
    report.timed("float8, forward and backward", lambda: block(x).sum().backward())


SECTIONS = (
    machine,
    rates,
    attention,
    optimizer,
    quantization,
    random_numbers,
    offload,
    attention_times,
    loss,  # this and the next section compile for many seconds
    float8,
    variants,
)


def main() -> int:
    """Runs the sections and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [section.__name__ for section in SECTIONS]
    usual = [name for name in names if name != "variants"]
    parser.add_argument("--sections", nargs="+", choices=names, default=usual)
    parser.add_argument("--tiny", action="store_true", help="small sizes: does everything run?")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # as a training run has it
    report = Report(torch.device("cuda", 0) if cuda else torch.device("cpu"), tiny=options.tiny)
    for section in SECTIONS:
        if section.__name__ in options.sections:
            report.section(section)
    if report.failed:
        print("\nFailed:", *report.failed, sep="\n  ")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
