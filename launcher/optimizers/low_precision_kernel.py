"""The update of `low_precision` as one Triton kernel for each tensor, on GPUs.

As separate operators of torch, 2^22 numbers take 400 kernels, most of them for the noise. The
results have the bits of the CPU's: divisions and roots are rounded exactly, and each moment uses one
fused multiply-add, where torch's fused AdamW has it on CPUs with AVX2 or AVX-512. There, the last
numbers of a part that do not fill a vector of 16 may differ in the last bit, because the compiler
fuses another product of the second moment in the loop over them. Importing this module needs
Triton, which PyTorch's builds for GPUs contain.
"""

from __future__ import annotations

import triton
import triton.language as tl

_BLOCK = tl.constexpr(256)
_TINY = tl.constexpr(2.0**-126)
"""The smallest normal float32 number."""
BLOCKS = 4
"""Blocks of numbers that a program of the kernel updates."""
WARPS = 4
"""Warps of a program."""


@triton.jit
def _words(seed, counter, step):  # type: ignore[no-untyped-def]
    """Four words of Philox for each counter."""
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = low * 0
    return tl.philox(seed, low, high, zero + step.to(tl.uint32), zero)


@triton.jit  # type: ignore[untyped-decorator]
def _noise(  # type: ignore[no-untyped-def]
    seed, start, step, count: tl.constexpr, aligned: tl.constexpr
):
    """The numbers of `philox.random_bytes` for `count` blocks of positions from `start` on: each
    counter of Philox gives 16 of them. `aligned`: each start is a multiple of 16, so that no counter
    is computed twice."""
    if aligned:
        counter = (start >> 4)[:, None] + tl.arange(0, 16)[None, :]
        w0, w1, w2, w3 = _words(seed, counter, step)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(count, 16, 4)
        shifts = (tl.arange(0, 4) * 8).to(tl.uint32)
        return ((words[:, :, :, None] >> shifts) & 255).to(tl.int32).reshape(count, _BLOCK)
    position = start[:, None] + tl.arange(0, _BLOCK)[None, :]
    w0, w1, w2, w3 = _words(seed, position >> 4, step)
    word = (position >> 2) & 3
    chosen = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return ((chosen >> ((position & 3) * 8).to(tl.uint32)) & 255).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _load(codes, scales, tile, levels: tl.constexpr):  # type: ignore[no-untyped-def]
    """Part of a moment in float32, as `low_precision._load`. levels is 0 for bfloat16."""
    offsets, inside, blocks, real = tile
    moment = tl.load(codes + offsets, inside, 0).to(tl.float32)
    if levels > 0:
        moment = tl.div_rn(moment, levels * 1.0)
        if levels == 255:
            moment = moment * moment
            moment = moment * moment
        moment = moment * tl.load(scales + blocks, real, 0)[:, None]
    return moment


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    codes, scales, tile, moment, noise, levels: tl.constexpr
):
    """Stores part of a moment, as `low_precision._store`."""
    offsets, inside, blocks, real = tile
    if levels == 0:
        bits = moment.to(tl.int32, bitcast=True) + (noise << 8) + 0x80
        kept = (bits & -0x10000).to(tl.float32, bitcast=True)
    else:
        scale = tl.max(tl.abs(moment), axis=1)
        tl.store(scales + blocks, scale, real)
        kept = tl.div_rn(tl.abs(moment), tl.maximum(scale, _TINY)[:, None])
        if levels == 255:
            kept = tl.sqrt_rn(tl.sqrt_rn(kept))
        kept = kept * (levels * 1.0) + (noise.to(tl.float32) + 0.5) * 0.00390625
        sign = tl.where(moment > 0, 1.0, tl.where(moment < 0, -1.0, 0.0))
        kept = tl.minimum(tl.floor(kept), levels * 1.0) * sign
        if levels == 255:
            kept = tl.maximum(kept, sign)
    tl.store(codes + offsets, kept.to(codes.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["first", "seed_m", "seed_v"])  # type: ignore[untyped-decorator]
def update(  # type: ignore[no-untyped-def]
    weights,
    gradient,
    m_codes,
    m_scales,
    v_codes,
    v_scales,
    step_at,
    corrections,
    found_inf,
    grad_scale,
    rows,
    width,
    first: tl.int64,
    seed_m: tl.int64,
    seed_v: tl.int64,
    decay,
    share_m,
    beta2,
    share_v,
    eps,
    int8: tl.constexpr,
    blocks_at_once: tl.constexpr,
    aligned: tl.constexpr,
):
    """Updates a matrix (rows, width) and its moments m and v.

    first is the position of its first number in the whole tensor. step_at, found_inf and
    grad_scale (or None) point to scalars, corrections to two of them: the learning rate over the
    correction of m's bias, and the root of that of v's. decay is the factor of the weights, share_m
    and share_v those of a gradient and its square in the moments. aligned: width and first are
    multiples of 16.
    """
    if tl.load(found_inf) > 0:
        return
    in_row = tl.cdiv(width, _BLOCK)
    block = tl.program_id(0).to(tl.int64) * blocks_at_once + tl.arange(0, blocks_at_once)
    row, real = block // in_row, block < rows * in_row
    column = (block % in_row)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    offsets = row[:, None] * width + column
    inside = real[:, None] & (column < width)
    tile = (offsets, inside, block, real)
    g = tl.load(gradient + offsets, inside, 0)
    if grad_scale is not None:
        g = tl.div_rn(g, tl.load(grad_scale))
    m = _load(m_codes, m_scales, tile, 127 * int8)
    v = _load(v_codes, v_scales, tile, 255 * int8)
    if int8:
        m = m * tl.sqrt_rn(v)
    step = tl.load(step_at).to(tl.int64)
    step_size, correction = tl.load(corrections), tl.load(corrections + 1)
    weight = tl.load(weights + offsets, inside, 0) * decay
    share = share_m + tl.zeros_like(g)
    small = share < 0.5  # torch's lerp starts at the nearer end
    m = tl.fma(tl.where(small, share, share - 1), g - m, tl.where(small, m, g))
    v = tl.fma(share_v * g, g, v * beta2)
    divisor = tl.div_rn(tl.sqrt_rn(v), correction) + eps
    tl.store(weights + offsets, weight + tl.div_rn(-step_size * m, divisor), inside)
    if int8:
        m = tl.div_rn(m, tl.maximum(tl.sqrt_rn(v), _TINY))
    start = first + row * width + (block % in_row) * _BLOCK
    noise = _noise(seed_m, start, step, blocks_at_once, aligned)
    _store(m_codes, m_scales, tile, m, noise, 127 * int8)
    noise = _noise(seed_v, start, step, blocks_at_once, aligned)
    _store(v_codes, v_scales, tile, v, noise, 255 * int8)
