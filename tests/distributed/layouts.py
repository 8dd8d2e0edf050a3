"""Models, layouts and planted faults of layout_worker.py."""

from dataclasses import replace

import torch

from launcher.models import experts
from launcher.models.record import record_of
from launcher.objectives.next_token import NextToken
from launcher.strategies.base import NormGroup
from tests.distributed.equivalence_worker import EXPERTS, GPT2, LLAMA, OFFLOAD, ZERO

ONE_KEY_HEAD = "qwen3, one key head, tied"
_QWEN3 = (
    LLAMA.replace("llama", "qwen3")
    .replace("key_value_heads: 2", "key_value_heads: 1, head_dim: 8")
    .replace("embeddings: false", "embeddings: true")
)
_TOKENS = "pad_token_id: 0, eos_token_id: 1, bos_token_id: 2, tie_"
WHOLE_HEADS = LLAMA.replace("num_key_value_heads: 2, ", "")
_QWEN3_MOE = (
    LLAMA.replace("llama", "qwen3_moe")[:-1]
    + ", head_dim: 8, num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 16}"
)
_DEEPSEEK = (
    LLAMA.replace("llama", "deepseek_v3").replace("value_heads: 2", "value_heads: 4")[:-1]
    + ", n_routed_experts: 4, n_group: 1, topk_group: 1, num_experts_per_tok: 2, moe_intermediate_size: 16, \
first_k_dense_replace: 1, q_lora_rank: 8, kv_lora_rank: 8, qk_rope_head_dim: 8, qk_nope_head_dim: 8, v_head_dim: 8}"
)
_GPT_OSS = (
    LLAMA.replace("llama", "gpt_oss")[:-1]
    + ", head_dim: 8, num_local_experts: 4, num_experts_per_tok: 2}"
)
_MIXTRAL = EXPERTS.replace("logits: true", "logits: false")
TIED, DEEP = "llama, 4 blocks, tied", "llama, 4 blocks"
_DEEP = LLAMA.replace("layers: 2", "layers: 4")
MODELS = {
    DEEP: _DEEP,
    TIED: _DEEP.replace("embeddings: false", "embeddings: true"),
    "llama, 4 blocks, bytes": _DEEP.replace("size: 64", "size: 260"),
    "llama": LLAMA,
    "llama, 67 tokens": LLAMA.replace("size: 64", "size: 67"),
    "llama, bytes": LLAMA.replace("size: 64", "size: 260"),
    ONE_KEY_HEAD: _QWEN3,
    "qwen3, two key heads": _QWEN3.replace("heads: 1", "heads: 2").replace(": true", ": false"),
    "qwen2, biases": LLAMA.replace("llama", "qwen2"),
    "mistral, windows": LLAMA.replace("llama", "mistral").replace(
        "tie_", "sliding_window: 9, tie_"
    ),
    "gemma3": LLAMA.replace("llama", "gemma3_text").replace(
        "tie_word_embeddings: false",
        "head_dim: 8, sliding_window: 9, " + _TOKENS + "word_embeddings: true",
    ),
    "phi3": LLAMA.replace("llama", "phi3").replace("tie_", _TOKENS),
    "olmo2": LLAMA.replace("llama", "olmo2"),
    "gpt_neox": WHOLE_HEADS.replace("llama", "gpt_neox"),
    "gpt2": GPT2.replace("0.1", "0.0"),
    "qwen3_moe": _QWEN3_MOE,
    "mixtral, auxiliary loss": EXPERTS,
    "mixtral": _MIXTRAL,
    "mixtral, 6 experts": _MIXTRAL.replace("experts: 4", "experts: 6"),
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": _GPT_OSS,
    "mamba2": "{model_type: mamba2, vocab_size: 64, hidden_size: 32, num_hidden_layers: 4, state_size: 8, num_heads: 4, \
head_dim: 16, n_groups: 1, expand: 2, chunk_size: 8, tie_word_embeddings: true}",
}
PP = "strategy.pipeline_parallel_size="
CP = "strategy.context_parallel_size="
TP = "strategy.tensor_parallel_size="
EP = "strategy.expert_parallel_size="
SELECTIVE = "activation_checkpointing={mode: selective}"
BUDGET = "activation_checkpointing={mode: selective, budget: 0.6}"
_ALL_BUT_ATTENTION = "activation_checkpointing={mode: all_but_attention, offload_to_cpu: true}"
_FULL = "activation_checkpointing={mode: full}"
_COPIES = "strategy.replicate=2"
_HELD_BACK = "strategy.sync_every_micro_batch=false"
_KEPT = "strategy.reshard_after_backward=false"
_INTERLEAVED = [PP + "2", "strategy.pipeline_schedule=interleaved_1f1b"]
_STATE = "strategy.cpu_offload={what: optimizer}"
_PINNED = OFFLOAD[0]
SGD = ["optimizer.name=sgd", "optimizer.learning_rate=0.03"]
FREE = ["optimizer.name=schedule_free_adamw", "schedule.kind=constant"]
_LAYERS = "target_modules: [q_proj, k_proj, o_proj, up_proj, down_proj]"
LORA = f"lora={{rank: 4, {_LAYERS}}}"
ONE_BLOCK = "lora={rank: 4, target_modules: [model.layers.2.self_attn.q_proj]}"
"""Three of four stages train nothing."""
SAVED = f"lora={{rank: 4, {_LAYERS}, modules_to_save: [embed_tokens, lm_head, norm]}}"
DORA = f"lora={{rank: 4, {_LAYERS}, dora: true, modules_to_save: [lm_head]}}"
WEIGHTED = "data.weights_column=worth"
UNPACKED = "data.packing=false"
_BYTES = ["data.tokenizer=bytes", "data.sequence_length=64", "data.validation=FOLDER/pairs.jsonl"]
PAIRS = [
    "data.kind=preference",
    "preference.loss=dpo",
    "data.prompt_format=text",
    "data.train=FOLDER/pairs.jsonl",
    *_BYTES,
]
CLASSES = [
    *("data.kind=classification", "data.train=FOLDER/pairs.jsonl", *_BYTES, UNPACKED),
    *("data.text_column=chosen", "data.label_column=label", "data.labels=[even, odd]"),
    *("model.task=sequence_classification", "model.num_labels=2"),
]
VARIANTS = {
    "pipeline 2": [PP + "2"],
    "pipeline 4": [PP + "4"],
    "pipeline 2, not packed": [PP + "2", UNPACKED],
    "pipeline 2, 1 and 3 blocks": [PP + "2", "strategy.pipeline_blocks=[1, 3]"],
    "pipeline 2, weighted": [PP + "2", WEIGHTED],
    "pipeline 2, 2 copies": [PP + "2", _COPIES],
    "pipeline 2, tensor 2": [PP + "2", TP + "2"],
    "pipeline 2, context 2": [PP + "2", CP + "2"],
    "pipeline 2, experts 2": [PP + "2", EP + "2"],
    "pipeline 2, checkpointing": [PP + "2", _FULL],
    "pipeline 4, selective": [PP + "4", SELECTIVE],
    "pipeline 2, held back": [PP + "2", _HELD_BACK],
    "pipeline 2, kept": [PP + "2", _KEPT],
    "pipeline 2, offload": [PP + "2", *OFFLOAD],
    "pipeline 2, state offloaded": [PP + "2", _STATE],
    "pipeline 4, kept logits": [PP + "4", "model.keep_logits=true"],
    "pipeline 2, lora": [PP + "2", LORA],
    "pipeline 4, adapters in one block": [PP + "4", ONE_BLOCK],
    "pipeline 4, saved modules": [PP + "4", SAVED],
    "pipeline 2, dora": [PP + "2", DORA],
    "pipeline 2, dpo": [PP + "2", *PAIRS],
    "pipeline 4, orpo": [PP + "4", *PAIRS, "preference.loss=orpo"],
    "pipeline 2, muon": [PP + "2", "optimizer.name=muon", "optimizer.momentum=0.95"],
    "pipeline 2, int8": [PP + "2", "optimizer.state_dtype=int8"],
    "pipeline 4, sgd": [PP + "4", *SGD],
    "interleaved 2": _INTERLEAVED,
    "interleaved 2, tensor 2": [*_INTERLEAVED, TP + "2"],
    "interleaved 2, checkpointing": [*_INTERLEAVED, _FULL],
    "interleaved 2, held back": [*_INTERLEAVED, _HELD_BACK],
    "context 2": [CP + "2", WEIGHTED],
    "context 2, not packed": [CP + "2", UNPACKED],
    "context 2, ddp": [CP + "2", WEIGHTED, "strategy.kind=ddp"],
    "context 4": [CP + "4", WEIGHTED],
    "context 2, 2 copies": [CP + "2", WEIGHTED, _COPIES],
    "context 4, ZeRO-1": [CP + "4", WEIGHTED, *ZERO],
    "context 2, offload": [CP + "2", WEIGHTED, *OFFLOAD],
    "context 4, selective": [CP + "4", WEIGHTED, SELECTIVE],
    "context 2, budget": [CP + "2", WEIGHTED, BUDGET],
    "context 2, held back": [CP + "2", WEIGHTED, _HELD_BACK],
    "context 4, dora": [CP + "4", DORA],
    "tensor 2": [TP + "2"],
    "tensor 4": [TP + "4"],
    "tensor 2, context 2": [TP + "2", CP + "2"],
    "tensor 2, 2 copies": [TP + "2", _COPIES],
    "tensor 2, checkpointing": [TP + "2", _FULL],
    "tensor 2, selective": [TP + "2", SELECTIVE],
    "tensor 2, held back": [TP + "2", _HELD_BACK],
    "tensor 2, kept": [TP + "2", _KEPT],
    "tensor 2, offload": [TP + "2", _PINNED],
    "tensor 2, state offloaded": [TP + "2", _STATE],
    "tensor 2, kept logits": [TP + "2", "model.keep_logits=true"],
    "tensor 2, dpo, kept logits": [TP + "2", *PAIRS, "model.keep_logits=true"],
    "tensor 2, whole logits": [TP + "2", "model.chunked_loss=false"],
    "tensor 4, sgd": [TP + "4", *SGD],
    "tensor 2, schedule-free": [TP + "2", *FREE],
    "tensor 2, lora": [TP + "2", LORA],
    "tensor 4, lora": [TP + "4", LORA],
    "tensor 2, saved modules": [TP + "2", SAVED],
    "tensor 4, dpo": [TP + "4", *PAIRS],
    "tensor 2, orpo": [TP + "2", *PAIRS, "preference.loss=orpo"],
    "tensor 2, dpo, whole logits": [TP + "2", *PAIRS, "model.chunked_loss=false"],
    "tensor 2, classes": [TP + "2", *CLASSES],
    "experts 2": [EP + "2"],
    "experts 2, not packed": [EP + "2", UNPACKED],
    "experts 4": [EP + "4"],
    "experts 2, 2 copies": [EP + "2", _COPIES],
    "experts 2, context 2": [EP + "2", CP + "2"],
    "experts 2, checkpointing": [EP + "2", _FULL],
    "experts 4, selective": [EP + "4", SELECTIVE],
    "experts 2, held back": [EP + "2", _HELD_BACK],
    "experts 4, kept": [EP + "4", _KEPT],
    "experts 2, offload": [EP + "2", _PINNED],
    "experts 2, state offloaded": [EP + "2", _STATE],
    "experts 2, lora": [EP + "2", "lora={rank: 4}"],
    "experts 2, saved modules": [EP + "2", "lora={rank: 4, modules_to_save: [lm_head]}"],
    "experts 2, muon": [EP + "2", "optimizer.name=muon", "optimizer.momentum=0.95"],
    "experts 4, sgd": [EP + "4", *SGD],
    "experts 2, schedule-free": [EP + "2", *FREE],
    "experts 2, qat": [EP + "2", "model.qat=int8"],
    "experts 2, int8": [EP + "2", "optimizer.state_dtype=int8"],
}
_COMPILED = "model.compile=true"
VARIANTS |= {
    "compiled, tensor 2": [TP + "2", _COMPILED],
    "compiled, tensor 4, checkpointing": [TP + "4", _COMPILED, _FULL],
    "compiled, tensor 2, selective": [TP + "2", _COMPILED, SELECTIVE],
    "compiled, tensor 2, context 2": [TP + "2", CP + "2", _COMPILED],
    "compiled, tensor 2, lora": [TP + "2", LORA, _COMPILED],
    "compiled, tensor 2, classes": [TP + "2", *CLASSES, _COMPILED],
    "compiled, experts 2": [EP + "2", _COMPILED],
    "compiled, experts 4, checkpointing": [EP + "4", _COMPILED, _FULL],
    "compiled, experts 2, selective": [EP + "2", _COMPILED, SELECTIVE],
    "compiled, experts 2, context 2": [EP + "2", CP + "2", _COMPILED],
    "compiled, experts 2, lora": [EP + "2", "lora={rank: 4}", _COMPILED],
    "compiled, pipeline 2, tensor 2": [PP + "2", TP + "2", _COMPILED],
}
_TILES = "model.mlp_tile=5"
VARIANTS |= {
    "tiles, copies": [_TILES, _COPIES],
    "tiles, ddp": [_TILES, "strategy.kind=ddp"],
    "tiles, ZeRO-1": [_TILES, *ZERO],
    "tiles, full": [_TILES, _FULL],
    "tiles, offload": [_TILES, *OFFLOAD],
    "tiles, held back": [_TILES, _HELD_BACK],
    "tiles, kept": [_TILES, _KEPT, SELECTIVE],
    "tiles, context 4": [_TILES, CP + "4", _FULL],
    "tiles, context 4, attention kept": [_TILES, CP + "4", _ALL_BUT_ATTENTION],
    "tiles, pipeline 2": [_TILES, PP + "2"],
    "tiles, lora": [_TILES, LORA],
    "tiles, compiled": [_TILES, _COMPILED, _FULL],
}
_OF_REFERENCE = (
    "schedule.",
    "data.",
    "lora=",
    "model.qat",
    "model.task",
    "model.num",
    "optimizer.",
    "preference.",
)
"""The reference of a variant has these of its overrides."""


def reference_of(model, variant):
    """The case on one rank that a case is compared with: a name, and its overrides."""
    own = [o for o in VARIANTS[variant] if o.startswith(_OF_REFERENCE)]
    return " ".join([model, *own]), own


def _variants(kind):
    return [variant for variant in VARIANTS if variant.startswith(kind)]


_ON_BYTES = [
    "tensor 4, dpo",
    "tensor 2, orpo",
    "tensor 2, dpo, kept logits",
    "tensor 2, dpo, whole logits",
    "tensor 2, classes",
]
_ON_BYTES_TOO = ["pipeline 2, dpo", "pipeline 4, orpo"]
_PIPELINE = [
    (DEEP, v)
    for v in (*_variants("pipeline"), *_variants("interleaved"))
    if v not in (*_ON_BYTES_TOO, "pipeline 2, experts 2")
]
_TENSOR = [(ONE_KEY_HEAD, v) for v in _variants("tensor") if v not in _ON_BYTES]
_CONTEXT = [("llama", v) for v in _variants("context")]
_EXPERTS = [("qwen3_moe", v) for v in _variants("experts") if v != "experts 2, not packed"]
_OTHERS = ("qwen2, biases", "mistral, windows", "gemma3", "phi3", "olmo2", "gpt_neox")
STEPS = {True: 3, False: 6}
"""Of a variant: in the launch "quick", and in others."""
LAUNCHES = {
    "quick": [
        (ONE_KEY_HEAD, "tensor 4"),
        ("llama", "tensor 2, context 2"),
        ("llama", "context 2"),
        ("qwen3_moe", "experts 2"),
        ("deepseek_v3", "experts 4"),
        (TIED, "pipeline 2, tensor 2"),
        (DEEP, "interleaved 2"),
    ],
    "pipeline, 1": _PIPELINE[:8],
    "pipeline, 2": _PIPELINE[8:16],
    "pipeline, 3": _PIPELINE[16:],
    "pipeline, 4": [
        *((TIED, v) for v in ("pipeline 4", "pipeline 2, tensor 2", "interleaved 2")),
        *(("llama, 4 blocks, bytes", v) for v in _ON_BYTES_TOO),
        ("qwen3_moe", "pipeline 2, experts 2"),
        (ONE_KEY_HEAD, "pipeline 2"),
        ("gpt2", "pipeline 2, not packed"),
        ("gemma3", "pipeline 2"),
        ("mistral, windows", "pipeline 2"),
        ("gpt_oss", "pipeline 2, not packed"),
        ("deepseek_v3", "pipeline 2"),
        ("mamba2", "pipeline 2, not packed"),
    ],
    "context, 1": _CONTEXT[:6],
    "context, 2": [
        *_CONTEXT[6:],
        (ONE_KEY_HEAD, "context 4"),
        ("mistral, windows", "context 4"),
        ("gpt2", "context 2, not packed"),
    ],
    "tensor, 1": _TENSOR[:7],
    "tensor, 2": _TENSOR[7:],
    "tensor, 3": [
        *(("llama", v) for v in ("tensor 2", "tensor 2, lora", "tensor 4, lora")),
        *(("llama", v) for v in ("tensor 2, context 2", "tensor 2, saved modules")),
        *(("llama, bytes", variant) for variant in _ON_BYTES),
    ],
    "tensor, 4": [(model, "tensor 2") for model in _OTHERS],
    "tensor, 5": [
        *((model, "tensor 2") for model in ("llama, 67 tokens", "qwen3, two key heads")),
        *((model, "tensor 4") for model in ("llama, 67 tokens", "qwen3, two key heads")),
        *((model, "tensor 4") for model in ("gemma3", "phi3")),
    ],
    "experts, 1": _EXPERTS[:8],
    "experts, 2": [
        *_EXPERTS[8:],
        ("mixtral", "experts 4"),
        *(("mixtral, auxiliary loss", f"{which} 2") for which in ("experts", "context")),
        ("mixtral, 6 experts", "experts 2"),
        ("deepseek_v3", "experts 2"),
        ("gpt_oss", "experts 2, not packed"),
        ("gpt_oss", "context 2"),
        ("gpt_oss", "context 2, not packed"),
    ],
    "tiles": [(DEEP, v) for v in _variants("tiles") if "compiled" not in v],
    "compiled, 1": [
        (DEEP, "tiles, compiled"),
        (ONE_KEY_HEAD, "compiled, tensor 4, checkpointing"),
        *((ONE_KEY_HEAD, f"compiled, tensor 2{more}") for more in ("", ", selective", ", lora")),
    ],
    "compiled, 2": [
        ("qwen3_moe", "compiled, experts 4, checkpointing"),
        *(("qwen3_moe", f"compiled, experts 2{more}") for more in ("", ", selective", ", lora")),
    ],
    "compiled, 3": [
        ("llama, bytes", "compiled, tensor 2, classes"),
        ("gemma3", "compiled, tensor 2"),
        ("deepseek_v3", "compiled, experts 2"),
        ("gpt_oss", "compiled, experts 2"),
        (TIED, "compiled, pipeline 2, tensor 2"),
    ],
    # Each takes three times the CPU time of one without context parallelism: a launch has a time limit
    "compiled, 4": [(ONE_KEY_HEAD, "compiled, tensor 2, context 2")],
    "compiled, 5": [("qwen3_moe", "compiled, experts 2, context 2")],
}
"""Pairs of a model and a variant that one launch compares with one rank."""


# Planted faults. Each is given a training before its first step


def parts_not_summed(training):
    """q_norm and k_norm get the mean over ranks, each of which has some heads."""
    training.wrapped._partial = [replace(e, summed=set()) for e in training.wrapped._partial]


def counted_twice(training):
    """What tensor parallel ranks have in common counts for each of them."""
    levels = training.wrapped.norm_groups
    training.wrapped.norm_groups = [NormGroup(level.group) for level in levels]


def wrong_bounds(training):
    """Each rank's part of the vocabulary begins an entry too late. A weight of rank 1 differs from
    those of the ranks that hold the same by some bits, which losses do not show."""
    record_of(training.wrapped.module).head._first += 1
    if training.ranks.rank == 1:
        weight = training.wrapped.module.get_parameter("model.norm.weight")
        with torch.no_grad():
            weight.to_local().mul_(1 + 2**-22)


def undivided_gradients(training):
    """Gradients of experts are not divided by the ranks of a group."""
    experts._DividedGradient.backward = staticmethod(lambda ctx, gradient: (gradient, None))


def positions_of_the_part(training):
    """Each rank has the positions of the beginning of a row."""
    original = NextToken.loss

    def loss(self, model, micro_batch):
        positions = micro_batch.inputs["position_ids"]
        inputs = {**micro_batch.inputs, "position_ids": positions - positions[:, :1]}
        return original(self, model, replace(micro_batch, inputs=inputs))

    NextToken.loss = loss


BOUNDS = "bounds of the vocabulary"
FAULTS = {
    "q_norm and k_norm not summed": (ONE_KEY_HEAD, "tensor 2", parts_not_summed),
    "tensor ranks counted twice": (ONE_KEY_HEAD, "tensor 2", counted_twice),
    BOUNDS: (ONE_KEY_HEAD, "tensor 4", wrong_bounds),
    "experts not scaled": ("qwen3_moe", "experts 2", undivided_gradients),
    "positions not those of the part": ("llama", "context 2", positions_of_the_part),
}
"""Model, variant and function. Each changes the norm of the gradients of the first step."""
