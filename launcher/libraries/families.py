"""What the launcher knows of transformers' families of models by their names.

Most of a model is found by trial on the meta device, or read from its class, so a new family needs
no line here. What cannot be found so stands in this module: it is the only one with names of model
types, of kinds of layers and of keys of configs that have a meaning in the code. All entries were
read in transformers 5.23 unless one says otherwise; `tests/unit/libraries/test_families.py` compares
them with the installed version.

Two more tables have classes as values, and stand with these: `models/tower_inputs.py` (the form of a
family's images) and `models/head.py` (a family's own transformation of logits).

This module imports neither torch nor transformers: a recipe is checked with it before either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# Kinds of layers: the values of `layer_types` and `layers_block_type` in configs


@dataclass(frozen=True)
class LayerKind:
    """How the layers of a kind pass information from one token to another."""

    attends: bool = False
    """Whether they have attention, whose operations depend on the length of a document."""
    recurrent: bool = False
    """Whether they carry a state or a convolution from token to token, also beside attention."""
    window: str | None = None
    """The key of the config with the number of tokens that a token attends to; None: no limit."""
    packs: bool = True
    """Whether positions, masks or bounds keep packed documents apart, once recurrent layers compute
    each document by itself."""


LAYER_KINDS = {
    "attention": LayerKind(attends=True, packs=False),  # Jamba's name, in layers_block_type
    "full_attention": LayerKind(attends=True),
    "sliding_attention": LayerKind(attends=True, window="sliding_window"),
    "chunked_attention": LayerKind(attends=True, window="attention_chunk_size"),
    # It selects tokens without regard to documents
    "indexed_attention": LayerKind(attends=True, window="index_topk", packs=False),
    "linear_attention": LayerKind(recurrent=True),
    "mamba": LayerKind(recurrent=True, packs=False),  # Jamba's name, in layers_block_type
    "conv": LayerKind(recurrent=True),
    "hybrid": LayerKind(attends=True, recurrent=True),
    "hybrid_sliding": LayerKind(attends=True, recurrent=True, window="sliding_window"),
    "mlp": LayerKind(),
    "moe": LayerKind(),
    "dense": LayerKind(packs=False),  # a value of mlp_layer_types only
    "sparse": LayerKind(packs=False),
}
UNKNOWN_LAYER = LayerKind(attends=True, packs=False)
"""What a kind of layers without an entry is taken for."""
LAYER_KEYS = ("layer_types", "layers_block_type")
"""The keys of a config that list the kinds of its layers."""


def layer_kind(name: str) -> LayerKind:
    """The entry of a kind of layers."""
    return LAYER_KINDS.get(name, UNKNOWN_LAYER)


def unpackable_layers(kinds: Iterable[str], *, recurrent: bool) -> set[str]:
    """Those of these kinds of layers that mix packed documents. recurrent: whether recurrent layers
    compute each document by itself."""
    return {
        kind
        for kind in kinds
        if not layer_kind(kind).packs or (layer_kind(kind).recurrent and not recurrent)
    }


# Model types: what neither the config nor the class of a model tells

DECODERS = {"gpt_neox", "gpt_neox_japanese"}
"""Decoders whose configs have an `is_decoder` of false, which their code does not read."""
NOT_ON_TEXT = {
    "ernie4_5_vl_moe": "its layers have experts of images, which text does not use",
    "git": "its layers and its vision tower are one model",
    "diffusion_gemma": "it denoises blocks of tokens, and does not predict the next one",
    "kosmos-2": "it needs an image in each forward pass",
    "paligemma": "its tokens of a text see the ones after them",
}
"""Types of models of images and text that cannot be trained on text alone, and why."""
SEE_AHEAD = {"cpmant", "prophetnet"}
"""Types of causal models of transformers whose tokens see the ones after them."""
ROW_POSITIONS = {"bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus"}
"""Types that count the positions of a whole row, and ignore `position_ids`."""
SHIFTED_POSITIONS = {"kosmos-2.5"}
"""Types that begin positions after the id of the padding token, and do not shift `position_ids`, which
packed and divided rows have."""
WITHOUT_TENSOR_PLAN = {
    "doge": "a rank makes attention masks for all heads, and has a part of the heads"
}
"""Types whose plan of transformers for tensor parallelism does not work, and why."""
CARRY_A_STATE = {"deepseek_v4", "minimax", "recurrent_gemma", "rwkv", "xlstm"}
SELECT_TOKENS = {
    "axk2",
    "deepseek_v32",
    "dots3_note",
    "dots3_note_text",
    "glm5_next",
    "glm5_next_text",
    "glm_moe_dsa",
    "hy_v4",
    "minimax_m3_vl",
    "minimax_m3_vl_text",
    "mistral_large4",
    "mistral_large4_text",
    "qwen4_exp",
    "qwen4_exp_text",
    "unlimited_ocr",
}
MASK_WITHOUT_DOCUMENTS = {
    "inkling2",
    "inkling2_text",
    "bert",
    "bert-generation",
    "big_bird",
    "bigbird_pegasus",
    "bloom",
    "camembert",
    "cpmant",
    "data2vec-text",
    "electra",
    "ernie",
    "falcon",
    "megatron-bert",
    "mpt",
    "mvp",
    "openai-gpt",
    "prophetnet",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "trocr",
    "xglm",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
"""Types whose packed documents cannot be kept apart: for a state, for attention that selects tokens,
or for masks that do not tell documents apart (these were tried)."""
ENCODERS = {
    "albert",
    "bert",
    "big_bird",
    "camembert",
    "convbert",
    "data2vec-text",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "ernie",
    "eurobert",
    "flaubert",
    "fnet",
    "gte",
    "ibert",
    "jina_embeddings_v3",
    "longformer",
    "megatron-bert",
    "mobilebert",
    "modernbert",
    "mpnet",
    "mra",
    "nomic_bert",
    "nystromformer",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "squeezebert",
    "ultrabert",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
    "yoso",
}
"""Types of text models whose tokens see the ones after them: those with a masked language model in
transformers 5.23."""
WITHOUT_POSITIONS = ("afmoe", "gpt_oss", "granitemoehybrid")
"""Types of text models that do not show `position_ids` to the masks that they make, so that these
do not keep documents apart."""
TEXT_POSITIONS_FIRST = ("qwen2_5_vl",)
"""Types that make masks from text positions, which stand before those of time, height and width."""
VIDEO_PROCESSORS = {
    "gemma4": "Gemma4VideoProcessor",
    "internvl": "InternVLVideoProcessor",
    "llava_onevision": "LlavaOnevisionVideoProcessor",
    "qwen2_vl": "Qwen2VLVideoProcessor",
    "qwen2_5_vl": "Qwen2VLVideoProcessor",
    "qwen3_5": "Qwen3VLVideoProcessor",
    "qwen3_5_moe": "Qwen3VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "qwen3_vl_moe": "Qwen3VLVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
}
"""The class of the video processor of a model whose files name none, by its type."""
FRAMES_ARE_IMAGES = ("internvl", "smolvlm")
"""Types of models that take each frame of a video as an image, with the tokens of images."""
COORDINATES: dict[str, Literal["pixels", "thousandths"]] = {
    "qwen2_vl": "thousandths",
    "qwen2_5_vl": "pixels",
    "qwen3_vl": "thousandths",
    "qwen3_vl_moe": "thousandths",
    "qwen3_5": "thousandths",
    "qwen3_5_moe": "thousandths",
    "glm4v": "thousandths",
    "glm4v_moe": "thousandths",
    "glm46v": "thousandths",
    "internvl": "thousandths",
}
"""By the type of a model of images, the coordinates in texts that it was trained with: pixels of the image
in the size that the model sees, or thousandths of its width and height. By the answers of Qwen's
authors (github.com/QwenLM/Qwen3-VL, issues 721, 866 and 1427), the model card of GLM-4.5V and
InternVL's page on chat data."""
OBJECT_TEXTS = {
    "qwen2_vl": (
        "<|object_ref_start|>{ref}<|object_ref_end|>",
        "<|box_start|>{pairs}<|box_end|>",
    ),
    "internvl": ("<ref>{ref}</ref>", "<box>[{list}]</box>"),
}
"""How models write the name of an object and its box, where not plainly, as in ms-swift. pairs:
(x1,y1),(x2,y2); list: [x1, y1, x2, y2]."""
MISTRAL_TOKENIZERS = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
"""Types of models that transformers' fix_mistral_regex is for."""
MIXED_DTYPES = frozenset({"MiniMaxLightningAttention"})
"""Classes of modules that multiply their inputs by buffers in float32, such as decays, and put the
result into a product with their inputs. They are written for buffers in 16 bits, of which a decay
would be wrong by 0.2 %. Other types have none: `tests/distributed/families_worker.py`."""

# Layers that predict further tokens (`models/multi_token.py`)


@dataclass(frozen=True)
class MultiTokenLayout:
    """How a family stores and computes its layers of multi-token prediction."""

    count: str
    """The key of the text config with their number; one layer where it is missing."""
    names: tuple[tuple[str, str], ...]
    """Beginnings of the names of a layer's tensors in checkpoints, and of their parts here. {layer} is
    the number of the layer after those of the trunk. A later entry takes what is left."""
    shared: tuple[tuple[str, str], ...] = ()
    """Names of copies that checkpoints have of the `input` and `output` embedding of the model."""
    most: int | None = None
    """The most layers that can be told apart by their names; None: any number."""


_AFTER_THE_TRUNK = MultiTokenLayout(
    count="num_nextn_predict_layers",
    names=(
        ("model.layers.{layer}.enorm.", "embedding_norm."),
        ("model.layers.{layer}.hnorm.", "hidden_norm."),
        ("model.layers.{layer}.eh_proj.", "projection."),
        ("model.layers.{layer}.shared_head.norm.", "norm."),
        ("model.layers.{layer}.", "block."),
    ),
    shared=(
        ("model.layers.{layer}.embed_tokens.weight", "input"),
        ("model.layers.{layer}.shared_head.head.weight", "output"),
    ),
)
_UNDER_MTP = (
    ("mtp.pre_fc_norm_embedding.", "embedding_norm."),
    ("mtp.pre_fc_norm_hidden.", "hidden_norm."),
    ("mtp.fc.", "projection."),
    ("mtp.norm.", "norm."),
    ("mtp.layers.0.", "block."),
)
_QWEN3_5 = MultiTokenLayout("mtp_num_hidden_layers", _UNDER_MTP, most=1)
MULTI_TOKEN = {
    "deepseek_v3": _AFTER_THE_TRUNK,
    "glm4_moe": _AFTER_THE_TRUNK,
    "glm4_moe_lite": _AFTER_THE_TRUNK,
    "qwen3_next": MultiTokenLayout("num_nextn_predict_layers", _UNDER_MTP, most=1),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
}
"""Types of text models whose layers of multi-token prediction can be trained. In all of them the
projection takes the embedding first and the hidden state second, the hidden state is that after the
last norm, and the block has full attention. Read in vLLM's `deepseek_mtp.py` (03356f8),
`qwen3_next_mtp.py` (055e47c) and `qwen3_5_mtp.py` (01d9980), and in `MtpModel` of transformers 5.23."""
INDEXED_BY_LAYER = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}
"""Keys of configs with a value for each layer, and the value of a layer of multi-token prediction."""

# Keys of configs, and names of parameters and arguments

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys with the number of experts of a layer."""
ANY_EXPERT_COUNT = re.compile(r"(num|n)_(\w+_)?experts|zero_expert_num")
"""Keys with any number of experts, such as shared ones: the widths of routers."""
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts")
"""Keys with the number of experts that a token is sent to; the second is Gemma 4's."""
ROUTER_LOSS = ("aux_loss_coef", "router_aux_loss_coef")
"""Keys with the coefficient of the load-balancing loss."""
ROUTERS = re.compile(r"(^|\.)(\w*_)?(gate|router)(\.|$)")
"""Names of linears that choose experts, or of the modules that hold them: small, and their choices
are sensitive to rounding."""
MLPS = ("mlp", "feed_forward")
"""Names of the MLP in a block."""
EXPERT_BIAS = ("e_score_correction_bias", "expert_bias")
"""Names of tensors, one value for each expert, that routers add to their scores to choose experts, but
not to weigh them. The second is that of AFMoE and LFM2-MoE."""
STATE_DECAY = "A_log"
"""The parameter of Mamba and of gated delta networks that their state decays by."""
STATE_PARAMETERS = (STATE_DECAY, "dt_bias", "D")
"""Parameters of these layers of which the decay of a state is computed."""
ROTARY = ("rope_scaling", "rope_theta", "rope_parameters")
"""Keys of rotary positions; the first two are those of transformers 4."""
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that models pass to all layers: where the documents of packed rows begin, and the length
of the longest."""
WEIGHT_KEYS = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "n_embd",
    "n_layer",
    "n_head",
    "n_inner",
    *EXPERT_COUNTS,
    "moe_intermediate_size",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "tie_word_embeddings",
    "hidden_act",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "architectures",
    "quantization_config",
    "n_positions",
    "depth",
    "num_heads",
    "patch_size",
}
"""Keys that decide which weights there are, their shapes, or what they compute."""
SIZE_KEYS = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "n_embd",
    "n_layer",
    "n_head",
    "n_positions",
}
"""Keys whose errors transformers finds late, without naming the key."""
UNDECLARED_KEYS = {
    "model_type",
    "torch_dtype",
    "num_labels",
    *ROTARY[:2],
    "use_return_dict",
    "partial_rotary_factor",
    "head_dim",
    "classifier_dropout",
}
"""Keys that config classes accept, or models read, without declaring them."""
STRETCHED_ROTARY = ("linear", "dynamic", "yarn", "longrope", "llama3", None)
"""Values of rope_type with which `factor` stretches positions. None: the type of the checkpoint."""

# Functions of transformers that call kernels of other packages

SCANS = {"torch_chunk_gated_delta_rule": "fla", "mamba2_chunk_scan": "mamba_ssm"}
"""Those that take the bounds of documents if this package is installed. Without it they raise."""
CONVOLUTIONS = {"causal_conv1d_fn": "causal_conv1d"}

# Entries of transformers' plans for tensor and expert parallelism

COLUMN, ROW, EMBEDDING = "colwise", "rowwise", "embedding_rowwise"
GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"
WHOLE = "replicated_with_grad_allreduce"
"""Layers by how the ranks divide them. WHOLE: each rank has the layer, and applies it to its
heads."""
STACKED_EXPERTS = "grouped_gemm"
"""Parameters with a row for each expert."""
EXPERTS = ("ep_dispatch_experts", "moe_tp_experts")
"""Modules of experts; the second name is that of transformers 5.17."""
ROUTER = "ep_router"
"""Modules whose outputs transformers 5.17 changes for its own dispatch; ours needs them as is."""
