"""Floating-point operations of a model's forward and backward passes, from its parameters and config."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from launcher.libraries import families
from launcher.models.description import (
    Config,
    embeddings,
    experts_of_token,
    largest_of_layers,
    layer_configs,
    parts_without_text,
    text_config,
)
from launcher.models.nf4 import shapes
from launcher.models.record import record_of


@dataclass(frozen=True)
class TokenFlops:
    """Floating-point operations for a token."""

    products: float = 0.0
    """Of the parameters."""
    attention: tuple[tuple[float, float], ...] = ()
    """For groups of layers: operations for each token that is attended to, and the window."""

    def at(self, document_length: float) -> float:
        """Operations for a token of a document of this many tokens. A causal mask does not halve
        the operations of attention; a window limits them."""
        return self.products + sum(
            operations * min(document_length, window) for operations, window in self.attention
        )

    def times(self, factor: float) -> TokenFlops:
        """As many times the operations."""
        attention = tuple((factor * operations, window) for operations, window in self.attention)
        return TokenFlops(factor * self.products, attention)

    def plus(self, other: TokenFlops) -> TokenFlops:
        """The operations of both."""
        return TokenFlops(self.products + other.products, self.attention + other.attention)


def token_flops(model: nn.Module) -> TokenFlops:
    """Operations of the forward and the backward pass: 6 N + 6 heads (d + e) T for each layer with
    attention (PaLM, appendix B, which has h for heads times head size); none for a model without a
    config.

    N is the number of parameters without input embeddings, with only the experts that a token uses;
    a frozen one counts 4 in place of 6. d and e are the sizes of a head's keys and values, T is the
    length of the token's document, at most the window.
    """
    config, unused = text_config(model), set(parts_without_text(model))
    multi_token = record_of(model).multi_token
    depths = 0 if multi_token is None or not multi_token.settings.train else multi_token.depths
    if multi_token is not None and not depths:  # they are in no pass of a step
        unused |= {name for name, _ in model.named_parameters() if name.startswith("mtp.")}
    if not getattr(config, "num_hidden_layers", 0) or not getattr(config, "hidden_size", 0):
        return TokenFlops()
    tied = getattr(config, "tie_word_embeddings", False)
    embedding = None if tied else getattr(embeddings(model)[0], "weight", None)
    products = sum(
        (6.0 if parameter.requires_grad else 4.0) * used
        for name, parameter, used in _used_parameters(model, config)
        if parameter is not embedding and name not in unused
    )
    sizes = [*_attention_layers(config)]
    if depths:  # each has a block more, and asks the head again
        sizes += [sizes[-1]] * depths
        head = embeddings(model)[1].weight
        products += (6.0 if head.requires_grad else 4.0) * depths * head.numel()
    layers = Counter(sizes)
    return TokenFlops(
        products, tuple((6.0 * count * size, window) for (size, window), count in layers.items())
    )


def recomputed_flops(model: nn.Module, blocks: Collection[nn.Module]) -> TokenFlops:
    """Operations of another forward pass of these blocks: a third of those in `token_flops` of
    attention, in all layers alike, and 2 N."""
    config = text_config(model)
    used = sum(used for block in blocks for _, _, used in _used_parameters(block, config))
    layers = getattr(config, "num_hidden_layers", 0) or 1
    whole = TokenFlops(0.0, token_flops(model).attention).times(len(blocks) / layers / 3)
    return whole.plus(TokenFlops(2.0 * used))


def _attention_layers(config: Config) -> Iterator[tuple[float, float]]:
    """For each layer with attention: the sizes of its keys and values of all heads, added, and its
    window (infinity: none). A recurrent layer has parameters only."""
    layers = layer_configs(config)
    keys = families.LAYER_KEYS
    types = next((found for key in keys if (found := getattr(config, key, None))), None)
    slides = getattr(config, "use_sliding_window", True)
    if types is None:
        windows = slides and largest_of_layers(config, "sliding_window")
        types = ["sliding_attention" if windows else "attention"] * config.num_hidden_layers
    if len(layers) == 1:
        layers = layers * len(types)
    for name, layer in zip(types, layers, strict=True):
        kind = families.layer_kind(name)
        if not kind.attends:
            continue
        heads = getattr(layer, "num_attention_heads", None) or 1
        head = getattr(layer, "head_dim", None) or layer.hidden_size / heads
        if name == "full_attention":  # Gemma 4 in transformers 5.17
            head = getattr(layer, "global_head_dim", None) or head
        keys = values = heads * head
        if rotated := getattr(layer, "qk_rope_head_dim", None):  # multi-head latent attention
            keys = heads * (getattr(layer, "qk_nope_head_dim", 0) + rotated)
            values = heads * (getattr(layer, "v_head_dim", None) or head)
        limit = kind.window or ""
        window = getattr(layer, limit, None) if slides or limit != "sliding_window" else None
        yield keys + values, float(window or math.inf)


def _used_parameters(
    module: nn.Module, config: object
) -> Iterator[tuple[str, nn.Parameter, float]]:
    """Each parameter by name, and how many of its elements a token uses: some of the experts."""
    counts = (largest_of_layers(config, name) for name in families.EXPERT_COUNTS)
    experts = next((count for count in counts if count), 1)
    share = (experts_of_token(config) or experts) / experts
    shape_of = shapes(module)
    for name, parameter in module.named_parameters():
        count = shape_of[parameter].numel()
        yield name, parameter, count * (share if ".experts." in name else 1.0)
