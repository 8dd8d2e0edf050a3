"""Towers that see videos: features, gradients, and what a plan knows of them."""

import numpy as np
import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from launcher.data.attachment_inputs import attachments_of
from launcher.data.collation import RowInputs, make_sample
from launcher.data.encoder import make_encoder
from launcher.data.token_store import one_document
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.data.video_files import Video
from launcher.data.video_processor import Limits, load_video_processor
from launcher.errors import RecipeError
from launcher.models.attention import use_tower_attention
from launcher.models.build import build_model
from launcher.models.description import parts_without_text
from launcher.models.record import record_of
from launcher.models.tower_inputs import normalized, tower_kind
from launcher.models.towers import features_kept, use_towers
from launcher.recipe.schema import Data, Images, Model, Videos
from launcher.sources.rows import Row, SourcePart
from tests.image_models import make_image, make_model, skip_without_packages
from tests.unit.models.test_images import levels
from tests.video_files import make_video

CPU = torch.device("cpu")
EACH = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4", "llava_onevision")
EACH += ("internvl", "smolvlm")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {family: make_model(root / family, family) for family in EACH}
    for number, (count, size) in enumerate([(12, (48, 36)), (30, (90, 60))]):
        make_video(root / f"{number}.mkv", count, size=size, seed=number)
    return made


def prepared(folder, kinds=("video",), train="all"):
    model = build_model(Model(path=str(folder)), sequence_length=64)
    use_towers(model, dict.fromkeys(kinds, train))
    return model


def with_weights(folder, kinds=("video",)):
    model = prepared(folder, kinds)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(dict(loaded.state_dict()), assign=True)
    for name, parameter in prepared(folder, kinds).named_parameters():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    for name, buffer in loaded.named_buffers():
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._buffers[last] = buffer
    return model


def processed(folder):
    """What the processor makes of two videos, in bytes and not."""
    processor = load_video_processor(str(folder), Limits())
    opened = [Video.of((folder.parent / f"{n}.mkv").read_bytes()) for n in range(2)]
    made = [
        [processor.process(one, in_bytes=in_bytes) for one in opened] for in_bytes in (True, False)
    ]
    return processor, *made


@pytest.mark.parametrize("family", EACH)
def test_features_are_those_of_the_model(models, family):
    """Of two videos of different lengths and sizes, from bytes, without the model's own indices."""
    skip_without_packages(family)
    if family == "llava_onevision" and transformers.__version__.startswith("5.17."):
        pytest.skip("there the line break is added later")
    folder = models[family]
    model = with_weights(folder)
    processor, in_bytes, plain = processed(folder)
    tokenizer = hugging_face_tokenizer(str(folder))
    inputs = record_of(model).towers.kinds["video"].inputs
    ids = tokenizer("".join(one.text for one in in_bytes), add_special_tokens=False)["input_ids"]
    made = inputs.make(
        processor.join([one.arrays for one in in_bytes]), torch.tensor([ids]), processor.pixel_table
    )
    places = [place for place, token in enumerate(ids) if token == inputs.token]
    assert made["positions"].tolist() == places
    wanted = []
    for one in plain:  # LLaVA-OneVision takes videos of one length only
        tensors = {name: torch.from_numpy(array) for name, array in one.arrays.items()}
        tensors.pop("second_per_grid_ts", None)
        pixels = tensors.pop(processor.frames.pixels)
        run = getattr(model.base_model, tower_kind(model.config, "video").features)
        pixels, tensors = (pixels[None], {}) if family == "smolvlm" else (pixels, tensors)
        features = run(pixels, **tensors, return_dict=True)
        wanted.append(levels(features))
    use_tower_attention(model, inputs.form, device=CPU, compute_dtype=torch.float32)
    found = levels(inputs.form.features(model.base_model, normalized(made["tower"])))
    for one, parts in zip(found, zip(*wanted, strict=True), strict=True):
        assert len(one) == len(places)
        torch.testing.assert_close(one, torch.cat(parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", EACH)
def test_a_blank_video_gives_every_trained_parameter_a_gradient(models, family):
    """DDP waits for it, also where a micro-batch has neither images nor videos."""
    skip_without_packages(family)
    model = with_weights(models[family])
    attachments = attachments_of({"video": Videos()}, Model(path=str(models[family])), model)
    ids = np.array([257, 65, 66, 67])
    row = make_sample([(ids, ids)]) | {"attachments": []}
    if attachments.grid:
        row["grid_positions"] = np.broadcast_to(np.arange(4), (3, 4))
    inputs = RowInputs(64, attachments=attachments).collate([row]).micro_batch.inputs
    assert inputs["attachments"]["video"]["count"] == 0
    model.train()
    model(**inputs, use_cache=False).logits.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if model.get_parameter(name).grad is None} == set()
    of_tower = trained & set(parts_without_text(model))
    assert of_tower
    assert all(not model.get_parameter(name).grad.any() for name in of_tower)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm"])
def test_features_of_images_and_videos_are_kept_apart(models, family, tmp_path):
    """The method of videos calls that of images, whose features an answer keeps."""
    folder = models[family]
    model = with_weights(folder, ("image", "video")).eval()
    sections = {"image": Images(), "video": Videos()}
    attachments = attachments_of(sections, Model(path=str(folder)), model)
    make_image(tmp_path / "a.png", size=(90, 60))
    make_video(tmp_path / "a.mkv", 16)
    content = [{"type": "image", "path": "a.png"}, {"type": "video", "path": "a.mkv"}]
    answer = {"role": "assistant", "content": "Yes."}
    row = {"messages": [{"role": "user", "content": content}, answer]}
    encoder = make_encoder(
        "chat", Data(kind="chat"), tokenizer=str(folder), modalities=attachments.modalities
    )
    part = SourcePart(str(tmp_path / "rows.jsonl"), "jsonl")
    [found] = encoder.encode_rows([Row(part, 1, row)])
    assert not found.problem
    inputs = RowInputs(512, attachments=attachments)
    document = one_document(found.ids, found.attachments)
    sample = attachments.complete(
        make_sample([(found.ids, found.ids)]), document, [(0, 0, len(found.ids))]
    )
    given = inputs.collate([sample]).micro_batch.inputs
    with torch.no_grad():
        wanted = model(**given, use_cache=False).logits
        with features_kept(model):
            for _ in range(2):
                assert torch.equal(model(**given, use_cache=False).logits, wanted)


@pytest.mark.parametrize("family", EACH)
def test_operations_of_a_tower_are_those_that_torch_counts(models, family):
    model = with_weights(models[family])
    inputs = record_of(model).towers.kinds["video"].inputs
    ids = torch.full((1, 600), 65)
    tokens, _, arrays = inputs.form.largest(500)
    ids[0, 1 : 1 + tokens] = inputs.token
    tower = normalized(inputs.make(arrays, ids, np.zeros((3, 256), dtype=np.float32))["tower"])
    use_tower_attention(model, inputs.form, device=CPU, compute_dtype=torch.float32)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        inputs.form.features(model.base_model, tower)
    # The projector of LLaVA-OneVision sees the patches before four of them become a token. InternVL's
    # token of the whole image, one of 17 here, is counted as a patch, and has no product of pixels
    inexact = {"llava_onevision": 0.2, "internvl": 0.04}
    expected = pytest.approx(counter.get_total_flops(), rel=inexact.get(family, 1e-3))
    assert sum(inputs.forward_operations(tower, tokens)) == expected


def test_rows_of_a_plan_are_full_of_the_largest_videos(models):
    def rows(family, length, max_pixels=None, kinds=("video",)):
        model = prepared(models[family], kinds)
        sections = {"image": Images(), "video": Videos(max_pixels=max_pixels)}
        sections = {kind: sections[kind] for kind in kinds}
        planned = attachments_of(sections, Model(path=""), model).planned(model)
        modality, inputs = planned.modalities[-1], RowInputs(length, attachments=planned)
        ids = np.full(length, modality.tower.token)
        row = planned.with_largest_attachments(make_sample([(ids, ids)]))
        made = inputs.collate([row]).micro_batch.inputs["attachments"]["video"]
        assert len(made["positions"]) == sum(row["input_ids"] == modality.tower.token)
        return made["count"], modality.tower.patches(made["tower"]), len(made["positions"])

    # A pair of frames of 32 x 32 tokens
    assert rows("qwen2_5_vl", 1026) == (1, 4096, 1024)
    # Pairs of 4 x 5 tokens, as many as fit
    assert rows("qwen2_5_vl", 1002, 20 * 28 * 28) == (1, 4 * 1000, 1000)
    # Of all frames together the pixels of 40 tokens: 20 of a pair of frames; the last video is smaller
    assert rows("qwen3_vl", 128, 40 * 32 * 32) == (6, 4 * 116, 5 * 20 + 16)
    # Frames of 8 x 8 tokens, of which each has patches for 70
    assert rows("gemma4", 200) == (3, 3 * 630, 3 * 64)
    # Frames of 2 x 2 tokens
    assert rows("internvl", 64) == (10, 10 * 17, 40)
    assert rows("smolvlm", 64) == (10, 10 * 16, 40)
    # The same, and a line break after them
    assert rows("llava_onevision", 64) == (1, 15 * 16, 61)
    assert rows("qwen2_5_vl", 256, kinds=("image", "video"))[0] == 0  # full of images


def test_models_without_videos_are_refused(tmp_path):
    for family, problem in (
        ("gemma3", "videos: Gemma3ForConditionalGeneration takes no videos; remove the section"),
        ("idefics3", "videos: Idefics3ForConditionalGeneration takes no videos; remove the"),
        (
            "glm4v",
            "videos: rows with videos are not supported for Glm4vForConditionalGeneration, but",
        ),
    ):
        with pytest.raises(RecipeError, match=problem):
            prepared(make_model(tmp_path / family, family, shape_only=True))
