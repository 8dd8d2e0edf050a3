"""Cross-entropy without full logits: the head is applied to a chunk of the vocabulary at a time.

Logits are usually the largest activation: 4,096 tokens and a vocabulary of 128,256 are 2 GiB in
float32, and their softmax and gradient as much again. Here the forward pass keeps only the log of
the sum of exponentials per token, and the backward pass computes each chunk's logits once more. With
`keep_logits`, the logits stay in the dtype of the matrix product (1 GiB in bfloat16) instead, and
the backward pass replaces each chunk by its gradient: three products instead of four, and the same
bits.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from launcher.libraries.private import mark_dynamic
from launcher.models.adapted import base_layer, weights_adapted_in
from launcher.models.description import embeddings, text_config
from launcher.models.linear_chunks import chunks_of, linear_gradients, logits_of
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.models.record import record_of
from launcher.models.shards import local_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_ELEMENTS = 2**26
"""Logits (tokens x vocabulary entries) of a chunk, 256 MiB in float32. Larger matrix products are
no faster."""
WIDTH_MULTIPLE = 64
"""A divisor of the width of a chunk, for fast matrix products."""


def chunk_width(tokens: int, vocabulary: int) -> int:
    """Vocabulary entries of a chunk. All chunks have as many if up to twice the necessary number of
    chunks allows it; otherwise the last one has fewer."""
    chunks = max(1, -(-tokens * vocabulary // CHUNK_ELEMENTS))
    for more in range(chunks, 2 * chunks + 1):
        if vocabulary % (more * WIDTH_MULTIPLE) == 0:
            return vocabulary // more
    width = -(-vocabulary // chunks)
    return min(vocabulary, -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


@dataclass(frozen=True)
class Transform:
    """The transformation of a model's logits: a multiplication, then a soft cap at +-softcap."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Computes in float32; returns the logits themselves if there is nothing to do."""
        logits = logits if self.scale == 1.0 else logits.float() * self.scale
        if self.softcap is None:
            return logits
        return torch.tanh(logits.float() / self.softcap) * self.softcap

    def backward(self, gradient: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        """The gradient before the transform. A soft cap needs the transformed `logits`. Overwrites
        both."""
        if self.softcap is not None:
            assert logits is not None
            gradient.addcmul_(gradient, logits.div_(self.softcap).square_(), value=-1)
        return gradient if self.scale == 1.0 else gradient.mul_(self.scale)


@dataclass(frozen=True)
class Chunking:
    """How the logits of a chunk are computed."""

    transform: Transform
    width: int
    """Vocabulary entries of a chunk."""
    compile: bool = False
    """Compile what follows the matrix products: it then reads the logits once or twice in each
    pass, where its eager operators move 48 bytes for a logit in bfloat16."""
    reduction: Literal["sum", "none"] = "sum"
    """none: a loss for each target."""
    group: dist.ProcessGroup | None = None
    """Tensor parallel ranks, each with a part of the vocabulary; None: this rank has all of it."""
    first: int = 0
    """The first vocabulary entry of this rank."""
    keep_logits: bool = False
    """Keep all logits, in the dtype of the inputs, for the backward pass."""

    def function(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled or not."""
        return _compiled(eager) if self.compile else eager


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function)
    return compiled


HeadFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, Chunking], torch.Tensor
]
"""A function of the arguments of `linear_cross_entropy` that returns (tokens, columns)."""


def linear_cross_entropy(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunking: Chunking,
) -> torch.Tensor:
    """Cross-entropies of transform(inputs @ weight.T + bias), in float32: their sum, or (tokens,).

    `inputs` (tokens, features) are in the dtype of the matrix products, `weight` is (vocabulary,
    features), and `targets` (tokens,) are IGNORED where there is no loss. With tensor
    parallelism, `weight` and `bias` are this rank's rows, and all ranks get the same result.
    """
    function: Any = _LinearCrossEntropy
    if not torch.is_grad_enabled():  # nothing would free the logits before the last chunk's
        chunking = dataclasses.replace(chunking, keep_logits=False)
    losses: torch.Tensor = function.apply(inputs, weight, bias, targets, chunking)
    return losses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        chunking: Chunking,
    ) -> torch.Tensor:
        statistics, transform = chunking.function(_statistics), chunking.transform
        largest, sums, keeps = [], [], chunking.keep_logits
        kept: dict[int, torch.Tensor] = {}

        def logits_of_chunk(chunk: slice) -> torch.Tensor:
            logits = _logits_of_chunk(inputs, weight, bias, chunk, chunking)
            if keeps:
                kept[chunk.start] = logits
            return logits

        at_target = torch.zeros(len(targets), 1, device=targets.device)
        with torch.autocast(targets.device.type, enabled=False):
            for chunk in chunks_of(weight, chunking.width):
                column = (targets - (chunking.first + chunk.start))[:, None]
                highest, total, at_target = statistics(
                    logits_of_chunk(chunk), column, at_target, transform, overwrite=not keeps
                )
                largest.append(highest)
                sums.append(total)
        log_sum = torch.cat(sums, 1).log_().add_(torch.cat(largest, 1)).logsumexp(1, keepdim=True)
        if chunking.group is not None:
            parts = [torch.empty_like(log_sum) for _ in range(chunking.group.size())]
            dist.all_gather(parts, log_sum, group=chunking.group)
            log_sum = torch.cat(parts, 1).logsumexp(1, keepdim=True)
            dist.all_reduce(at_target, group=chunking.group)
        losses = (log_sum - at_target).masked_fill((targets == IGNORED)[:, None], 0)
        ctx.chunking, ctx.kept = chunking, kept
        ctx.save_for_backward(inputs, weight, bias, targets, log_sum)
        return losses.sum() if chunking.reduction == "sum" else losses[:, 0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, bias, targets, log_sum = ctx.saved_tensors
        gradient_of_logits, transform = ctx.chunking.function(_gradient), ctx.chunking.transform
        per_token = (gradient * (targets != IGNORED))[:, None]

        def logits_of_chunk(chunk: slice) -> torch.Tensor:
            if chunk.start in ctx.kept:  # not in a second backward pass
                kept: torch.Tensor = ctx.kept.pop(chunk.start)
                return kept
            return _logits_of_chunk(inputs, weight, bias, chunk, ctx.chunking)

        def of_chunk(chunk: slice) -> torch.Tensor:
            column = (targets - (ctx.chunking.first + chunk.start))[:, None]
            # No name for the logits here, so that they can be freed before the gradient is made
            d_logits: torch.Tensor = gradient_of_logits(
                logits_of_chunk(chunk), log_sum, column, per_token, transform
            )
            return d_logits

        d_inputs, *others = linear_gradients(ctx, inputs, weight, bias, of_chunk)
        ctx.kept.clear()  # a trace leaves chunks out
        if d_inputs is not None and ctx.chunking.group is not None:
            dist.all_reduce(d_inputs, group=ctx.chunking.group)
        d_inputs = None if d_inputs is None else d_inputs.to(inputs.dtype)
        return d_inputs, *others, None, None


def _logits_of_chunk(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    chunk: slice,
    chunking: Chunking,
) -> torch.Tensor:
    """`logits_of`. If the last chunk is narrower, the width is marked as dynamic: the functions below
    would be compiled for the first width, and again for the last one."""
    logits = logits_of(inputs, weight, bias, chunk)
    if chunking.compile and len(weight) % chunking.width:
        mark_dynamic(logits, 1)
    return logits


# The functions that are compiled take the logits of a chunk in the dtype of the matrix product, and
# the columns of the targets in it (tokens, 1), which may be outside


def _statistics(
    logits: torch.Tensor,
    column: torch.Tensor,
    at_target: torch.Tensor,
    transform: Transform,
    *,
    overwrite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest logit of each token, the sum of the exponentials of the differences to it, and
    the logit of the target where it is in this chunk: all (tokens, 1), float32. Eager, it may
    overwrite the logits with `overwrite`."""
    overwrite = overwrite or transform != Transform()  # whose result is another tensor
    values = transform(logits)
    del logits
    width = values.shape[1]
    inside = (column >= 0) & (column < width)
    own = values.gather(1, column.clamp(0, width - 1)).float()
    largest = values.amax(1, keepdim=True).float()
    exponentials = _exp_of_difference(values, largest, overwrite=overwrite)
    return largest, exponentials.sum(1, keepdim=True), torch.where(inside, own, at_target)


def _gradient(
    logits: torch.Tensor,
    log_sum: torch.Tensor,
    column: torch.Tensor,
    per_token: torch.Tensor,
    transform: Transform,
) -> torch.Tensor:
    """The gradient of the logits, in their dtype. Eager, it overwrites them."""
    values, dtype, width = transform(logits), logits.dtype, logits.shape[1]
    del logits
    if torch.compiler.is_compiling():  # one kernel that reads the logits and writes the gradient
        at_target = torch.arange(width, device=values.device) == column
        gradient = ((values.float() - log_sum).exp() - at_target.float()) * per_token
        return transform.backward(gradient, values).to(dtype)
    kept = None if transform.softcap is None else values.clone()
    probabilities = _exp_of_difference(values, log_sum, overwrite=True)
    del values
    inside = ((column >= 0) & (column < width)).float()
    gradient = probabilities.scatter_add_(1, column.clamp(0, width - 1), -inside)
    if transform == Transform() and dtype != torch.float32 and not _copies_to_cast(gradient):
        return torch.mul(gradient, per_token, out=torch.empty_like(gradient, dtype=dtype))
    return transform.backward(gradient.mul_(per_token), kept).to(dtype)


def _exp_of_difference(
    values: torch.Tensor, subtracted: torch.Tensor, *, overwrite: bool
) -> torch.Tensor:
    """exp(values - subtracted) in float32. Eager, it overwrites float32 values with `overwrite`."""
    if torch.compiler.is_compiling():
        return (values.float() - subtracted).exp()
    if values.dtype != torch.float32 and _copies_to_cast(values):
        values, overwrite = values.float(), True
    if values.dtype == torch.float32 and overwrite:
        return values.sub_(subtracted).exp_()
    return (values - subtracted).exp_()


def _copies_to_cast(tensor: torch.Tensor) -> bool:
    """Whether an operator on tensors of several dtypes makes copies of them in one dtype."""
    return tensor.device.type == "cpu"


class _Call:
    """A forward pass of a model whose head is asked instead of returning logits."""

    def __init__(self, head: Head, question: Question) -> None:
        self.head, self.question = head, question
        self.answer: torch.Tensor | None = None


_asked = ContextVar[_Call | None]("asked", default=None)


class Head:
    """The last linear layer of a model, which is asked about its inputs, the hidden states: for
    losses, log-probabilities, logits of some tokens, or any function of its weights, without full logits.

    Takes the place of the layer's forward method. It is asked through the forward method of the
    model's class, which may do more than call it (a router's loss, layers between), in the one call
    of the layer: so FSDP gathers it once, and its gradients follow from the answer. A call carries its
    own question and answer; nothing is kept in between, and passes may be nested or out of order.
    """

    def __init__(self, layer: Any, transform: Transform, *, compile: bool = False) -> None:
        self.layer, self._transform, self._compile = layer, transform, compile
        self._logits: Callable[[torch.Tensor], torch.Tensor] = layer.forward
        self._group: dist.ProcessGroup | None = None
        self._first = 0
        self.keep_logits = False
        """Whether the forward pass keeps the logits for the backward pass. The loss of a
        `HeadFunction` does not."""
        self.elsewhere: Callable[[], bool] = lambda: False
        """Whether another stage of a pipeline has the layer. Answers are zeros in the same form then."""
        layer.forward = self._forward

    def divide(
        self,
        group: dist.ProcessGroup,
        first: int,
        logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Divides the vocabulary over the ranks of the group: this rank's part of the head begins
        with the entry `first`. `logits` computes all of them."""
        self._group, self._first, self._logits = group, first, logits

    def ask(
        self, model: nn.Module, inputs: Mapping[str, Any], question: Question
    ) -> tuple[Any, Any]:
        """Calls the model once. Returns what the question computes from the hidden states (tokens,
        features), which is (tokens, columns), and the model's other outputs."""
        token = _asked.set(call := _Call(self, question))
        try:
            outputs = model(**inputs, use_cache=False)
        finally:
            _asked.reset(token)
        # Whatever the model computed from the head's output is discarded
        outputs.logits = None
        assert call.answer is not None
        return call.answer.flatten(0, -2), outputs

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        call = _asked.get()
        if call is None or call.head is not self:
            return hidden if self.elsewhere() else self._logits(hidden)
        flat = hidden.flatten(0, -2)
        answer = call.question(self, flat)
        # In the form of logits, which the model expects; a copy, since FSDP warns about views. FSDP
        # finds the backward pass by the tensor that is returned, so the answer is the same one
        rows = hidden.shape[:-1] if len(answer) == len(flat) else (1, len(answer))
        call.answer = answer.view(*rows, answer.shape[-1]).clone()
        return call.answer

    # Questions

    def logits(self, hidden: torch.Tensor, *, at: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens, vocabulary), transformed, of all tokens or those at these places."""
        if self.elsewhere():
            count, width = len(hidden if at is None else at), base_layer(self.layer).weight.shape[0]
            return hidden.new_zeros(1).expand(count, width)
        return self._transform(self._logits(hidden if at is None else hidden[at]))

    def losses(
        self, hidden: torch.Tensor, *, micro_batch: MicroBatch, reduction: Literal["sum", "none"]
    ) -> torch.Tensor:
        """`cross_entropies` of the targets at the positions of a micro-batch."""
        if self.elsewhere():
            return _zeros(micro_batch)[: 1 if reduction == "sum" else None]
        return self.cross_entropies(*_at_positions(hidden, micro_batch), reduction)

    def cross_entropies(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        reduction: Literal["sum", "none"] = "none",
    ) -> torch.Tensor:
        """The cross-entropies of `targets` (tokens,), 0 where IGNORED: (tokens, 1), or their sum
        (1, 1), float32."""
        chunking, parts = self._chunking(targets, reduction), self._vocabulary
        if chunking.width < parts or chunking.group is not None:
            losses = linear_cross_entropy(*_linear(self.layer, hidden), targets, chunking)
        else:  # a single chunk: its logits are kept for the backward pass, not recomputed
            cross_entropy = chunking.function(_cross_entropy)
            losses = cross_entropy(self._logits(hidden), targets, self._transform, reduction)
        return losses.view(-1, 1)

    @torch.no_grad()
    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """(tokens,), int64: the entries with the largest logits, computed for some tokens at a time."""
        tokens = max(1, CHUNK_ELEMENTS // self._vocabulary)
        parts = torch.split(hidden, tokens)
        return torch.cat([self._transform(self._logits(part)).argmax(-1) for part in parts])

    def function(
        self,
        hidden: torch.Tensor,
        *,
        micro_batch: MicroBatch,
        function: HeadFunction,
        columns: int,
    ) -> torch.Tensor:
        """What the function returns of the inputs, weight and bias of the layer, at the positions of a
        micro-batch: (positions, columns)."""
        if self.elsewhere():
            return _zeros(micro_batch).expand(-1, columns)
        hidden, targets = _at_positions(hidden, micro_batch)
        return function(*_linear(self.layer, hidden), targets, self._chunking(targets, "none"))

    @property
    def _vocabulary(self) -> int:
        return len(local_part(base_layer(self.layer).weight))

    def _chunking(self, targets: torch.Tensor, reduction: Literal["sum", "none"]) -> Chunking:
        return Chunking(
            self._transform,
            chunk_width(len(targets), self._vocabulary),
            self._compile,
            reduction,
            self._group,
            self._first,
            self.keep_logits,
        )


Question = Callable[[Head, torch.Tensor], torch.Tensor]
"""question(head, hidden): (tokens, columns) of hidden states (tokens, features)."""


def _zeros(micro_batch: MicroBatch) -> torch.Tensor:
    """(positions, 1), or (targets, 1), float32."""
    targets, positions = micro_batch.targets, micro_batch.positions
    assert targets is not None
    count = targets.numel() if positions is None else len(positions)
    return torch.zeros(count, 1, device=targets.device)


def _at_positions(
    hidden: torch.Tensor, micro_batch: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states and the targets at the positions."""
    assert micro_batch.targets is not None
    if micro_batch.positions is not None:
        hidden = hidden.index_select(0, micro_batch.positions)
    return hidden, micro_batch.at_positions(micro_batch.targets)


def _cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, transform: Transform, reduction: str
) -> torch.Tensor:
    logits = transform(logits.float())
    return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)


def _linear(
    head: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Inputs, weight and bias of the head's matrix product, which has its adapter in it."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    inputs, bias = hidden.to(dtype), base_layer(head).bias
    weight = local_part(base_layer(head).weight)
    for adapted in weights_adapted_in(head):
        inputs, weight = adapted.product(hidden, inputs, weight)
    return inputs, weight, None if bias is None else local_part(bias)


def computes_loss(model: nn.Module) -> bool:
    """Whether losses are computed without full logits (`Head`)."""
    return record_of(model).head is not None


def logits_transform(model: PreTrainedModel) -> Transform | None:
    """The transformation that a causal language model on the meta device applies to the output of
    its head. None if the head is not a linear layer (adapters are allowed), or if the model applies
    more than its config describes: final_logit_softcapping (Gemma), logit_scale (Cohere),
    logits_scaling, a divisor (Granite), and lm_head_multiplier (Falcon-H1).
    """
    head = embeddings(model)[1]
    if type(base_layer(head)) is not nn.Linear or not hasattr(model, "base_model"):
        return None
    config = model.config.get_text_config(decoder=True)

    def number(name: str) -> float | None:
        value = getattr(config, name, None)
        return value if isinstance(value, int | float) and value else None

    scale = (number("logit_scale") or 1.0) * (number("lm_head_multiplier") or 1.0)
    scale /= number("logits_scaling") or 1.0
    transform = Transform(scale, number("final_logit_softcapping"))
    bases = [lambda model: model.base_model]
    if text_config(model) is not model.config:  # of more than text
        bases.append(_decoder)  # its forward may be called without that of the base model
    return transform if any(_is_last(model, base, transform) for base in bases) else None


def _decoder(model: Any) -> nn.Module:
    decoder: nn.Module = model.get_decoder()
    return getattr(decoder, "model", decoder)  # that of Llama 4 has the head


def _is_last(
    model: PreTrainedModel,
    base_of: Callable[[PreTrainedModel], nn.Module],
    transform: Transform,
) -> bool:
    """Whether the model applies the transform to the head's output, and nothing else: runs the
    forward method of a copy with fixed outputs of the base model and of the head."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Outputs(MoeModelOutputWithPast):  # type: ignore[misc]
        def __getattr__(self, name: str) -> None:
            """Fields of other models, such as the cross_attentions of GPT-2, are None."""

    model = copy.deepcopy(model)  # some models keep what they compute
    head = embeddings(model)[1]
    logits = torch.linspace(-40, 40, 64).view(1, 4, 16)
    hidden = torch.zeros(1, 4, base_layer(head).in_features, device="meta")
    head.forward = lambda hidden: logits.clone()
    try:
        base_of(model).forward = lambda *args, **kwargs: Outputs(last_hidden_state=hidden)
        ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
        with torch.no_grad():
            transformed = model(input_ids=ids, use_cache=False).logits
        return bool(torch.allclose(transformed, transform(logits), rtol=1e-5, atol=1e-5))
    except Exception:  # models raise anything on arguments and values that they do not expect
        return False
