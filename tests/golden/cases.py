"""Small runs whose losses are recorded: every strategy and objective, kinds of layers, and the shipped
recipes that run on a CPU, with small models and data of their own."""

import json
import random

LLAMA = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
TIED = LLAMA | {"tie_word_embeddings": True}
SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
GEMMA3 = TIED | SPECIAL | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 9}
GEMMA3 |= {"final_logit_softcapping": 5.0}
COHERE = TIED | SPECIAL | {"model_type": "cohere", "logit_scale": 0.25}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
MOE = LLAMA | EXPERTS | {"model_type": "qwen3_moe", "num_experts": 8}
ROUTED = MOE | {"output_router_logits": True, "router_aux_loss_coef": 1.0}
NEXT = LLAMA | EXPERTS | {"model_type": "qwen3_next", "num_experts": 4}
NEXT |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
NEXT |= {"linear_value_head_dim": 8, "shared_expert_intermediate_size": 16}
NEXT |= {"layer_types": ["linear_attention", "full_attention"]}

RECIPE = """
run: {name: golden, max_steps: 4, seed: 7}
data: {kind: text, tokenizer: bytes, train: [train.jsonl], sequence_length: 64, packing: true}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: ddp, mixed_precision: null}
optimizer: {learning_rate: 2.0e-3}
schedule: {warmup_steps: 2}
"""
BF16 = "strategy.mixed_precision={param_dtype: bfloat16}"
FSDP = "strategy.kind=fsdp"
VALID = "data.validation=[valid.jsonl]"
PAIRS_VALID = "data.validation=[pairs.jsonl]"
GENERATE = "evaluation.generate={prompts: 3, max_new_tokens: 4, metrics: [exact_match]}"
FULL = "activation_checkpointing={mode: full}"
SELECTIVE = "activation_checkpointing={mode: selective}"
LORA = "lora={rank: 4, target_modules: [q_proj, k_proj, o_proj, up_proj, down_proj]}"
LORA_HEAD = "lora={rank: 4, target_modules: [q_proj, up_proj, lm_head]}"
SAVED = "lora={rank: 4, target_modules: [q_proj], modules_to_save: [lm_head, norm, embed_tokens]}"
KEPT = ("strategy.reshard_after_backward=false", "strategy.sync_every_micro_batch=false")
INSTRUCT = (
    "data={kind: instruct, prompt_format: text, train: [pairs.jsonl], prompt_column: prompt, "
    "response_column: chosen, tokenizer: bytes, sequence_length: 64}"
)
PREFER = (
    "data={kind: preference, prompt_format: text, train: [pairs.jsonl], tokenizer: bytes, "
    "sequence_length: 64}"
)
DPO = (PREFER, "preference={loss: dpo}")
REWARD = (PREFER, "model.task=reward", PAIRS_VALID)
KTO = (
    "data={kind: unpaired, prompt_format: text, train: [marks.jsonl], tokenizer: bytes, "
    "sequence_length: 64}",
    "kto={beta: 0.1}",
)
TWO_TEXTS = "data.train={a: {files: [train.jsonl]}, b: {files: [valid.jsonl]}}"
TWO_PAIRS = "data.train={a: {files: [pairs.jsonl]}, b: {files: [more_pairs.jsonl]}}"
SMALL_CHUNKS = "small chunks"
"""The loss is computed in several chunks of the vocabulary."""

CASES = {
    "llama ddp": (LLAMA, VALID),
    "llama ddp, bf16": (LLAMA, BF16, VALID),
    "llama ddp, bf16, small chunks": (TIED, BF16, SMALL_CHUNKS),
    "llama ddp, sharded optimizer": (LLAMA, "strategy.shard_optimizer=true"),
    "llama ddp, muon, average": (LLAMA, "optimizer={name: muon, learning_rate: 2e-3, ema: 0.9}"),
    "llama fsdp, bf16": (LLAMA, FSDP, BF16, VALID),
    "llama fsdp": (LLAMA, FSDP),
    "llama fsdp, int8 state": (LLAMA, FSDP, "optimizer.state_dtype=int8"),
    "llama fsdp, not resharded": (LLAMA, FSDP, "strategy.reshard_after_forward=false"),
    "llama fsdp, kept": (LLAMA, FSDP, *KEPT),
    "llama fsdp, offload, full": (LLAMA, FSDP, "strategy.cpu_offload={pin_memory: true}", FULL),
    "llama fsdp, bf16, selective": (TIED, FSDP, BF16, SMALL_CHUNKS, SELECTIVE),
    "llama fsdp, kept logits": (LLAMA, FSDP, "model.keep_logits=true", SMALL_CHUNKS),
    "llama fsdp, whole logits": (LLAMA, FSDP, "model.chunked_loss=false", VALID),
    "llama fsdp, not packed": (LLAMA, FSDP, "data.packing=false"),
    "llama ddp, bf16, lora": (LLAMA, LORA, BF16),
    "llama fsdp, bf16, lora": (LLAMA, FSDP, LORA, BF16),
    "llama fsdp, bf16, lora of the head": (LLAMA, FSDP, LORA_HEAD, BF16, SMALL_CHUNKS),
    "llama fsdp, bf16, saved modules": (LLAMA, FSDP, SAVED, BF16),
    "llama fsdp, own loss": (LLAMA, FSDP, "objective={loss: 'golden_losses:focal'}", VALID),
    "llama fsdp, own loss of logits": (
        LLAMA,
        FSDP,
        "objective={loss: 'golden_losses:smoothing'}",
        SMALL_CHUNKS,
    ),
    "gemma3 fsdp, bf16": (GEMMA3, FSDP, BF16, VALID),
    "gemma3 ddp, small chunks": (GEMMA3, SMALL_CHUNKS),
    "cohere fsdp, not packed": (COHERE, FSDP, "data.packing=false"),
    "qwen3_moe fsdp, bf16, router": (ROUTED, FSDP, BF16, VALID),
    "qwen3_moe ddp, router, not packed": (ROUTED, "data.packing=false"),
    "qwen3_next fsdp, full": (NEXT, FSDP, FULL, VALID),
    "instruct fsdp": (LLAMA, INSTRUCT, FSDP, PAIRS_VALID, GENERATE),
    "instruct ddp, not packed": (LLAMA, INSTRUCT, PAIRS_VALID, GENERATE, "data.packing=false"),
    "dpo fsdp": (LLAMA, *DPO, FSDP, PAIRS_VALID),
    "dpo ddp, bf16": (LLAMA, *DPO, BF16, PAIRS_VALID),
    "dpo qwen3_moe fsdp": (ROUTED, *DPO, FSDP),
    "kto fsdp": (LLAMA, *KTO, FSDP),
    "reward fsdp, bf16": (LLAMA, *REWARD, FSDP, BF16),
    "reward ddp": (LLAMA, *REWARD),
    "mixture fsdp": (LLAMA, FSDP, TWO_TEXTS),
    "mixture dpo": (LLAMA, *DPO, TWO_PAIRS),
}
TWO_RANKS = {
    "llama, tensor": (TIED, FSDP, "strategy.tensor_parallel_size=2", VALID),
    "dpo, tensor": (LLAMA, *DPO, FSDP, "strategy.tensor_parallel_size=2"),
    "llama, context": (LLAMA, FSDP, "strategy.context_parallel_size=2", VALID),
    "qwen3_moe, experts": (MOE, FSDP, "strategy.expert_parallel_size=2"),
}
_SMALL = ("model.path=null", "data.tokenizer=bytes", "run.max_steps=20", "run.epochs=null")
_TEXT = ("data.train=[train.jsonl]", VALID, "data.sequence_length=64")
_FEW = ("batch={global_batch_size: 8, micro_batch_size: 2}",)
RECIPES = {
    "quickstart": (LLAMA, *_SMALL, *_TEXT, *_FEW),
    "ddp": (LLAMA, *_SMALL, *_TEXT, *_FEW, "data.validation=null"),
    "fsdp": (LLAMA, *_SMALL, *_TEXT, *_FEW, "data.validation=null"),
    "fsdp_offload": (LLAMA, *_SMALL, *_TEXT, *_FEW, "data.validation=null"),
    "finetune": (
        LLAMA,
        *_SMALL,
        *_FEW,
        "data.train=[chats.jsonl]",
        "data.validation=[chats.jsonl]",
    ),
    "prefer": (LLAMA, *_SMALL, *_FEW, "data.train=[pairs.jsonl]", PAIRS_VALID),
    "pictures": (
        None,
        "model.path=pictures",
        "run.max_steps=20",
        "run.epochs=null",
        *_FEW,
        "data.train=[pictures.jsonl]",
        "data.validation=null",
    ),
}
"""Shipped recipes, with 20 steps."""


def recipe_arguments(name, ranks):
    """The arguments of `load_recipe` of a case, and whether its loss has small chunks."""
    model, *overrides = (CASES | TWO_RANKS | RECIPES)[name]
    small = SMALL_CHUNKS in overrides
    words = [word for word in overrides if word != SMALL_CHUNKS]
    recipe = f"recipe={name}" if name in RECIPES else "recipe=golden.yaml"
    config = [] if model is None else [f"model.config={json.dumps(model)}"]
    return [recipe, *config, *words, "data.workers=0", "run.device=cpu"], small


def write_data(folder):
    """The data of all cases: the same on every machine."""
    generator = random.Random(0)
    words = ["def", "return", "self", "x", "yield", "for", "in", "(a)", "+", "class"]

    def text(least, most):
        return " ".join(generator.choice(words) for _ in range(generator.randint(least, most)))

    def pair():
        return {"prompt": text(2, 2), "chosen": f"{text(1, 3)} a", "rejected": f"{text(1, 3)} b"}

    def chat():
        turns = ({"role": role, "content": text(1, 3)} for role in ("user", "assistant"))
        return {"messages": list(turns)}

    def write(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("train.jsonl", [{"text": text(2, 14)} for _ in range(120)])
    write("valid.jsonl", [{"text": text(2, 14)} for _ in range(20)])
    write("pairs.jsonl", [pair() for _ in range(40)])
    write("more_pairs.jsonl", [pair() for _ in range(40)])
    marks = (bool(number % 3) for number in range(60))
    write(
        "marks.jsonl",
        [{"prompt": text(2, 2), "completion": text(3, 3), "label": mark} for mark in marks],
    )
    write("chats.jsonl", [chat() for _ in range(60)])
    (folder / "golden.yaml").write_text(RECIPE)
    (folder / "golden_losses.py").write_text(_LOSSES)


_LOSSES = """
from torch.nn.functional import cross_entropy


def focal(log_probabilities):
    return -((1 - log_probabilities.exp()) ** 2) * log_probabilities


def smoothing(logits, targets):
    return cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)


smoothing.needs = "logits"
"""
