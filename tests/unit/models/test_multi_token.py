"""Layers of multi-token prediction: what they compute, their names, and what they leave alone."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from launcher.data.collation import collate_sequences, make_sample
from launcher.diagnostics.selftest import shrunk
from launcher.errors import RecipeError
from launcher.libraries.families import MULTI_TOKEN
from launcher.models.flops import token_flops
from launcher.models.hugging_face_files import export_hugging_face
from launcher.models.initialization import random_weights
from launcher.models.load import pretrained_weights
from launcher.models.micro_batch import IGNORED
from launcher.models.record import record_of
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Model, MultiToken
from launcher.training.model import prepare_model

CPU = torch.device("cpu")
SIZES = "vocab_size: 64, hidden_size: 32, intermediate_size: 48, max_position_embeddings: 64"
EXPERTS = (
    "moe_intermediate_size: 16, n_routed_experts: 4, num_experts_per_tok: 2, n_group: 1, "
    "topk_group: 1, first_k_dense_replace: 1"
)
LATENT = "kv_lora_rank: 8, q_lora_rank: 8, qk_rope_head_dim: 8, v_head_dim: 8, qk_nope_head_dim: 8"
RECURRENT = (
    "num_hidden_layers: 2, layer_types: [linear_attention, full_attention], head_dim: 8, "
    "num_attention_heads: 4, num_key_value_heads: 2, linear_num_key_heads: 2, "
    "linear_num_value_heads: 2, linear_key_head_dim: 8, linear_value_head_dim: 8"
)
SPARSE = (
    "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, "
    "shared_expert_intermediate_size: 16"
)
CONFIGS = {
    "deepseek_v3": f"{EXPERTS}, {LATENT}, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 4, num_nextn_predict_layers: 2",
    "glm4_moe": f"{EXPERTS}, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 8, num_nextn_predict_layers: 1",
    "glm4_moe_lite": f"{EXPERTS}, {LATENT}, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 4, num_nextn_predict_layers: 1",
    "qwen3_next": f"{SPARSE}, {RECURRENT}",
    "qwen3_5_text": f"{RECURRENT}, mtp_num_hidden_layers: 1",
    "qwen3_5_moe_text": f"{SPARSE}, {RECURRENT}, mtp_num_hidden_layers: 1",
}
VISION = (
    "depth: 2, hidden_size: 32, intermediate_size: 48, num_heads: 2, out_hidden_size: 32, "
    "patch_size: 14, num_position_embeddings: 16"
)
TINY = {"num_hidden_layers": 1, "hidden_size": 16, "n_routed_experts": 8, "vocab_size": 8}
RECIPE = """
run: {name: mtp, max_steps: 4, seed: 3}
model: {config: {model_type: KIND, SIZES}, mtp: {weight: 0.3}}
data: {kind: tokens, train: none.jsonl, sequence_length: 24}
batch: {global_batch_size: 4, micro_batch_size: 2}
strategy: {kind: ddp, mixed_precision: null}
"""


@pytest.fixture(autouse=True, scope="module")
def _imported():
    """Before the first test, whose time is limited."""
    config = transformers.AutoConfig.for_model("deepseek_v3", **TINY)
    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture
def prepared(tmp_path):
    """A function that prepares a model with this recipe, and initializes it."""

    def prepare(kind, *words, weights=True):
        sizes = f"{SIZES}, {CONFIGS[kind]}"
        text = RECIPE.replace("KIND", kind).replace("SIZES", sizes)
        (tmp_path / "none.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
        text = text.replace("none.jsonl", str(tmp_path / "none.jsonl"))
        (tmp_path / "recipe.yaml").write_text(text)
        loaded = load_recipe([f"recipe={tmp_path}/recipe.yaml", *words], ranks=1)
        found = prepare_model(loaded.recipe, device=CPU)
        if weights:
            random_weights(found.model, CPU, CPU, seed=5)
            # Norms and biases that are not what they start as
            with torch.no_grad():
                torch.manual_seed(9)
                for name, tensor in found.model.named_parameters():
                    if "norm" in name:
                        tensor.add_(0.3 * torch.randn_like(tensor))
        return found

    return prepare


LENGTHS = [[9, 1, 2, 7], [3, 17]]


def documents(seed=1, lengths=LENGTHS, masked=True):
    """Rows of documents: ids, targets with holes, and the target of the last token is none."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in lengths:
        made = []
        for length in row:
            ids = torch.randint(64, (length,), generator=generator)
            targets = torch.cat([ids[1:], torch.tensor([IGNORED])])
            if masked:
                drawn = torch.rand(length, generator=generator)
                targets = targets.masked_fill(drawn < 0.3, IGNORED)
            made.append((ids.numpy(), targets.numpy()))
        rows.append(made)
    return rows


def micro_batch(found, rows):
    record = record_of(found.model)
    return collate_sequences(
        [make_sample(row) for row in rows],
        length=24,
        packed=found.packed,
        document_masking=record.document_masking,
        recurrent=record.recurrent,
        depths=record.multi_token.depths if record.multi_token else 0,
    ).micro_batch


def normalized(hidden, norm, one_more):
    """RMSNorm, by its definition."""
    scale = norm.weight + 1 if one_more else norm.weight
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps) * scale


def reference(model, rows, weight, kind):
    """The sum of the losses, document by document, in plain torch."""
    base, total, sums = model.get_decoder(), 0.0, []
    one_more = kind.startswith("qwen3")
    for ids, targets in (document for row in rows for document in row):
        ids, targets = torch.tensor(ids)[None], torch.tensor(targets)
        hidden = base(ids).last_hidden_state
        logits = hidden[0] @ model.lm_head.weight.T
        total = total + torch.nn.functional.cross_entropy(
            logits, targets, ignore_index=IGNORED, reduction="sum"
        )
        table = base.embed_tokens.weight
        for depth, layer in enumerate(model.mtp, start=1):
            count = ids.shape[1] - depth
            if count < 1:
                break
            joined = [
                torch.cat(
                    [
                        normalized(table[ids[0, i + depth]], layer.embedding_norm, one_more),
                        normalized(hidden[0, i], layer.hidden_norm, one_more),
                    ]
                )
                for i in range(count)
            ]
            inputs = torch.stack(joined) @ layer.projection.weight.T
            places = torch.arange(count)[None]
            rotary = base.rotary_emb(inputs[None], places)
            hidden = layer.block(inputs[None], position_embeddings=rotary, attention_mask=None)
            hidden = normalized(hidden, layer.norm, one_more)
            for i in range(count):
                if (target := targets[i + depth]) != IGNORED:
                    logit = hidden[0, i] @ model.lm_head.weight.T
                    loss = logit.logsumexp(0) - logit[target]
                    total = total + weight / len(model.mtp) * loss
                    sums.append((depth, float(loss.detach()), int(logit.argmax()) == int(target)))
    return total, sums


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_all_families_are_tried():
    assert CONFIGS.keys() == MULTI_TOKEN.keys()


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("detach", ["false", "true"])
def test_loss_and_gradients_are_those_of_documents_one_by_one(prepared, kind, detach):
    found = prepared(kind, f"model.mtp.detach={detach}")
    model, rows = found.model, documents()
    assert found.packed
    summed = found.objective.loss(model, micro_batch(found, rows))
    expected, sums = reference(model, rows, 0.3, kind)
    own, plain = gradients(model, summed[0]), gradients(model, expected)
    depths = len(model.mtp)
    assert summed.shape == (1 + 4 * depths,)
    for depth in range(1, depths + 1):
        losses = [loss for of, loss, _ in sums if of == depth]
        loss, weight, right, targets = summed[4 * depth - 3 : 4 * depth + 1].tolist()
        assert loss == pytest.approx(sum(losses), rel=1e-6)
        assert weight == targets == len(losses)
        assert right != right
    assert own.keys() == plain.keys()
    if detach == "false":
        for name, gradient in plain.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-5, atol=2e-6, msg=name)
        return
    record_of(model).multi_token, layers = None, record_of(model).multi_token
    alone = gradients(model, found.objective.loss(model, micro_batch(found, rows)))
    assert alone.keys() == {name for name in own if not name.startswith("mtp.")}
    for name, gradient in own.items():
        if name in alone:
            assert torch.equal(gradient, alone[name]), name
        else:
            torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=2e-6, msg=name)
    assert layers is not None


def test_the_text_model_of_a_model_of_images(prepared, tmp_path):
    """Qwen3.5's checkpoints are of such models."""
    text = f"{SIZES}, {CONFIGS['qwen3_5_text']}"
    config = f"{{model_type: qwen3_5, text_config: {{{text}}}, vision_config: {{{VISION}}}}}"
    found = prepared("qwen3_5_text", f"model.config={config}", "model.mtp.detach=false")
    assert type(found.model).__name__ == "Qwen3_5ForConditionalGeneration"
    rows = documents()
    summed = found.objective.loss(found.model, micro_batch(found, rows))
    expected, sums = reference(found.model, rows, 0.3, "qwen3_5_text")
    assert summed[1].item() == pytest.approx(sum(loss for _, loss, _ in sums), rel=1e-6)
    own, plain = gradients(found.model, summed[0]), gradients(found.model, expected)
    assert own.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-5, atol=2e-6, msg=name)
    stored = export(found, tmp_path / "hf")
    assert "mtp.layers.0.self_attn.q_proj.weight" in stored
    assert "model.language_model.layers.0.linear_attn.A_log" in stored


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_packed_and_padded_rows_with_few_or_weighted_targets(prepared, kind):
    """The sums do not depend on packing, nor on whether logits are computed of all tokens."""
    rows = documents(masked=False)
    alone = [[document] for row in rows for document in row]
    packed, padded = prepared(kind), prepared(kind, "data.packing=false")
    record_of(padded.model).head.keep_logits = True
    one = packed.objective.loss(packed.model, micro_batch(packed, rows))
    two = padded.objective.loss(padded.model, micro_batch(padded, alone))
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6, equal_nan=True)
    batch = micro_batch(packed, rows)
    for places_of in (
        lambda part: torch.arange(part.targets.numel()),
        lambda part: part.counted.flatten().nonzero()[:, 0],
        lambda part: None,
    ):
        later = [dataclasses.replace(part, positions=places_of(part)) for part in batch.later]
        again = dataclasses.replace(batch, positions=places_of(batch), later=tuple(later))
        few = packed.objective.loss(packed.model, again)
        torch.testing.assert_close(few, one, rtol=1e-6, atol=1e-6, equal_nan=True)
    generator = np.random.default_rng(2)
    weights = [[generator.random(len(ids)) for ids, _ in row] for row in rows]
    weighted = [
        [(*document, of) for document, of in zip(row, own, strict=True)]
        for row, own in zip(rows, weights, strict=True)
    ]
    found = packed.objective.loss(packed.model, micro_batch(packed, weighted))
    wanted = sum(of[1:-1].sum() for own in weights for of in own)  # the last token has no target
    assert found[2].item() == pytest.approx(wanted, rel=1e-6)
    assert found[4] == one[4]
    ones = [[(*document, np.ones(len(document[0]))) for document in row] for row in rows]
    same = packed.objective.loss(packed.model, micro_batch(packed, ones))
    torch.testing.assert_close(same, one, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_evaluation_counts_right_guesses(prepared):
    found = prepared("deepseek_v3")
    rows = documents()
    with torch.no_grad():
        batch = micro_batch(found, rows)
        loss, sums = found.objective.evaluate(found.model, batch, int(batch.counted.sum()))
    scores, number = found.objective.scores(sums)
    _, expected = reference(found.model, rows, 0.3, "deepseek_v3")
    assert list(scores) == ["mtp_loss", "mtp_accuracy_1", "mtp_accuracy_2"]
    means = []
    for depth in (1, 2):
        of = [(loss, right) for own, loss, right in expected if own == depth]
        assert scores[f"mtp_accuracy_{depth}"] == sum(right for _, right in of) / len(of)
        means.append(sum(loss for loss, _ in of) / len(of))
    assert scores["mtp_loss"] == pytest.approx(sum(means) / 2, rel=1e-6)
    assert number == sum(depth == 1 for depth, _, _ in expected)
    alone = prepared("deepseek_v3", "model.mtp=null")
    alone.model.load_state_dict(found.model.state_dict(), strict=False)
    with torch.no_grad():
        own = alone.objective.loss(alone.model, micro_batch(alone, rows))
    assert own.shape == ()
    assert float(own) == float(loss)


def test_greedy_guesses_of_a_few_tokens_at_a_time(prepared, monkeypatch):
    found = prepared("glm4_moe")
    head, hidden = record_of(found.model).head, torch.randn(7, 32)
    expected = (hidden @ found.model.lm_head.weight.T).argmax(-1)
    monkeypatch.setattr("launcher.models.head.CHUNK_ELEMENTS", 130)
    assert torch.equal(head.greedy(hidden), expected)


def test_frozen_layers_are_measured_and_not_trained(prepared):
    found = prepared("deepseek_v3", "model.mtp.train=false")
    batch = micro_batch(found, documents())
    assert not any(p.requires_grad for p in found.model.mtp.parameters())
    summed = found.objective.loss(found.model, batch)
    own = gradients(found.model, summed[0])
    assert found.objective.shown(dict.fromkeys(found.objective.metrics, float("nan"))) == {}
    assert torch.isfinite(summed[0])
    assert own
    assert not any(name.startswith("mtp.") for name in own)
    with torch.no_grad():
        _, sums = found.objective.evaluate(found.model, batch, 3)
    assert found.objective.scores(sums)[0]["mtp_loss"] > 0


def test_only_the_layers_are_trained(prepared):
    found = prepared("qwen3_next", "model.mtp.only=true")
    own = gradients(
        found.model, found.objective.loss(found.model, micro_batch(found, documents()))[0]
    )
    assert own
    assert all(name.startswith("mtp.") for name in own)


def export(found, folder, **options):
    export_hugging_face(found.model, folder, rank=0, device=CPU, **options)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", CONFIGS)
def test_exported_and_loaded_again(prepared, kind, tmp_path):
    found = prepared(kind)
    stored = export(found, tmp_path / "hf")
    last = found.model.config.num_hidden_layers
    layout = MULTI_TOKEN[kind]
    names = {n for n in stored if n.startswith(("mtp.", f"model.layers.{last}."))}
    for old, _ in layout.names:
        assert any(name.startswith(old.format(layer=last)) for name in names), old
    assert not any("embedding_norm" in n or ".block." in n for n in stored if "pre_fc" not in n)
    copies = {}
    for name, end in layout.shared:
        own = "model.embed_tokens.weight" if end == "input" else "lm_head.weight"
        copies[name.format(layer=last)] = stored[own].clone()
    save_file({**stored, **copies}, tmp_path / "hf/model.safetensors")
    words = (f"model.path={tmp_path}/hf", "model.config=null")
    again = prepared(kind, *words, weights=False)
    source = again.weights.source
    assert not source.copied
    assert source.shared.keys() == copies.keys()
    pretrained_weights(again.model, CPU, CPU, checkpoint=source, seed=1)
    for name, tensor in found.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name
    with torch.no_grad():
        again.model.get_input_embeddings().weight.mul_(2)
    third = export(again, tmp_path / "third", source=source)
    assert third.keys() == stored.keys() | copies.keys()
    for name in copies:
        end = "model.embed_tokens.weight" if "embed" in name else "lm_head.weight"
        assert torch.equal(third[name], third[end])
    for name, tensor in stored.items():
        if "embed_tokens" not in name and "lm_head" not in name:
            assert torch.equal(third[name], tensor), name


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_transformers_reads_the_layers_and_computes_the_same(prepared, kind, tmp_path):
    """`MtpModel`, by which generate(use_mtp=True) speculates."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    found = prepared(kind)
    export(found, tmp_path / "hf")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    whole._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23].*"]
    layers = MtpModel.from_pretrained(whole)
    ids = torch.tensor(documents(lengths=[[20]])[0][0][0])[None]
    cache = MtpCache(config=whole.config.get_mtp_config())
    batch = micro_batch(found, [[(ids[0].numpy(), ids[0].numpy())]])
    seen = []
    for layer in found.model.mtp:
        layer.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        found.objective.loss(found.model, batch)
        hidden = whole(ids, output_hidden_states=True).hidden_states[-1]
        for depth in range(1, 1 + len(found.model.mtp)):
            count = 20 - depth
            places = torch.arange(depth, 20)[None]
            hidden = layers.forward_layer(
                depth - 1, hidden[:, :count], places, cache, input_ids=ids[:, depth:]
            )
            torch.testing.assert_close(seen[depth - 1][:1, :count], hidden, rtol=1e-5, atol=1e-5)


def test_checkpoints_that_do_not_fit(prepared, tmp_path):
    kind = "deepseek_v3"
    found = prepared(kind)
    stored = export(found, tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    words = (f"model.path={tmp_path}/hf", "model.config=null")

    def error(tensors):
        save_file(tensors, file)
        with pytest.raises(RecipeError) as raised:
            prepared(kind, *words, weights=False)
        return str(raised.value)

    without = {
        n: t for n, t in stored.items() if not n.startswith(("model.layers.2", "model.layers.3"))
    }
    said = error(without)
    assert said.startswith("model.mtp: the checkpoint")
    assert "it lacks model.layers.2.enorm.weight, model.layers.2.hnorm.weight" in said
    few = {n: t for n, t in stored.items() if n != "model.layers.3.eh_proj.weight"}
    assert "model.layers.3.eh_proj.weight: missing in the checkpoint" in error(few)
    wide = {**stored, "model.layers.2.eh_proj.weight": torch.zeros(32, 32)}
    said = error(wide)
    assert "model.layers.2.eh_proj.weight: is [32, 32] in the checkpoint, and [32, 64]" in said
    other = {**stored, "model.layers.2.embed_tokens.weight": torch.zeros(64, 32)}
    said = error(other)
    assert "is not equal to model.embed_tokens.weight, in whose place model.mtp would" in said
    save_file(without, file)
    assert prepared(kind, *words, "model.mtp=null", weights=False).weights.source is not None


@pytest.mark.parametrize(
    ("kind", "words", "expected"),
    [
        ("deepseek_v3", ["model.config.num_nextn_predict_layers=0"], "the model has no layers"),
        ("qwen3_5_text", ["model.config.mtp_num_hidden_layers=2"], "2 is more than 1"),
        (
            "qwen3_5_text",
            ["model.config.layer_types=[linear_attention, linear_attention]"],
            "no block of the trunk has full attention",
        ),
        (
            "deepseek_v3",
            ["model.config={model_type: llama, vocab_size: 64, hidden_size: 32}"],
            "it is not known how llama computes layers of multi-token prediction",
        ),
    ],
)
def test_refused_models(prepared, kind, words, expected):
    with pytest.raises(RecipeError, match=f"model.mtp: .*{expected}"):
        prepared(kind, *words, weights=False)


def test_lora_trains_the_layers_whole(prepared, tmp_path):
    words = (
        "lora={rank: 2, target_modules: all-linear}",
        "checkpoint={export: at_end, export_merged: true}",
    )
    found = prepared("qwen3_next", *words)
    names = [n for n, p in found.model.named_parameters() if p.requires_grad]
    assert any("lora_A" in name and name.startswith("model.") for name in names)
    own = [name for name in names if "mtp" in name]
    assert own
    assert not any("lora" in name for name in own)
    assert {n for n, _ in found.model.named_parameters() if "mtp" in n} == {*own}
    summed = found.objective.loss(found.model, micro_batch(found, documents()))
    assert gradients(found.model, summed[0]).keys() == {*names}
    stored = export(found, tmp_path / "hf", merged=True)
    assert torch.equal(stored["mtp.fc.weight"], found.model.mtp[0].projection.weight)
    assert "auto_map" not in json.loads((tmp_path / "hf/config.json").read_text())


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_a_token_costs_a_block_and_the_head_more(prepared, kind):
    with_layers = token_flops(prepared(kind, weights=False).model)
    alone = prepared(kind, "model.mtp=null", weights=False).model
    without, layers = token_flops(alone), prepared(kind, weights=False).model.mtp
    used = sum(6 * p.numel() for p in layers.parameters() if p.ndim != 3)
    used += sum(3 * p.numel() for p in layers.parameters() if p.ndim == 3)  # half of the experts
    more = used + len(layers) * 6 * alone.lm_head.weight.numel()
    assert with_layers.products - without.products == more
    rows = 1000.0
    attention = without.at(rows) - without.products
    blocks = 1 if kind == "qwen3_next" else 2
    found = with_layers.at(rows) - with_layers.products
    assert found == attention * (blocks + len(layers)) / blocks
    frozen = prepared(kind, "model.mtp.train=false", weights=False)
    assert token_flops(frozen.model) == without


def test_a_shrunk_model_has_attention():
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = {"model_type": "qwen3_next", "num_hidden_layers": 4, "layer_types": kinds}
    assert shrunk(Model(config=config)).config["layer_types"] == kinds[:2]
    model = shrunk(Model(config=config, mtp=MultiToken()))
    assert model.config["layer_types"] == kinds[2:]
