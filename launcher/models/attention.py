"""Attention within the documents of packed sequences, without a mask.

transformers builds a mask of tokens x tokens in every forward pass, and synchronizes with the
device to find the documents. Here attention receives their bounds instead (`cu_seq_lens_q`):
torch's variable-length kernel on CUDA, elsewhere one dense attention per document.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import itertools
import logging
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import varlen

from launcher.distributed.hardware import find_gpu
from launcher.errors import RecipeError, first_line
from launcher.libraries import families
from launcher.libraries.families import BOUNDS, layer_kind
from launcher.libraries.private import (
    attention_choice,
    attention_implementation,
    is_stateful,
    tree_map_only,
    varlen_backward,
    varlen_forward,
)
from launcher.models import tracing
from launcher.models.description import (
    Config,
    describe,
    has_other_inputs,
    largest_of_layers,
    layer_configs,
    text_config,
)
from launcher.models.documents import documents_at
from launcher.models.micro_batch import DocumentMasking
from launcher.models.predictions import logits
from launcher.models.recurrent import can_separate_documents
from launcher.models.tower_inputs import TowerForm

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VARLEN, DIVIDED_ROWS = "launcher_varlen", "launcher_divided_rows"
"""Names in transformers' table of attention functions: of `varlen_attention`, and the beginning of
those of context parallelism, which has a function for each group of ranks. Neither has masks."""
LARGEST_HEAD = 256
"""The largest head size of torch's variable-length kernel, FlashAttention-2."""
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
)
"""What the kernel needs for fewer key and value heads than query heads: nothing in torch 2.11."""
logger = logging.getLogger(__name__)

planned_gpu = ContextVar[str | None]("planned_gpu", default=None)
"""The name of the GPU that a plan is for; None: the one that is present."""

Call = dict[str, Any]
"""Arguments of an attention call, with `head_size`, and `plain`: whether it is causal attention
without masks, biases and caps."""


def isolate_documents(
    model: PreTrainedModel,
    *,
    sequence_length: int,
    device: torch.device,
    compute_dtype: torch.dtype,
    attention: str = "auto",
) -> DocumentMasking:
    """How this model keeps packed documents apart.

    Replaces attention by `varlen_attention` if the model uses `sdpa`, or has sinks and no `sdpa`,
    passes the bounds to its layers (which is tried here), and the device has a kernel.
    sequence_length is the number of tokens of a packed row. attention: model.attention. Raises
    RecipeError if a layer mixes tokens of different documents;
    recurrent layers are separated before (`separate_documents`).
    """
    implementation = attention_implementation(model) or ""
    flash = implementation.startswith("flash_attention")
    instead = "use data.packing=false"
    refuse_other_layers(
        model, sequence_length, key="data.packing", instead=instead, packed=not flash
    )
    if _exceeds_chunk(model, sequence_length):
        return "mask"  # the kernel knows no chunks
    bounds = torch.zeros(2, dtype=torch.int32, device="meta")
    positions = torch.zeros(1, 2, dtype=torch.long, device="meta")
    inputs = dict(zip(BOUNDS, (bounds, bounds, 2, 2), strict=True)) | {"position_ids": positions}
    widest = LARGEST_HEAD if device.type == "cuda" else math.inf

    def has_bounds(call: Call) -> bool:
        return all(call.get(key) is not None for key in BOUNDS)

    without_sdpa = implementation == "eager" and attention == "auto"

    def fits(call: Call) -> bool:
        return has_bounds(call) and call["plain"] and call["head_size"] <= widest

    passed = False
    if flash:
        passed = _all_calls(model, inputs, has_bounds)
    elif (implementation == "sdpa" or without_sdpa) and not missing_for_varlen(
        model, device, compute_dtype
    ):
        passed = _use_varlen(model, inputs, fits, for_sinks=without_sdpa)
        if passed and device.type == "cuda" and torch.cuda.is_available():
            _use_flash_attention_3(device)
    if not passed and model.config.model_type in families.TEXT_POSITIONS_FIRST:
        decoder = model.get_decoder()
        decoder.register_forward_pre_hook(_with_text_positions, with_kwargs=True)
    text = model.config.get_text_config(decoder=True)
    if not passed and text.model_type in families.WITHOUT_POSITIONS:
        hook = functools.partial(_with_masks, text, compute_dtype)
        model.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    return "varlen" if passed else "mask"


def _with_text_positions(module: nn.Module, args: object, inputs: Call) -> tuple[object, Call]:
    """Qwen2.5-VL makes the mask of packed documents from text positions, which stand before those
    of time, height and width: (4, batch, tokens). In text, all four are equal."""
    positions = inputs.get("position_ids")
    if positions is not None and positions.ndim == 2:
        inputs = inputs | {"position_ids": positions.expand(4, -1, -1)}
    return args, inputs


def _with_masks(
    config: PreTrainedConfig, dtype: torch.dtype, module: nn.Module, args: object, inputs: Call
) -> tuple[object, Call]:
    """Makes the masks of packed documents, for each kind of layer, as for `generate`: a model of
    `WITHOUT_POSITIONS` takes them. config: of the text model. dtype: of computation."""
    from transformers.masking_utils import create_masks_for_generate

    positions = inputs.get("position_ids")
    if positions is None or inputs.get("attention_mask") is not None:
        return args, inputs
    # Of the embeddings only shape, dtype and device are read
    embeddings = torch.empty(*positions.shape, 0, dtype=dtype, device=positions.device)
    masks = create_masks_for_generate(
        config=config,
        inputs_embeds=embeddings,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    return args, inputs | {"attention_mask": masks}


def refuse_other_layers(
    model: PreTrainedModel,
    sequence_length: int,
    *,
    key: str,
    instead: str,
    packed: bool = False,
    recurrent: bool = False,
) -> None:
    """Raises RecipeError, which names `key` and what to do `instead`, if a layer mixes tokens in
    another way than by attention to all earlier tokens of a document or window. packed: rows keep
    their documents apart: recurrent layers compute each by itself, and transformers' masks count
    chunks in each. recurrent: the caller checks the recurrent layers that can compute each by itself."""
    name, kinds = type(model).__name__, describe(model).kinds
    separates = (packed or recurrent) and can_separate_documents(model)
    others = families.unpackable_layers(kinds, recurrent=separates)
    if others or (is_stateful(model) and not separates):
        others = families.unpackable_layers(kinds, recurrent=False)
        what = ", ".join(sorted(others)) or "a state"
        raise RecipeError(
            f"{key}: {name} has layers ({what}) that carry information from one token to the "
            f"next, across documents and parts of a sequence; {instead}"
        )
    if _exceeds_chunk(model, sequence_length) and not (packed and _counts_by_document()):
        chunk = model.config.get_text_config(decoder=True).attention_chunk_size
        raise RecipeError(
            f"{key}: {name} attends within chunks of {chunk} tokens, counted from the start of a "
            f"sequence; use a data.sequence_length of at most {chunk}, or {instead}"
        )


def _exceeds_chunk(model: PreTrainedModel, sequence_length: int) -> bool:
    """Whether layers attend within chunks that are shorter than the rows (Llama 4)."""
    chunk = largest_of_layers(text_config(model), "attention_chunk_size")
    return bool(chunk) and "chunked_attention" in describe(model).kinds and sequence_length > chunk


def _counts_by_document() -> bool:
    """Whether transformers' masks of packed documents count chunks from the start of each (5.23).
    Before, they counted from the start of the row."""
    from transformers import masking_utils

    return hasattr(masking_utils, "packed_sequence_compatibility_function")


def missing_for_varlen(
    model: PreTrainedModel, device: torch.device, compute_dtype: torch.dtype
) -> str | None:
    """What the run would need so that varlen attention computes its packed rows, without a mask, such
    as "float32 on CPUs"; None: nothing is missing."""
    if device.type != "cuda":
        # In bfloat16 the CPU compiles and keeps kernels for each length: slower than a mask, and
        # 230 MiB more in a small benchmark (torch 2.13)
        return None if compute_dtype == torch.float32 else "float32 on CPUs"
    if without_flash(device):
        return "a GPU of compute capability 8.0 or more"
    config = model.config.get_text_config(decoder=True)
    dropouts = [getattr(config, key, 0) for key in ("attention_dropout", "attn_pdrop")]
    if any(dropouts):
        return "a model without dropout in its attention"
    half = compute_dtype in (torch.bfloat16, torch.float16)
    return None if half else "bfloat16 or float16 on GPUs (strategy.mixed_precision)"


def without_flash(device: torch.device) -> bool:
    """Whether the GPU, or that of the plan, is too old for FlashAttention (compute capability 8.0).
    Without either, a recent one is assumed."""
    if (planned := planned_gpu.get()) is not None:
        known = find_gpu(planned)
        return known is not None and not known.flash
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)


def _use_flash_attention_3(device: torch.device) -> None:
    """Replaces FlashAttention-2 in torch's operators on a Hopper GPU, if FlashAttention-3 is
    installed."""
    installed = importlib.util.find_spec("flash_attn_interface") is not None
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    if installed and hopper and "FA3" in torch.nn.attention.list_flash_attention_impls():
        torch.nn.attention.activate_flash_attention_impl("FA3")


def attention_kernels(
    model: nn.Module, *, packed: bool, device: torch.device, compute_dtype: torch.dtype
) -> str:
    """The kernels that attention uses on this GPU, for the summary of a run."""
    config, implementation = text_config(model), attention_implementation(model)
    own = (implementation or "").startswith((VARLEN, DIVIDED_ROWS))
    if config is None or not (own or implementation == "sdpa"):
        return f"{implementation or 'that of the model'}, chosen by model.attention"
    without_mask = implementation != "sdpa"
    if without_mask and any("sink" in name for name, _ in model.named_parameters()):
        half = compute_dtype in (torch.bfloat16, torch.float16)
        return f"{_varlen_kernel() if half else 'all scores'}, with sinks"
    sizes = [_sizes_of_heads(layer) for layer in layer_configs(config)]
    if not all(isinstance(each, int) for each in itertools.chain(*sizes)):  # lists, by layer
        return "scaled_dot_product_attention"
    options: dict[str, Any] = {"device": device, "dtype": compute_dtype, "requires_grad": True}
    kernels = dict.fromkeys(_dense_kernel(*each, not without_mask, options) for each in set(sizes))
    dense = " and ".join(kernels)
    if not packed or not without_mask:
        return f"{dense} of scaled_dot_product_attention{'' if without_mask else ', with a mask'}"
    return f"packed rows {_varlen_kernel()}, other rows {dense}"


def _varlen_kernel() -> str:
    version = (torch.nn.attention.current_flash_attention_impl() or "FA2").removeprefix("FA")
    return f"FlashAttention-{version} (varlen_attn)"


def _sizes_of_heads(config: Config) -> tuple[int, int, int]:
    """The numbers of query heads and of key heads, and their size."""
    heads = getattr(config, "num_attention_heads", 1)
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", heads) // heads
    return heads, groups, size


def _dense_kernel(heads: int, groups: int, size: int, masked: bool, options: Call) -> str:
    """The kernel that computes attention of rows, with a mask or causal. options: of tensors."""
    query = torch.empty(1, heads, 128, size, **options)
    grouped = groups < heads and not masked and _takes_groups(query, query)
    key = torch.empty(1, groups if grouped else heads, 128, size, **options)
    mask = torch.ones(1, 1, 128, 128, device=query.device, dtype=torch.bool) if masked else None
    chosen = attention_choice(query, key, mask, is_causal=not masked, enable_gqa=grouped)
    return chosen.lower().replace("_", " ")


def drop_causal_mask(model: PreTrainedModel, attention: str = "auto") -> None:
    """Removes transformers' mask where it is only causal, for rows of one document that are padded
    on the right: there, `sdpa` without a mask is exact wherever there is a target, and so is
    attention with sinks. attention: model.attention.

    With the mask, transformers synchronizes with the device in every forward pass to see whether
    `position_ids` are those of packed documents. Models with other masks keep them.
    """
    config = getattr(model, "config", None)
    implementation = None if config is None else attention_implementation(model)
    without_sdpa = implementation == "eager" and attention == "auto"
    if config is None or not (implementation == "sdpa" or without_sdpa):
        return
    layers, text = set(describe(model).kinds), config.get_text_config()
    known, config = text is config or has_other_inputs(config), text
    both_ways = getattr(config, "use_bidirectional_attention", False)
    causal = getattr(config, "is_causal", True) and not both_ways
    attending = {kind for kind in layers if layer_kind(kind).attends}
    if not known or not causal or not attending <= {"full_attention", "sliding_attention"}:
        return
    slides = "sliding_attention" in layers or largest_of_layers(config, "sliding_window") > 0
    _use_varlen(
        model,
        {},
        lambda call: call["plain"] and (not slides or "sliding_window" in call),
        for_sinks=without_sdpa,
    )


def _use_varlen(
    model: PreTrainedModel, inputs: Call, fits: Callable[[Call], bool], *, for_sinks: bool
) -> bool:
    """Replaces the model's attention if all its calls fit. transformers makes no mask for it.

    for_sinks: the model has no `sdpa`; its attention is replaced only if sinks are the reason.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(VARLEN, varlen_attention)
    before = attention_implementation(model)
    set_text_attention(model, VARLEN)
    if attention_implementation(model) != VARLEN:  # its attention cannot be replaced
        return False
    sinks: list[bool] = []

    def recorded(call: Call) -> bool:
        sinks.append(has_sinks(call))
        return fits(call)

    replaced = _all_calls(model, inputs, recorded) and (any(sinks) or not for_sinks)
    if not replaced:
        set_text_attention(model, before or "sdpa")
    return replaced


def use_tower_attention(
    model: PreTrainedModel, form: TowerForm, *, device: torch.device, compute_dtype: torch.dtype
) -> None:
    """Replaces the attention of a tower where the host would wait for the device. For attachments of
    several lengths the device must have a kernel; elsewhere the host waits."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = form.attention
    if name is None or attention_implementation(model) != "sdpa":  # chosen by model.attention
        return
    needs_kernel = form.several_lengths and device.type == "cuda"
    if not needs_kernel or missing_for_varlen(model, device, compute_dtype) is None:
        ALL_ATTENTION_FUNCTIONS.register(name, varlen_attention)
        model.set_attn_implementation({"vision_config": name})


def set_text_attention(model: PreTrainedModel, name: str) -> None:
    """Sets the attention of the text model. In a tower attention is not causal."""
    text, parts = text_config(model), model.config.sub_configs
    keys = [key for key in parts if getattr(model.config, key, None) is text]
    model.set_attn_implementation(dict.fromkeys(keys, name) if keys else name)


def _all_calls(model: PreTrainedModel, inputs: Call, fits: Callable[[Call], bool]) -> bool:
    """Runs a copy of the model on meta until a layer of each kind has called attention. Returns
    whether there were calls and all fit. A copy, because some models keep what they compute."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = attention_implementation(model)
    kinds = (kind for kind in describe(model).kinds if layer_kind(kind).attends)
    layer_types = list(kinds) or ["attention"]
    fitting: list[bool] = []

    def trial(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object = None,
        **arguments: object,
    ) -> tuple[torch.Tensor, None]:
        causal = arguments.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        others = [arguments.get(key) for key in ("position_bias", "softcap")]
        plain = bool(causal) and all(other is None for other in [attention_mask, *others])
        head_size = max(query.shape[-1], value.shape[-1])
        fitting.append(fits({**arguments, "head_size": head_size, "plain": plain}))
        if set(layer_types[: len(fitting)]) == set(layer_types):
            raise StopIteration
        batch, heads, tokens, _ = query.shape
        return query.new_empty(batch, tokens, heads, value.shape[-1]), None

    ALL_ATTENTION_FUNCTIONS[name] = trial  # before the one of all instances of the table
    # Models raise anything: if they do not take these arguments, or cannot run on meta beyond the
    # recorded layers
    try:
        ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
        tried = copy.deepcopy(model)
        for module in tried.modules():
            if hasattr(module, "has_gate"):  # experts: they read how many tokens each one has
                module.forward = _same_shape
        tried(input_ids=ids, use_cache=False, **inputs)
    except StopIteration:  # by the trial, which has seen enough
        pass
    except Exception as error:  # also of the trial itself, so that a bug of it can be seen
        logger.debug(f"the trial of attention ended: {type(error).__name__}: {first_line(error)}")
    del ALL_ATTENTION_FUNCTIONS[name]
    return bool(fitting) and all(fitting)


def has_sinks(call: Call) -> bool:
    """Whether an attention call has sinks: a score of each head that takes part in the softmax, and
    has no value (gpt-oss)."""
    return call.get("s_aux") is not None


def _same_shape(hidden_states: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(hidden_states)


def has_varlen_kernel(tensor: torch.Tensor) -> bool:
    """Whether CUDA's attention kernels are used."""
    trace = tracing.current()
    return tensor.device.type == "cuda" if trace is None else trace.cuda


def document_lengths(bounds: torch.Tensor, *, of_tower: bool = False) -> list[int]:
    """Tokens of each document, or patches of each attachment or window. Synchronizes with the device."""
    if (trace := tracing.current()) is not None:
        kinds = trace.tower_lengths if of_tower else (trace.document_lengths,)
        return list(next(lengths for lengths in kinds if len(lengths) == len(bounds) - 1))
    lengths: list[int] = bounds.diff().tolist()
    return lengths


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within documents, by transformers' attention interface: causal, unless `is_causal`
    or this attribute of the module is False, as in towers, whose documents are attachments or parts of
    them.

    query, key and value are (batch, heads, tokens, head size), the result is (batch, tokens, heads,
    head size). `cu_seq_lens_q` (documents + 1,) says where documents start in the flattened rows;
    without it, each row is one document. `max_length_q` is the length of the longest document.
    `sliding_window` is the number of tokens that a token attends to, itself included. `s_aux` are
    the sinks (heads,).
    """
    assert attention_mask is None
    if options.get("is_causal") is None:
        options["is_causal"] = getattr(module, "is_causal", True)
    inputs = [query, key, value]
    if options.get("cu_seq_lens_q") is None:
        # Other operators would need a mask of tokens x tokens
        windowed = (options.get("sliding_window") or query.shape[2]) < query.shape[2]
        if not ((has_sinks(options) or windowed) and _kernel_fits(query, key, options)):
            return _dense(inputs, options), None
        options |= _bounds_of_rows(query)
    # (batch x tokens, heads, head size): rows concatenated
    rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in inputs]
    if has_varlen_kernel(query):
        out = _kernel(rows, options)
    else:
        out = _each_document(rows, options)
    batch, _, tokens, _ = query.shape
    return out.reshape(batch, tokens, *out.shape[1:]), None


def _kernel_fits(query: torch.Tensor, key: torch.Tensor, options: Call) -> bool:
    """Whether the variable-length kernel takes rows of these tensors. It has no dropout, and a
    query that follows cached keys has fewer tokens than they."""
    if options.get("dropout") or query.shape[2] != key.shape[2]:
        return False
    device = query.device.type
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if enabled else query.dtype
    half = dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= LARGEST_HEAD
    return half and has_varlen_kernel(query) and not without_flash(query.device)


def _bounds_of_rows(query: torch.Tensor) -> Call:
    """The arguments that make each row one document."""
    batch, _, tokens, _ = query.shape
    ends = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * tokens
    return dict(zip(BOUNDS, (ends, ends, tokens, tokens), strict=True))


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="attention of one document after the other, on a CPU"
)
def _each_document(inputs: list[torch.Tensor], options: Call) -> torch.Tensor:
    """Not compiled: its graph would depend on the number of documents and on their lengths."""
    sizes = document_lengths(options["cu_seq_lens_q"], of_tower=not _is_causal(options))
    parts = []
    for document in zip(*(torch.split(tensor, sizes) for tensor in inputs), strict=True):
        dense = [tensor.transpose(0, 1).unsqueeze(0) for tensor in document]
        parts.append(_dense(dense, options)[0])
    return torch.cat(parts)


def _kernel(inputs: list[torch.Tensor], options: Call) -> torch.Tensor:
    device = inputs[0].device.type
    if torch.is_autocast_enabled(device):
        inputs = [tensor.to(torch.get_autocast_dtype(device)) for tensor in inputs]
    # The kernel takes one head size, a multiple of 8; multi-head latent attention has two. Zeros
    # appended to q and k change no score; those appended to v give columns that are removed.
    size, value_size = inputs[0].shape[-1], inputs[2].shape[-1]
    width = -(-max(size, value_size) // 8) * 8
    missing = [width - tensor.shape[-1] for tensor in inputs]
    query, key, value = (
        functional.pad(tensor, (0, zeros)) if zeros else tensor
        for tensor, zeros in zip(inputs, missing, strict=True)
    )
    scaling, window = options.get("scaling"), options.get("sliding_window")
    bounds, longest = options["cu_seq_lens_q"], options["max_length_q"]
    scale = size**-0.5 if scaling is None else scaling
    sides = (-1 if window is None else window - 1, 0 if _is_causal(options) else -1)
    if has_sinks(options):
        function: Any = _KernelWithSinks
        out = function.apply(query, key, value, options["s_aux"], bounds, longest, scale, sides)
    else:
        out = varlen.varlen_attn(
            query,
            key,
            value,
            bounds,
            bounds,
            longest,
            longest,
            scale=scale,
            window_size=sides,
            **_GROUPED,
        )
    assert isinstance(out, torch.Tensor)
    return out if value_size == width else out[..., :value_size]


class _KernelWithSinks(torch.autograd.Function):
    """The variable-length kernel, and a sink for each head.

    With L = log sum_j exp(s_j) of the kernel and the sink s, weights are exp(s_j - L'), where
    L' = log(exp(L) + exp(s)): the kernel's output times exp(L - L'). The kernel's backward pass
    recomputes weights from the log-sum-exp that it is given, and takes sum_j p_j dp_j from output
    times gradient. So with L' and the scaled output it gives the gradients of attention with
    sinks. That of a sink is - exp(s - L') times output times gradient, because its value is 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        bounds: torch.Tensor,
        longest: int,
        scale: float,
        window: tuple[int, int],
    ) -> torch.Tensor:
        out, log_sum, state = varlen_forward(query, key, value, bounds, longest, scale, window)
        score = sinks.float()[:, None]
        with_sink = torch.logaddexp(log_sum, score)  # (heads, tokens)
        share = (log_sum - with_sink).exp().t().unsqueeze(2)
        out = (out * share).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, bounds, out, with_sink, state)
        ctx.longest, ctx.scale, ctx.window = longest, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, bounds, out, with_sink, state = ctx.saved_tensors
        of_inputs = varlen_backward(
            gradient.contiguous(),
            query,
            key,
            value,
            out,
            with_sink,
            bounds,
            ctx.longest,
            state,
            ctx.scale,
            ctx.window,
        )
        of_sinks = gradient_of_sinks(gradient, out, sinks, with_sink)
        return *of_inputs, of_sinks, None, None, None, None


def gradient_of_sinks(
    gradient: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor, log_sum: torch.Tensor
) -> torch.Tensor:
    """The gradient of sinks (heads,), from the output (tokens, heads, head size), its gradient, and the
    log-sum-exp (heads, tokens) of the scores with the sinks: see `_KernelWithSinks`."""
    weighted = (gradient.float() * out.float()).sum(2).t()
    of_sinks: torch.Tensor = -((sinks.float()[:, None] - log_sum).exp() * weighted).sum(1)
    return of_sinks.to(sinks.dtype)


def _dense(inputs: list[torch.Tensor], options: Call) -> torch.Tensor:
    """Attention within each row, in the layout of `varlen_attention`."""
    query, key, value = inputs
    tokens, mask, window = query.shape[2], None, options.get("sliding_window")
    if window is not None and window < tokens:
        position = torch.arange(tokens, device=query.device)
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance < window)
    if has_sinks(options):
        key, value = _repeat_heads(query, key, value)
        return _scores_with_sinks(query, key, value, mask, options)
    grouped = mask is None and query.shape[1] > key.shape[1] and _takes_groups(query, value)
    if not grouped:
        key, value = _repeat_heads(query, key, value)
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout_p=options.get("dropout", 0.0),
        is_causal=mask is None and tokens > 1 and _is_causal(options),
        scale=options.get("scaling"),
        enable_gqa=grouped,
    )
    return out.transpose(1, 2).contiguous()


def _is_causal(options: Call) -> bool:
    return options.get("is_causal") is not False


def _scores_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: Call,
) -> torch.Tensor:
    """`_dense` with sinks, from all scores."""
    heads, tokens, size = query.shape[1:]
    if mask is None:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    scaling = options.get("scaling")
    scores = query @ key.transpose(2, 3) * (size**-0.5 if scaling is None else scaling)
    scores = scores.float().masked_fill(~mask, -torch.inf)
    sinks = options["s_aux"].float().view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks], dim=3).softmax(3)[..., :-1].to(value.dtype)
    if dropout := options.get("dropout", 0.0):
        weights = functional.dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous()


def _takes_groups(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a fused kernel takes fewer key and value heads than query heads.

    On CUDA this depends on the GPU in float16 (compute capability 8.0) and is never so in float32.
    Otherwise torch would compute and keep all scores. Heads are repeated in float16 on every GPU,
    so that a plan made without a GPU is right.
    """
    if not query.shape[-1] == value.shape[-1] <= LARGEST_HEAD:
        return False
    device, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return dtype == torch.bfloat16 or not has_varlen_kernel(query)


def _repeat_heads(query: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values (batch, heads, tokens, head size) with as many heads as the query."""
    groups = query.shape[1] // others[0].shape[1]
    return [each.repeat_interleave(groups, dim=1) if groups > 1 else each for each in others]


@torch.no_grad()
def check_both_ways(
    model: nn.Module,
    *,
    name: str,
    vocabulary: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raises RecipeError if the first token of a row does not see the last one, though the config says
    so (is_causal: false): layers may not read the config. Every rank must call this."""
    row = torch.randint(vocabulary, (1, 8), generator=torch.Generator().manual_seed(0))
    other = row.clone()
    other[0, -1] = (row[0, -1] + 1) % vocabulary
    found = [logits(model, {"input_ids": ids.to(device)})[0, 0].float() for ids in (row, other)]
    if torch.equal(*found):
        what = f"{name} has layers whose tokens do not see those after them"
        raise RecipeError(f"model.bidirectional: {what}; set it to false")


def check_isolation(
    model: nn.Module,
    *,
    name: str,
    vocabulary: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    document_masking: DocumentMasking = "mask",
    recurrent: bool = False,
) -> None:
    """Raises RecipeError if the logits of a packed document are not those of the document at the
    beginning of a row: some models take position_ids and still attend across documents, and some
    embed the positions of the row.

    Every rank must call this. name is that of the model's class. dtype is that of the computation;
    differences within its rounding error are accepted, since kernels may add in another order.
    recurrent: whether `separate_documents` has changed the model.
    """
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(vocabulary, (2, 1, 8), generator=generator).to(device)
    positions = torch.arange(8).repeat(2).unsqueeze(0)
    inputs: Call = {"position_ids": positions}
    if recurrent:
        inputs["documents"] = documents_at(positions.numpy())
    if document_masking == "varlen":
        bounds = torch.tensor([0, 8, 16], dtype=torch.int32)
        inputs |= dict(zip(BOUNDS, (bounds, bounds, 8, 8), strict=True))
    inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)

    def of_row(*documents: torch.Tensor) -> torch.Tensor:
        return logits(model, {"input_ids": torch.cat(documents, dim=1), **inputs}).detach().float()

    training = model.training
    model.eval()
    try:
        alone = of_row(second, first)[:, :8]
        after_first = of_row(first, second)[:, 8:]
        # Logits of a head that begins with zeros are all 0
        largest = alone.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        difference = float((alone - after_first).abs().max() / largest)
    except TypeError as error:
        if "position_ids" not in str(error):
            raise RecipeError(
                f"model: {name} fails in a forward pass: {type(error).__name__}: "
                f"{first_line(error)}; is a value missing in its config, such as pad_token_id?"
            ) from error
        what = f"{name} takes no position_ids, so it cannot keep packed documents apart"
        raise RecipeError(f"data.packing: {what}; use data.packing=false") from None
    finally:
        model.train(training)
    if not math.isfinite(difference):
        raise RecipeError(
            f"model: the logits of {name} are not finite before the first step: are its weights "
            "damaged?"
        )
    if not difference < max(1e-4, 4 * torch.finfo(dtype).eps):
        raise RecipeError(
            f"data.packing: in {name} a packed document sees the one before it, or its positions do not "
            f"begin at zero (its logits change by {difference:.1e}); use data.packing=false, or another "
            "model.attention"
        )
