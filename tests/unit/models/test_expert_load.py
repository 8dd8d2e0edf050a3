"""Tests of the counts of chosen experts, and of the biases that balance them."""

import inspect
from collections import Counter
from functools import partial

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from launcher.data.loader import GlobalBatch, StepStatistics, StepTotals
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.libraries.families import EXPERT_BIAS
from launcher.models.build import build_model
from launcher.models.expert_load import make_biases_buffers, watch_experts
from launcher.models.experts import find_experts
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.objectives.loss import summed_loss
from launcher.optimizers.optimizer import LossScale, make_optimizer
from launcher.recipe import schema
from launcher.strategies.activation_checkpointing import checkpoint_blocks
from launcher.strategies.one_rank import OneRank
from launcher.training.loop import Update, train_steps
from tests.unit.models.recurrent_families import BASE, FAMILIES

ALONE = RankLayout(rank=0, size=1, group=None, device=torch.device("cpu"))
EXPERTS, CHOSEN, RATE = 8, 2, 0.01
SMALL = BASE | {"num_experts_per_tok": CHOSEN, "moe_intermediate_size": 16, "head_dim": 8}
LATENT = SMALL | {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1}
LATENT |= {"first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8}
LATENT |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
WITH_BIAS = {
    "deepseek_v3": LATENT | {"num_key_value_heads": 4, "head_dim": 4},
    "glm4_moe": LATENT,
    "afmoe": SMALL | {"num_experts": EXPERTS, "num_dense_layers": 1},
    "ernie4_5_moe": SMALL
    | {"moe_num_experts": EXPERTS, "moe_k": CHOSEN, "moe_layer_start_index": 0},
    "nemotron_h": FAMILIES["nemotron_h"],
    "lfm2_moe": FAMILIES["lfm2_moe"],
}
WITHOUT_BIAS = {"qwen3_moe": SMALL | {"num_experts": EXPERTS, "decoder_sparse_step": 1}}


def small(kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(WITH_BIAS | WITHOUT_BIAS)[kind])
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def batch(size):
    """Eight rows of different lengths, in micro-batches of this size; and their tokens."""
    ids = torch.randint(1, 64, (8, 12), generator=torch.Generator().manual_seed(1))
    text = torch.arange(12) < torch.tensor([12, 5, 9, 3, 12, 7, 8, 11])[:, None]
    targets = torch.full((8, 12), IGNORED)
    targets[:, :-1] = ids.masked_fill(~text, IGNORED)[:, 1:]
    parts = [slice(start, start + size) for start in range(0, 8, size)]
    rows = [MicroBatch({"input_ids": ids[p]}, targets[p], text_mask=text[p]) for p in parts]
    return rows, StepTotals(int((targets != IGNORED).sum()), int(text.sum()))


def recorded_choices(model, rows):
    """For each layer, how often each expert gets a token of text, by hooks of the test."""
    found, text = {}, rows.text_mask.flatten()

    def note(name, size, args):
        counted = Counter(args[1][text].flatten().tolist())
        found[name] = [counted[number] for number in range(size)]

    for name, module in find_experts(model).items():
        hook = partial(note, name, module.num_experts)
        module.register_forward_pre_hook(lambda module, args, hook=hook: hook(args))
    model(**rows.inputs, use_cache=False)
    return found


def trained(kind, *, size=8, rate=0.0, checkpointed=False, steps=1, step_rate=0.0, nan=False):
    """The model after some steps, and its load. step_rate: the learning rate."""
    model = small(kind)
    if rate:
        make_biases_buffers(model, needed=True)
    load = watch_experts(model)
    assert load is not None
    if checkpointed:
        blocks = {f"model.layers.{n}": block for n, block in enumerate(model.model.layers)}
        checkpoint_blocks(model, blocks, schema.ActivationCheckpointing(mode="full"))
    wrapped = OneRank(
        model, [], param_dtype=torch.float32, ranks=ALONE, init_fn=lambda *arguments: None
    )
    load.start(model, ALONE, rate=rate)
    rows, totals = batch(size)

    def loss(model, micro_batch):
        summed = summed_loss(model, micro_batch)
        return summed * float("nan") if nan else summed

    batches = (
        GlobalBatch(step, rows, StepStatistics(totals, ALONE), step, 0.0)
        for step in range(1, steps + 1)
    )
    optimizer = make_optimizer(model, schema.Optimizer(name="sgd", learning_rate=1.0))
    update = Update(optimizer, lambda step: step_rate, LossScale(ALONE.device, enabled=False), None)
    for _ in train_steps(
        wrapped, batches, loss=loss, update=update, averaged_over=1, expert_load=load
    ):
        with wrapped.evaluating():  # is not counted
            wrapped.without_gradients(summed_loss, rows[0])
    return model, load


def biases(model):
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: value for name, value in named if name.rpartition(".")[2] in EXPERT_BIAS}


@pytest.mark.parametrize("kind", [*WITH_BIAS, *WITHOUT_BIAS])
def test_the_choices_for_text_are_counted_once(kind):
    """Not those for padding, of recomputations and of evaluations."""
    model = small(kind)
    (rows,), totals = batch(8)
    found = recorded_choices(model, rows)
    expected = torch.tensor(list(found.values()))
    assert len(found) >= 1
    chosen = model.config.num_experts_per_tok
    assert expected.sum(1).tolist() == [chosen * totals.tokens] * len(found)
    for options in ({}, {"size": 2}, {"checkpointed": True}):
        _, load = trained(kind, **options)
        assert load.names == list(found)
        assert torch.equal(load.take(), expected)
        assert load.take().sum() == 0, "the counts begin again"


@pytest.mark.parametrize("kind", WITH_BIAS)
def test_a_step_moves_the_biases_by_the_rate(kind):
    """The algorithm of Wang et al.: by the sign of the mean less the count."""
    model, load = trained(kind, size=2, rate=RATE)
    counts, found = load.take(), biases(model)
    assert len(found) == len(counts)
    for of_layer, bias in zip(counts.double(), found.values(), strict=True):
        expected = RATE * torch.sign(of_layer.mean() - of_layer)
        torch.testing.assert_close(bias.flatten().double(), expected, rtol=1e-6, atol=0)
        assert bias.abs().sum() > 0
        assert not isinstance(bias, torch.nn.Parameter), "checkpoints hold buffers"
    for options in ({"size": 8}, {"checkpointed": True}):  # which puts modules around blocks
        other, _ = trained(kind, **options, rate=RATE)
        for bias, expected in zip(biases(other).values(), found.values(), strict=True):
            assert torch.equal(bias, expected), "it does not depend on micro-batches"


def test_updates_balance_the_experts():
    def busiest(rate):
        counts = trained("deepseek_v3", rate=rate, steps=20)[1].take()
        return (counts.max() / counts.double().mean()).item()

    assert busiest(RATE) < 0.9 * busiest(0.0)


def test_a_skipped_step_leaves_the_biases():
    model, _ = trained("deepseek_v3", rate=RATE, nan=True)
    assert all(bias.abs().sum() == 0 for bias in biases(model).values())


def test_without_a_rate_the_biases_stay():
    model, load = trained("deepseek_v3", steps=2)
    assert all(bias.abs().sum() == 0 for bias in biases(model).values())
    assert load.take().sum() == 2 * CHOSEN * batch(8)[1].tokens, "of both steps"


def test_a_step_that_is_given_up_leaves_no_counts():
    model, load = trained("deepseek_v3", rate=RATE)
    rows, _ = batch(8)
    load.take()
    load.counting(summed_loss)(model.train(), rows[0])
    load.forget()
    assert load.take().sum() == 0


def test_models_without_a_bias_are_refused():
    message = "^model.router_bias_update_rate: Qwen3MoeForCausalLM has no bias that its routers add"
    with pytest.raises(RecipeError, match=message):
        make_biases_buffers(small("qwen3_moe"), needed=True)


def test_a_model_without_experts_has_no_load():
    config = transformers.AutoConfig.for_model("llama", **BASE)
    assert watch_experts(transformers.AutoModelForCausalLM.from_config(config)) is None


@pytest.mark.slow
def test_compiled_blocks_are_compiled_once():
    """An index of the layer in the hook made a graph for each layer."""
    torch._dynamo.reset()
    model, counts = small("qwen3_moe"), []
    load = watch_experts(model)
    load.start(model, ALONE, rate=0.0)
    rows, totals = batch(8)
    for compiled in (False, True):
        for block in model.model.layers if compiled else ():
            block.compile(backend="aot_eager")
        load.counting(summed_loss)(model.train(), rows[0]).backward()
        counts.append(load.take())
    assert torch.equal(*counts)
    assert counts[0].sum() == len(load.names) * CHOSEN * totals.tokens
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_the_experts_of_all_models_get_the_choices_of_their_router():
    checked = 0
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            section = schema.Model(config={"model_type": model_type, "num_hidden_layers": 4})
            model = build_model(section, sequence_length=64)
        except RecipeError:  # not a model of text, or one with no defaults
            continue
        for module in find_experts(model).values():
            names = [*inspect.signature(module.forward).parameters]
            assert names[1] in ("top_k_index", "router_indices"), model_type
            assert len(names) == 3, model_type
            assert module.num_experts > 1
            checked += 1
            break
    assert checked >= 40
