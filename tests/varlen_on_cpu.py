"""CPU kernels for torch's variable-length attention, to check its values without a GPU.

They reject the inputs that the GPU kernels reject. The operator's fake kernel does not check them.
"""

import itertools
from itertools import pairwise

import torch
from torch.nn.attention import varlen

CALLS = {"forward": 0, "backward": 0}
"""Number of calls of each kernel in this process."""


def check_heads(query, key, value):
    """Asserts the requirements of the GPU kernels."""
    sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    assert len(sizes) == 1, f"head sizes differ: {sizes}"
    size = sizes.pop()
    assert size % 8 == 0, f"a head size of {size} is not a multiple of 8"
    assert size <= 256, f"a head size of {size} is more than 256"
    assert query.dtype == key.dtype == value.dtype, (query.dtype, key.dtype, value.dtype)


def check_lengths(*sides):
    """Asserts that no document is longer than the kernel is told."""
    for bounds, longest in sides:
        assert int(bounds.diff().max()) <= longest


def _documents(query, key, value, bounds, key_bounds, scale, window, causal):
    """Yields for each document: the slices of its queries and of its keys; q, k and v (heads, tokens,
    size); and the scores.

    For grouped heads, k and v are repeated. The last query is aligned with the last key.
    """
    left, right = window or (-1, -1)
    spans, of_keys = (itertools.starmap(slice, pairwise(e.tolist())) for e in (bounds, key_bounds))
    for span, keys in zip(spans, of_keys, strict=True):
        q, k, v = (
            tensor[each].transpose(0, 1).float()
            for tensor, each in ((query, span), (key, keys), (value, keys))
        )
        k, v = (tensor.repeat_interleave(q.shape[0] // tensor.shape[0], dim=0) for tensor in (k, v))
        aligned = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        distance = aligned - torch.arange(k.shape[1])[None, :]
        seen = (
            (distance >= 0) if causal or right == 0 else torch.ones_like(distance, dtype=torch.bool)
        )
        if left >= 0:
            seen &= distance <= left
        yield span, keys, q, k, v, (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)


def _forward(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    is_causal=False,
    scale=None,
    window_size=None,
    *rest,
):
    check_heads(query, key, value)
    CALLS["forward"] += 1
    out, lse = (
        torch.empty_like(query),
        query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32),
    )
    check_lengths((cu_seq_q, max_q), (cu_seq_k, max_k))
    for span, _, _, _, v, scores in _documents(
        query, key, value, cu_seq_q, cu_seq_k, scale, window_size, is_causal
    ):
        out[span] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
        lse[:, span] = scores.logsumexp(-1)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    is_causal,
    rng_state,
    scale=None,
    window_size=None,
):
    CALLS["backward"] += 1
    gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
    check_lengths((cu_seq_q, max_q), (cu_seq_k, max_k))
    for span, keys, q, k, v, scores in _documents(
        query, key, value, cu_seq_q, cu_seq_k, scale, window_size, is_causal
    ):
        weights = (scores - lse[:, span, None]).exp()
        grad, result = (tensor[span].transpose(0, 1).float() for tensor in (grad_out, out))
        grad_scores = (
            weights * (grad @ v.transpose(1, 2) - (grad * result).sum(-1, keepdim=True)) * scale
        )
        for target, at, gradient in zip(
            gradients,
            (span, keys, keys),
            (grad_scores @ k, grad_scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ grad),
            strict=True,
        ):
            groups = gradient.unflatten(0, (target.shape[1], -1)).sum(1)
            target[at] = groups.transpose(0, 1).to(target.dtype)
    return tuple(gradients)


def register():
    """Registers the kernels for the rest of the process."""
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
