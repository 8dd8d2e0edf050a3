"""The image tower in training: what is trained, what runs without images, masks of packed rows."""

import inspect
import re

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from launcher.data.attachment_inputs import Loaded, attachments_of, grid_positions
from launcher.data.collation import RowInputs, make_sample
from launcher.data.image_processor import ImageProcessor, load_processor
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.errors import RecipeError
from launcher.libraries.private import attention_implementation
from launcher.models import attention as attention_module
from launcher.models.attention import (
    VARLEN,
    drop_causal_mask,
    isolate_documents,
    use_tower_attention,
)
from launcher.models.build import build_model
from launcher.models.changes import adapt
from launcher.models.context_parallel import check_rows, ring_of
from launcher.models.description import parts_without_text
from launcher.models.micro_batch import IGNORED
from launcher.models.record import record_of
from launcher.models.row_division import RowDivision
from launcher.models.tower_inputs import normalized
from launcher.models.towers import (
    features_kept,
    packed_masks,
    tower_blocks,
    unused_modules,
    use_towers,
)
from launcher.recipe.schema import Images, Lora, Model
from tests import multimodal, varlen_on_cpu
from tests.image_models import make_image, make_model, skip_without_packages, with_images

CPU = torch.device("cpu")
EACH = ("qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "idefics3", "llava", "mistral3", "smolvlm")
"""A family of each form of images, and more."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(root / family, family) for family in EACH}


def processor_of(folder):
    skip_without_packages(folder.name)
    return load_processor(str(folder), None)


def prepared(folder, train="all"):
    model = build_model(Model(path=str(folder)), sequence_length=64)
    use_towers(model, {"image": train})
    return model


def with_weights(folder, train="all"):
    model = prepared(folder, train)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(dict(loaded.state_dict()), assign=True)
    for name, parameter in prepared(folder, train).named_parameters():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    for name, buffer in loaded.named_buffers():
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._buffers[last] = buffer
    return model


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("family", EACH)
def test_text_alone_gives_every_trained_parameter_a_gradient(models, family, on_host):
    """DDP waits for it. on_host: with the inputs of the tower that the host makes; else as of a family
    of which they are not known."""
    folder = models[family]
    processor, model = processor_of(folder), with_weights(folder)
    blank = processor.join([processor.blank])
    ids = torch.tensor([[257, 65, 66, 67]])
    inputs = {name: torch.from_numpy(array) for name, array in blank.items()}
    towers, given = record_of(model).towers, {"count": 0}
    if on_host:
        given |= towers.kinds["image"].inputs.make(blank, ids)
        inputs = {}
    if towers.token_types:
        inputs[towers.token_types] = torch.zeros_like(ids)
    model.train()
    plain = model(input_ids=ids, use_cache=False, **(
        {towers.token_types: inputs[towers.token_types]} if towers.token_types else {}
    )).logits  # fmt: skip
    inputs["attachments"] = {"image": given}
    logits = model(input_ids=ids, use_cache=False, **inputs).logits
    assert torch.equal(logits, plain)
    logits.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    without = {name for name in trained if model.get_parameter(name).grad is None}
    assert without == set()
    of_tower = set(parts_without_text(model))
    assert all(not model.get_parameter(name).grad.any() for name in trained & of_tower)
    assert trained & of_tower
    assert not model.base_model.get_input_embeddings()._forward_hooks


def test_a_call_that_fails_leaves_no_hook(models):
    """The features of its images would be added in the next call."""
    model = with_weights(models["llava"])
    embedding = model.base_model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda *call: pytest.fail("memory ran out"))
    with pytest.raises(pytest.fail.Exception):
        model(input_ids=torch.tensor([[65]]), attachments={"image": {"count": 0}})
    assert not embedding._forward_hooks


@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("shown", [True, False])
def test_features_of_an_answer_are_computed_once(models, family, shown):
    """The logits are those of forward passes that run the tower each time, and afterwards it runs
    again. Without an image in the row, the tower sees a blank one."""
    skip_without_packages(family)
    model = with_weights(models[family]).eval()
    processor = load_processor(str(models[family]), None)
    images = with_images(str(models[family])).of_model(model)
    [modality] = images.modalities
    text = processor.process(Image.new("RGB", (90, 60), "red")) if shown else None
    ids = hugging_face_tokenizer(str(models[family]))(text.text if shown else "ab")["input_ids"]
    ids = np.array([*ids, *b"What is it?"])
    sample = make_sample([(ids, np.full(len(ids), IGNORED))]) | {"attachments": []}
    if shown:
        place = int(np.flatnonzero(np.isin(ids, processor.token_ids))[0])
        sample["attachments"] = [Loaded("image", text.arrays, place, len(ids), text.meta)]
        if images.grid:
            places = [(place, *modality.grid(text.meta, ids[place:]))]
            sample["grid_positions"] = grid_positions(sample["position_ids"], places)
    inputs = RowInputs(256, attachments=images).collate([sample]).micro_batch.inputs
    runs = []
    handle = next(iter(tower_blocks(model).values())).register_forward_hook(
        lambda *_: runs.append(1)
    )

    def logits(last):
        changed = inputs["input_ids"].clone()
        changed[0, -1] = last
        return model(**inputs | {"input_ids": changed}, use_cache=False).logits

    with torch.no_grad():
        expected = [logits(last) for last in (65, 66)]
        each = len(runs) // 2
        with features_kept(model):
            found = [logits(last) for last in (65, 66)]
        assert len(runs) == 3 * each
        logits(65)
    assert len(runs) == 4 * each > 0
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
    assert not torch.equal(*found)
    handle.remove()


@pytest.mark.parametrize("family", EACH)
def test_a_blank_image_has_gradients_in_the_same_blocks_as_images(models, family):
    """FSDP gathers the weights of a block for its backward pass: a rank without images would gather
    those of LLaVA's last layers, which others skip."""
    skip_without_packages(family)
    model = with_weights(models[family]).train()
    processor, towers = load_processor(str(models[family]), None), record_of(model).towers
    blank = processor.process(Image.new("RGB", (32, 32)))
    shown = hugging_face_tokenizer(str(models[family]))(blank.text)["input_ids"]
    ids = torch.tensor([[257, *shown, 65]])
    arrays = processor.join([blank.arrays])
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    given, tower = {}, towers.kinds["image"]
    if tower.inputs is not None:
        inputs, given = {}, tower.inputs.make(arrays, ids)
    if towers.token_types:
        inputs[towers.token_types] = torch.isin(ids, torch.tensor(processor.token_ids)).long()
    seen = []

    def watch(name):
        def after(block, args, output):
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(lambda gradient: seen.append(name))

        return after

    for name, block in tower_blocks(model).items():
        block.register_forward_hook(watch(name))

    def train(count):
        attachments = {"image": {"count": count, **given}}
        model(input_ids=ids, attachments=attachments, **inputs).logits.sum().backward()

    train(0)
    of_blank, seen[:] = [*seen], []
    train(1)
    assert of_blank == seen != []


def test_context_parallelism_refuses_masks_that_cannot_be_divided(models):
    model = prepared(models["gemma3"])
    with pytest.raises(RecipeError, match=r"attends to images in both directions, .*; use 1"):
        check_rows(model, RowDivision(2), sequence_length=64)


def test_images_are_not_divided_over_a_ring(models):
    model = prepared(models["qwen2_5_vl"])
    refused = r"context_parallel_ring: rows with images .* images=null"
    with pytest.raises(RecipeError, match=refused):
        ring_of(model, 4, 2)
    with pytest.raises(RecipeError, match=refused):
        ring_of(model, 64, None)
    assert ring_of(model, 2, None) == 1


@pytest.mark.parametrize("family", EACH)
def test_what_is_trained(models, family):
    parts = {"none": set(), "projector": set(), "all": set()}
    for train, found in parts.items():
        model = prepared(models[family], train)
        of_tower = set(parts_without_text(model))
        found.update(n for n in of_tower if model.get_parameter(n).requires_grad)
        rest = [p for n, p in model.named_parameters() if n not in of_tower]
        assert all(parameter.requires_grad for parameter in rest)
    assert not parts["none"]
    assert parts["projector"] < parts["all"]
    words = ("merger", "projector", "connector", "embed_vision")
    assert all(any(word in name for word in words) for name in parts["projector"])


@pytest.mark.parametrize(
    ("family", "projector", "tower"),
    [("qwen2_5_vl", "merger", "visual"), ("gemma3", "multi_modal_projector", "vision_tower")],
)
def test_lora_trains_a_projector_whole_and_no_tower(models, family, projector, tower):
    model = prepared(models[family], "none")
    lora = Lora(rank=2, modules_to_save=(projector,))
    adapt(model, lora, base_dtype=torch.float32, base=None, new_ids=range(0))
    of_tower = parts_without_text(model)
    trained = [name for name in of_tower if model.get_parameter(name).requires_grad]
    assert trained
    assert all(f".{projector}." in name for name in trained)
    whole, fresh = Lora(rank=2, modules_to_save=(tower,)), prepared(models[family], "none")
    with pytest.raises(RecipeError, match=rf"{tower}: .*{tower} is not only the projector of"):
        adapt(fresh, whole, base_dtype=torch.float32, base=None, new_ids=range(0))


@pytest.mark.parametrize(
    ("family", "listed", "of_tower"),
    [
        ("qwen2_5_vl", "embed_tokens, lm_head, merger, norm", "qkv"),
        ("qwen3_vl", "deepstack_merger_list, embed_tokens, lm_head, merger, norm", "qkv"),
        ("gemma3", "embed_tokens, lm_head, multi_modal_projector, norm", "fc1"),
    ],
)
def test_names_that_lora_cannot_use_are_refused_with_those_that_it_can(
    models, family, listed, of_tower
):
    def refused(**keys):
        with pytest.raises(RecipeError) as error:
            adapt_with(**keys)
        return str(error.value)

    def adapt_with(**keys):
        model = prepared(models[family], "none")
        lora = Lora(rank=2, **keys)
        adapt(model, lora, base_dtype=torch.float32, base=None, new_ids=range(0))

    assert refused(modules_to_save=("nope",)).endswith(f" outside of its blocks: {listed}")
    for name in listed.split(", "):
        adapt_with(modules_to_save=(name,))
    message = refused(target_modules=(of_tower,))
    assert f"{of_tower} is not in the text model, whose layers alone get adapters; " in message
    assert message.endswith("; available: " + refused(target_modules=("nope",)).split(": ")[-1])


def of_block(model, block):
    return [f"{block}.{name}" for name, _ in model.get_submodule(block).named_parameters()]


def test_layers_that_features_do_not_depend_on_are_frozen(models):
    """LLaVA reads the last but one layer of its tower."""
    model = prepared(models["llava"])
    frozen = {n for n in parts_without_text(model) if not model.get_parameter(n).requires_grad}
    assert any("layers.1." in name for name in frozen)
    assert not any("layers.0." in name for name in frozen)


@pytest.mark.parametrize("family", EACH)
def test_blocks_of_towers(models, family):
    """The units of FSDP: all parameters of layers are in one."""
    model = prepared(models[family])
    blocks = tower_blocks(model)
    assert len(blocks) == 2
    assert len({type(block) for block in blocks.values()}) == 1
    inside = {name for block in blocks for name in of_block(model, block)}
    outside = set(parts_without_text(model)) - inside
    assert not [name for name in outside if re.search(r"(layers|blocks)\.\d", name)]
    assert unused_modules(model) == ()
    bare = build_model(Model(path=str(models[family])), sequence_length=64)
    assert tower_blocks(bare) == {}
    assert unused_modules(bare)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_attention_of_the_tower_is_not_causal(models, family):
    """Attention of packed rows is causal: in the tower it would change what the model sees."""
    for change in ("isolate", "drop"):
        model = prepared(models[family])
        if change == "isolate":
            isolate_documents(model, sequence_length=64, device=CPU, compute_dtype=torch.float32)
        else:
            drop_causal_mask(model)
        assert attention_implementation(model) == VARLEN
        assert model.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("family", EACH)
def test_features_are_those_of_transformers(models, family, kernel, monkeypatch, tmp_path):
    """With indices that the host has made, and with the code for GPUs. Images differ in size."""
    if kernel:
        varlen_on_cpu.register()
        monkeypatch.setattr(attention_module, "has_varlen_kernel", lambda tensor: True)
    processor, model = processor_of(models[family]), with_weights(models[family])
    inputs = record_of(model).towers.kinds["image"].inputs
    tokenizer = transformers.AutoTokenizer.from_pretrained(models[family])
    word = tokenizer.convert_ids_to_tokens(inputs.token)
    images, ids = [], []
    for number, size in enumerate([(120, 60), (84, 140), (56, 28)]):
        with Image.open(make_image(tmp_path / f"{number}.png", size=size, seed=number)) as image:
            made = processor.process(image)
        images.append(made.arrays)
        ids += [65, *[inputs.token] * made.text.count(word)]
    arrays = processor.join(images)
    own = {name: torch.from_numpy(array) for name, array in arrays.items()}
    takes = inspect.signature(model.base_model.get_image_features).parameters
    own = {name: array for name, array in own.items() if name in takes}
    expected = model.base_model.get_image_features(**own, return_dict=True)
    form = inputs.form
    use_tower_attention(model, form, device=CPU, compute_dtype=torch.float32)
    chosen = model.config.vision_config._attn_implementation
    assert chosen == (form.attention or "sdpa")
    made = inputs.make(arrays, torch.tensor([ids]))
    places = [place for place, token in enumerate(ids) if token == inputs.token]
    assert made["positions"].tolist() == places
    found = form.features(model.base_model, made["tower"])
    for one, other in zip(levels(found), levels(expected), strict=True):
        assert len(one) == len(places)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def levels(output):
    """The features of all images: those in the place of embeddings, and those of other depths."""
    output = output if type(output) is dict else vars(output)
    depths = [output["pooler_output"], *(output.get("deepstack_features") or ())]
    leaves = torch.utils._pytree.tree_leaves
    return [torch.cat([each.flatten(0, -2) for each in leaves(depth)]) for depth in depths]


@pytest.mark.parametrize("family", EACH)
def test_operations_of_a_tower_are_those_that_torch_counts(models, family):
    model = with_weights(models[family])
    inputs = record_of(model).towers.kinds["image"].inputs
    ids = torch.full((1, 600), 65)
    tokens, _, arrays = inputs.form.largest(500)
    ids[0, 1 : 1 + tokens] = inputs.token
    tower = normalized(inputs.make(arrays, ids, np.zeros((3, 256), dtype=np.float32))["tower"])
    use_tower_attention(model, inputs.form, device=CPU, compute_dtype=torch.float32)
    # The kernel of attention for CPUs is not counted
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        inputs.form.features(model.base_model, tower)
    # Here Gemma 3 has a head, which its own config switches off, and LLaVA an unused layer
    inexact = family in ("gemma3", "llava")
    expected = pytest.approx(counter.get_total_flops(), rel=0.1 if inexact else 1e-3)
    assert sum(inputs.forward_operations(tower, tokens)) == expected
    assert inputs.operations.passes == 3
    frozen = record_of(prepared(models[family], "projector")).towers.kinds["image"].inputs
    assert frozen.operations.passes == 1


def test_rows_of_a_plan_are_full_of_the_largest_images(models):
    def patches(family, length, max_pixels=None):
        model = prepared(models[family])
        sections = {"image": Images(max_pixels=max_pixels)}
        images = attachments_of(sections, Model(path=""), model).planned(model)
        [modality], inputs = images.modalities, RowInputs(length, attachments=images)
        ids = np.full(length, modality.tower.token)  # random tokens are those of text, too
        row = images.with_largest_attachments(make_sample([(ids, ids)]))
        made = inputs.collate([row]).micro_batch.inputs["attachments"]["image"]
        assert len(made["positions"]) == sum(row["input_ids"] == modality.tower.token)
        return made["count"], modality.tower.patches(made["tower"]), len(made["positions"])

    # 31 x 33 tokens in a row of 1,026, of 4 patches each
    assert patches("qwen2_5_vl", 1026) == (1, 4096, 1024)
    # 100 tokens of 28 x 28 pixels, and between images two tokens; then a smaller one
    images, count, tokens = patches("qwen2_5_vl", 1026, 100 * 28 * 28)
    assert (images, count) == (11, 4 * tokens)
    assert 1000 <= tokens <= 1004
    assert patches("gemma3", 64) == (10, 160, 40)
    assert patches("gemma3", 4) == (0, 16, 0)  # a blank one
    # The 2,520 patches of an image, of which a square has 16 x 16 tokens of 3 x 3 patches
    assert patches("gemma4", 1026) == (3, 3 * 2520, 3 * 256)
    assert patches("gemma4", 64) == (0, 2520, 0)
    # Tiles of 4 tokens and 16 patches, as many as fit with two tokens between them
    assert patches("idefics3", 64) == (10, 160, 40)
    # At most 4 x 4 tokens of 28 x 28 pixels, because the longer side has at most 112
    assert patches("mistral3", 100) == (6, 4 * (5 * 16 + 8), 5 * 16 + 8)


def test_a_plan_refuses_a_limit_of_pixels_that_the_processor_does_not_have(models):
    def planned(family):
        sections, model = {"image": Images(max_pixels=100_000)}, prepared(models[family])
        return attachments_of(sections, Model(path=""), model).planned(model)

    [images] = planned("qwen2_5_vl").modalities
    assert images.max_pixels == 100_000
    with pytest.raises(RecipeError, match=r"max_pixels: the processor of Gemma3For.* has no limit"):
        planned("gemma3")


@pytest.mark.parametrize("family", EACH)
def test_pixels_that_the_device_normalizes_are_those_of_the_processor(models, family, tmp_path):
    processor = processor_of(models[family])
    with Image.open(make_image(tmp_path / "image.png", size=(120, 60))) as image:
        expected = processor.process(image).arrays
        found = processor.process(image, in_bytes=True).arrays
    assert found["pixel_values"].dtype == np.uint8
    inputs = record_of(prepared(models[family])).towers.kinds["image"].inputs
    tower = inputs.make(found, torch.zeros(1, 4, dtype=torch.long), processor.pixel_table)["tower"]
    assert np.array_equal(normalized(tower)["pixel_values"].numpy(), expected["pixel_values"])


def test_a_processor_that_does_more_with_pixels_normalizes_them_itself(models):
    processor = ImageProcessor(str(models["gemma3"]), None)
    normalize = processor.image_processor.normalize
    processor.image_processor.normalize = lambda image, *rest, **options: (
        normalize(image, *rest, **options) + image.mean()
    )
    assert processor.pixel_table is None


def test_packed_masks_are_those_of_single_documents():
    """Here transformers 5.23 has six wrong entries in the mask of sliding layers."""
    from transformers.models.gemma3 import modeling_gemma3

    text = transformers.AutoConfig.for_model("gemma3_text", sliding_window=6)
    text._attn_implementation = "sdpa"
    types = [torch.tensor([0, 0, 1, 1, 1, 1, 0, 0]), torch.tensor([0, 1, 1, 1, 1, 0, 0, 0, 0, 0])]
    positions = [torch.arange(len(one)) for one in types]

    def alone(of, at):
        masks = modeling_gemma3.create_masks_for_vision_model(
            text,
            torch.zeros(1, len(of), 32),
            None,
            None,
            at[None],
            modeling_gemma3.get_block_sequence_ids_for_mask(of[None]),
        )
        causal = torch.ones(len(of), len(of)).tril().bool()
        return {k: causal if m is None else m[0, 0] for k, m in masks.items()}

    single = [alone(*document) for document in zip(types, positions, strict=True)]
    made = packed_masks(torch.cat(types)[None], torch.cat(positions)[None], 6)
    for kind in ("full_attention", "sliding_attention"):
        wanted = torch.block_diag(*(document[kind].int() for document in single)).bool()
        assert torch.equal(made[kind][0, 0], wanted), kind
    causal = packed_masks(
        torch.cat(types)[None], torch.cat(positions)[None], 6, both_ways=("sliding_attention",)
    )
    assert torch.equal(causal["sliding_attention"], made["sliding_attention"])
    same = torch.block_diag(torch.ones(8, 8), torch.ones(10, 10)).bool()
    assert torch.equal(causal["full_attention"][0, 0], same & torch.ones(18, 18).tril().bool())


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "llama"} | multimodal.TEXT, "LlamaForCausalLM takes no images"),
        ({"model_type": "mllama"} | multimodal.MODELS["mllama"], "attends to images in layers"),
    ],
)
def test_models_that_are_refused(config, problem):
    model = build_model(Model(config=config), sequence_length=16)
    with pytest.raises(RecipeError, match=problem):
        use_towers(model, {"image": "none"})
