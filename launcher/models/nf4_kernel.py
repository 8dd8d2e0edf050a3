"""`nf4.dequantize` as one Triton kernel, on GPUs: it reads half a byte for each number and writes the
result, where torch's operators move some 20 bytes more and take a working space.

The results have the bits of the operators: products and divisions are rounded one by one. Importing
this module needs Triton, which PyTorch's builds for GPUs contain.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUMBERS = 1024
"""Numbers of a row that a program of the kernel converts."""
WARPS = 4
"""Warps of a program."""


@triton.jit  # type: ignore[untyped-decorator]
def dequantize(  # type: ignore[no-untyped-def]
    packed,
    levels,
    out,
    features,
    row_bytes,
    numbers: tl.constexpr,
):
    """Converts rows (rows, row_bytes) to `out` (rows, features), one row of programs for each.

    A row has features / 2 bytes of codes, a byte of scale for each 64 numbers, and its own scale
    in float32, whose address may have any alignment. levels are the 16 values of the codes.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (numbers // 2)
    begin, codes = packed + row * row_bytes, features // 2
    of_row = tl.full((), 0, tl.int32)
    for byte in tl.static_range(4):
        bits = tl.load(begin + row_bytes - 4 + byte).to(tl.int32)
        of_row = of_row | (bits << (8 * byte))
    index = first + tl.arange(0, numbers // 2)
    inside = index < codes
    code = tl.load(begin + index, inside, 0).to(tl.int32)
    share = tl.load(begin + codes + index // 32, inside, 0).to(tl.float32)
    share = tl.div_rn(share, tl.full(share.shape, 255.0, tl.float32))
    scale = share * share * of_row.to(tl.float32, bitcast=True)
    high = tl.load(levels + (code >> 4)) * scale
    low = tl.load(levels + (code & 15)) * scale
    values = tl.join(high, low).reshape(numbers)
    column = first * 2 + tl.arange(0, numbers)
    values = values.to(out.dtype.element_ty)
    tl.store(out + row * features + column, values, column < features)
