"""Attention of packed sequences: each document on its own, without a mask.

transformers keeps packed documents apart by a mask of tokens x tokens that it makes in every forward pass, and for which
it must ask the device where the documents start. Here attention is handed their bounds instead (`cu_seq_lens_q`, ...:
transformers' own names, which its flash attention takes): on CUDA torch's variable-length kernel, elsewhere a
scaled-dot-product attention per document. Work and memory are then those of the documents, not of the whole sequence
squared.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from launcher.errors import RecipeError

Masking = Literal["mask", "varlen"]
"""How attention stays inside a packed document: by a mask that the model makes from position_ids, or by attention that is
handed the documents' bounds."""

VARLEN = "launcher_varlen"
LARGEST_HEAD = 256
"""Of torch's variable-length kernel, FlashAttention-2: the largest head size."""
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def isolate_documents(model: nn.Module, *, sequence_length: int, device: torch.device, compute_dtype: torch.dtype) -> Masking:
    """How this model keeps packed documents apart: `varlen` or `mask`.

    Where the model attends through `sdpa`, its attention is replaced by one that takes the documents' bounds, if the model
    passes them to its layers (tried here) and the device has a kernel for it. sequence_length: tokens of a packed row.
    Raises RecipeError where something else than attention crosses tokens, which neither would stop, and where attention is
    chunked within a row.
    """
    pretrained: Any = model
    config = pretrained.config
    layer_types = set(_layer_types(config))
    others = layer_types - _ATTENTION_LAYERS
    if others or getattr(model, "_is_stateful", False):
        what = ", ".join(sorted(others)) or "a state"
        raise RecipeError(
            f"data.packing: {type(model).__name__} has layers ({what}) that carry something from document to document "
            "within a sequence; use packing: false"
        )
    chunk = getattr(_text_config(config), "attention_chunk_size", None)
    if "chunked_attention" in layer_types and chunk is not None and sequence_length > chunk:
        raise RecipeError(
            f"data.packing: {type(model).__name__} attends within chunks of {chunk} tokens, which are counted from the start of "
            f"a sequence and not of a document; use a data.sequence_length of at most {chunk}, or packing: false"
        )
    name = config._attn_implementation
    if name in _FLASH:
        return "varlen" if _passes_bounds(model) else "mask"
    if name != "sdpa" or not _has_kernel(model, device, compute_dtype):
        return "mask"
    _register()
    pretrained.set_attn_implementation(VARLEN)
    if _passes_bounds(model, largest_head=LARGEST_HEAD if device.type == "cuda" else None):
        return "varlen"
    pretrained.set_attn_implementation("sdpa")
    return "mask"


def _has_kernel(model: nn.Module, device: torch.device, compute_dtype: torch.dtype) -> bool:
    if device.type != "cuda":
        # A document after the other. In bfloat16 the CPU's kernels are made for each length anew and kept: slower than a
        # mask, and 230 MiB more in a small benchmark (torch 2.13)
        return compute_dtype == torch.float32
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401
    except ImportError:
        return False
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return False  # where there is no GPU a plan is made for one, a recent one
    config: Any = model.config
    dropout = max((float(getattr(config, key, 0) or 0) for key in ("attention_dropout", "attn_pdrop")), default=0.0)
    return compute_dtype in (torch.bfloat16, torch.float16) and dropout == 0


def drop_causal_mask(model: nn.Module) -> None:
    """For rows of one document each, padded on the right: takes transformers' mask away where it says no more than causal.

    transformers asks the device in every forward pass whether `position_ids` are those of packed documents. Tokens never
    see the padding behind them, so that `sdpa` without a mask is exact wherever there is a target. Models that make another
    mask (layers of another kind, images, prefixes) keep it, and the wait.
    """
    pretrained: Any = model
    config: Any = getattr(pretrained, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa" or config.get_text_config() is not config:
        return
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return
    layers = set(_layer_types(config))
    if not layers <= {"full_attention", "sliding_attention"}:
        return
    slides = "sliding_attention" in layers or getattr(config, "sliding_window", None) is not None
    _register()
    pretrained.set_attn_implementation(VARLEN)
    calls = _attention_calls(model)
    if not calls or not all(call.plain for call in calls) or (slides and not all("sliding_window" in call.arguments for call in calls)):
        pretrained.set_attn_implementation("sdpa")


@dataclass(frozen=True)
class _Call:
    """Of a layer to its attention."""

    head_size: int
    """The largest of q, k and v."""
    plain: bool
    """Asks for what `varlen_attention` computes: causal, without masks, biases, caps and sinks."""
    arguments: dict[str, Any]


class _Seen(Exception):  # noqa: N818
    """Ends the trial of `_attention_calls` early."""


def _attention_calls(model: nn.Module, **inputs: Any) -> list[_Call]:
    """Calls the model on meta until a layer of each kind has called attention. Empty: none did."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    pretrained: Any = model
    name = pretrained.config._attn_implementation
    layer_types = _layer_types(pretrained.config) or ["attention"]
    calls: list[_Call] = []

    def trial(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **arguments: Any) -> Any:
        causal = arguments.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        others = [attention_mask, *(arguments.get(key) for key in ("position_bias", "softcap", "s_aux"))]
        plain = bool(causal) and all(other is None for other in others)
        calls.append(_Call(max(query.shape[-1], value.shape[-1]), plain, arguments))
        if set(layer_types[: len(calls)]) == set(layer_types):
            raise _Seen
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    before = ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
    ALL_ATTENTION_FUNCTIONS.register(name, trial)
    # _Seen; or the model does not take these arguments; or it cannot run on meta beyond the layers that were seen, as most
    # mixtures of experts
    with contextlib.suppress(Exception):
        pretrained(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"), use_cache=False, **inputs)
    ALL_ATTENTION_FUNCTIONS.register(name, before)
    return calls


def _passes_bounds(model: nn.Module, *, largest_head: int | None = None) -> bool:
    """Whether attention gets the documents' bounds, and is asked for nothing that it cannot compute.

    largest_head: the largest head size of q, k and v that the kernel takes; None: any.
    """
    bounds = {
        "cu_seq_lens_q": torch.zeros(2, dtype=torch.int32, device="meta"),
        "cu_seq_lens_k": torch.zeros(2, dtype=torch.int32, device="meta"),
        "max_length_q": 2,
        "max_length_k": 2,
    }
    calls = _attention_calls(model, position_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"), **bounds)
    config: Any = model.config
    flash = config._attn_implementation in _FLASH
    return bool(calls) and all(
        all(call.arguments.get(key) is not None for key in bounds)
        and (flash or call.plain)
        and (largest_head is None or call.head_size <= largest_head)
        for call in calls
    )


def _text_config(config: Any) -> Any:
    """Of a model of text and images, the part for text; else the config itself."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _layer_types(config: Any) -> list[str]:
    return list(getattr(_text_config(config), "layer_types", None) or ())


def _register() -> None:
    """Without a mask function of the same name: transformers then makes no mask, and asks the device nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(VARLEN, varlen_attention)


def has_varlen_kernel(tensor: torch.Tensor) -> bool:
    """Whether its device has CUDA's attention kernels. The memory plan, which traces on the CPU, answers for its own device."""
    return tensor.device.type == "cuda"


def document_lengths(bounds: torch.Tensor) -> list[int]:
    """Tokens of each document, for who goes through them one by one; waits for the device."""
    lengths: list[int] = bounds.diff().tolist()
    return lengths


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within documents; transformers' attention interface.

    query: (batch, heads, tokens, head size); key and value: the same, with key-value heads. cu_seq_lens_q (documents + 1,):
    where documents start in the flattened rows; None: every row is one. sliding_window: tokens that one sees, itself
    included. Returns (batch, tokens, heads, head size).
    """
    assert attention_mask is None
    if cu_seq_lens_q is None:
        return _dense(module, query, key, value, dropout, scaling, sliding_window, kwargs), None
    batch, _, tokens, _ = query.shape
    # (batch x tokens, heads, head size): rows behind one another, documents as bounds
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if has_varlen_kernel(query):
        assert max_length_q is not None
        if torch.is_autocast_enabled(query.device.type):
            query, key, value = (tensor.to(torch.get_autocast_dtype(tensor.device.type)) for tensor in (query, key, value))
        out = _kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    else:
        # split, not slices: the backward pass of split is one concatenation
        sizes = document_lengths(cu_seq_lens_q)
        documents = zip(*(torch.split(tensor, sizes) for tensor in (query, key, value)), strict=True)
        parts = []
        for document in documents:
            q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in document)
            parts.append(_dense(module, q, k, v, dropout, scaling, sliding_window, kwargs)[0])
        out = torch.cat(parts)
    return out.reshape(batch, tokens, *out.shape[1:]), None


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    """Names of the kernel's parameters, which differ between versions of torch. Cached: each layer asks in each forward pass."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    known = _varlen_parameters()
    left = sliding_window - 1 if sliding_window is not None else -1
    # The kernel takes one head size, a multiple of 8, and multi-head latent attention has two (192 and 128 in DeepSeek).
    # Zeros behind q and k change no score; those behind v give columns that are cut off again.
    size, value_size = query.shape[-1], value.shape[-1]
    width = -(-max(size, value_size) // 8) * 8
    query, key, value = (
        tensor if tensor.shape[-1] == width else functional.pad(tensor, (0, width - tensor.shape[-1])) for tensor in (query, key, value)
    )
    options: dict[str, Any] = {"scale": scaling if scaling is not None else size**-0.5}
    if "window_size" in known:
        options["window_size"] = (left, 0)  # 0 to the right: causal
    else:
        options["is_causal"] = True
        assert sliding_window is None
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)
    assert isinstance(out, torch.Tensor)
    return out if value_size == width else out[..., :value_size]


def _dense(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    tokens, mask = query.shape[2], None
    if sliding_window is not None and sliding_window < tokens:
        place = torch.arange(tokens, device=query.device)
        distance = place[:, None] - place[None, :]
        mask = (distance >= 0) & (distance < sliding_window)
    elif _repeats_heads(query, key):
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    out: torch.Tensor
    out, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    return out


def _repeats_heads(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether key-value heads are to be repeated, so that a fused kernel computes attention.

    Of CUDA's fused kernels only that for float32 does not take grouped heads. Without it torch computes the scores of all
    pairs of tokens: (heads, tokens, tokens), four copies of them in the backward pass (torch 2.11 to 2.13).
    """
    if not has_varlen_kernel(query) or torch.is_autocast_enabled(query.device.type):
        return False
    return query.dtype == torch.float32 and key.shape[1] < query.shape[1]


@torch.no_grad()
def check_isolation(model: nn.Module, *, name: str, vocabulary: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Packs two documents of eight tokens and changes the first: the second's logits must stay as they are.

    For models that are trusted to keep documents apart by themselves: some take position_ids and attend across all the
    same. model: called as in training; every rank must call this. name: of the model's class, for the message. dtype: that it
    computes in, whose rounding is no difference: kernels may add up in another order (experts with other tokens, say).
    Raises RecipeError where the second document sees the first.
    """
    generator = torch.Generator().manual_seed(0)
    first, other, second = (torch.randint(vocabulary, (1, 8), generator=generator) for _ in range(3))
    positions = torch.arange(8).repeat(2).unsqueeze(0).to(device)
    training = model.training
    model.eval()
    try:
        one, two = (
            model(input_ids=torch.cat([before, second], dim=1).to(device), position_ids=positions, use_cache=False).logits[:, 8:].float()
            for before in (first, other)
        )
    except TypeError:
        crosses, difference = True, float("nan")  # no position_ids: nothing tells it where a document starts
    else:
        difference = float((one - two).abs().max() / one.abs().max())
        crosses = not difference < max(1e-4, 4 * torch.finfo(dtype).eps)
    finally:
        model.train(training)
    if crosses:
        raise RecipeError(
            f"data.packing: in {name} a packed document sees the one before it (its logits change by {difference:.1e}); "
            "use packing: false, or another model.attention"
        )
