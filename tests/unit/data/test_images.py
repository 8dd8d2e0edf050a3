"""Rows with images: forms, tokens, micro-batches, and what is refused."""

import base64
import json
import re
import struct
import warnings
import zlib
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.image_utils import load_image

from launcher.data import image_processor as image_processor_module
from launcher.data import images as images_module
from launcher.data.attachment_inputs import grid_positions
from launcher.data.collation import Collated
from launcher.data.encoder import make_encoder
from launcher.data.held_out import copy_documents
from launcher.data.image_processor import load_processor
from launcher.data.images import ImageSource, RowImages
from launcher.data.opening import make_order, open_dataset
from launcher.data.placing import source_of
from launcher.data.streaming import StreamingDataset, StreamOrder
from launcher.data.token_store import ModelTraits, open_store
from launcher.errors import RecipeError, RowError
from launcher.models.micro_batch import IGNORED
from launcher.models.row_division import RowDivision
from launcher.models.tower_inputs import PatchGrid, TowerInputs
from launcher.objectives.next_token import NextToken
from launcher.objectives.preference import Preference
from launcher.recipe.schema import Data
from launcher.sources.finding import find_parts
from launcher.sources.rows import Row, SourcePart, read_all
from tests.image_models import (
    FAMILIES,
    MORE,
    make_image,
    make_model,
    reference_processor,
    skip_without_packages,
    with_images,
)
from tests.micro_batches import contents
from tests.run_files import write_lines
from tests.unit.amounts import IN_CHECK, slow_but

ANSWER = {"role": "assistant", "content": "A thing."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models by their families, made when first asked for, and images."""
    root = tmp_path_factory.mktemp("images")
    for name, size in (("wide", (120, 60)), ("tall", (40, 150)), ("small", (84, 56))):
        make_image(root / f"{name}.png", size=size, seed=size[0])
    return root


def model_in(folder, family):
    path = folder / family
    return path if path.exists() else make_model(path, family)


def encoded(folder, rows, family="qwen2_5_vl", *, kind="chat", max_pixels=None, **data):
    name = str(model_in(folder, family))
    encoder = make_encoder(
        kind,
        Data(kind=kind, **data),
        tokenizer=name,
        modalities=(RowImages(name, max_pixels=max_pixels),),
    )
    part = SourcePart(str(folder / "rows.jsonl"), "jsonl")
    return list(encoder.encode_rows(Row(part, n, row) for n, row in enumerate(rows, 1)))


def asked(*parts, **columns):
    return {"messages": [{"role": "user", "content": [*parts]}, ANSWER], **columns}


def text(words):
    return {"type": "text", "text": words}


def written(folder, rows):
    write_lines(folder / "rows.jsonl", rows)
    return (str(folder / "rows.jsonl"),)


def opened(folder, rows, data, family="qwen2_5_vl", objective=None, grid=True):
    name = str(model_in(folder, family))
    files = written(folder, rows)
    model = ModelTraits(tokenizer=name, attachments=with_images(name, grid=grid))
    store = open_store(files, data, tokenizer=name, model=model, build=True)
    return (objective or NextToken()).open(store, data, model)


@pytest.mark.parametrize("family", slow_but(IN_CHECK, [*FAMILIES, *MORE]))
def test_tokens_are_those_of_the_processor(folder, family):
    skip_without_packages(family)
    rows = [
        asked(
            {"type": "image", "path": "wide.png"},
            text("What?\n\n"),
            {"type": "image", "path": "tall.png"},
        ),
        asked(text("hello")),
        asked(text("x"), {"type": "image", "path": "small.png"}, text("\n\ny")),
    ]
    processor = reference_processor(model_in(folder, family))
    for row, found in zip(rows, encoded(folder, rows, family), strict=True):
        assert not found.problem
        paths = [p["path"] for p in row["messages"][0]["content"] if p["type"] == "image"]
        whole = processor.tokenizer.apply_chat_template(row["messages"], tokenize=False)
        opened_images = [Image.open(folder / path).convert("RGB") for path in paths]
        made = processor(images=opened_images or None, text=[whole], return_tensors="np")
        wanted = made["input_ids"][0]
        assert found.ids.tolist() == list(wanted)
        table, data = found.attachments
        assert data.decode() == "".join(str(folder / path) for path in paths)
        soft = set(load_processor(str(folder / family), None).token_ids)
        for image in table:
            assert found.ids[image["first"]] in soft
            assert found.ids[image["end"] - 1] in soft
        # The answer and its end carry loss
        learned = found.labels[found.labels != IGNORED]
        assert processor.tokenizer.decode(learned) == "A thing.<|end|>"


def test_a_processor_without_the_text_of_an_image_is_refused(tmp_path, monkeypatch):
    skip_without_packages("idefics2")
    about = FAMILIES["idefics3"] | {
        "config": {"model_type": "idefics2"},
        "processor_class": "Idefics2Processor",
        "processor": {"image_processor_type": "Idefics2ImageProcessor"},
    }
    monkeypatch.setitem(MORE, "idefics2", about)
    name = str(make_model(tmp_path, "idefics2", shape_only=True))
    with pytest.raises(RecipeError, match="Idefics2Processor does not say which text takes the"):
        load_processor(name, None)


def test_forms_of_rows_give_the_same_tokens(folder):
    content = (folder / "wide.png").read_bytes()
    plain = base64.b64encode(content).decode()
    url, question = f"data:image/png;base64,{plain}", text("Who?")
    path = str(folder / "wide.png")
    rows = {
        "path": asked({"type": "image", "path": "wide.png"}, question),
        "image": asked({"type": "image", "image": "wide.png"}, question),
        "absolute": asked({"type": "image", "image": path}, question),
        "file url": asked({"type": "image", "url": f"file://{path}"}, question),
        "OpenAI": asked({"type": "image_url", "image_url": {"url": url}}, question),
        "responses": asked({"type": "input_image", "image_url": url}, question),
        "Anthropic": asked(
            {"type": "image", "source": {"type": "base64", "data": plain}}, question
        ),
        "base64": asked({"type": "image", "base64": plain}, question),
        "LLaMA-Factory v1": asked(
            {"type": "image_url", "value": "wide.png"}, {"type": "text", "value": "Who?"}
        ),
        "TRL": asked({"type": "image"}, question, images=["wide.png"]),
        "TRL, no place": {
            "messages": [{"role": "user", "content": "Who?"}, ANSWER],
            "images": ["wide.png"],
        },
        "ShareGPT": {
            "conversations": [
                {"from": "human", "value": "<image>Who?"},
                {"from": "gpt", "value": "A thing."},
            ],
            "images": ["wide.png"],
        },
        "one image": asked(text("<image>Who?"), image="wide.png"),
        "bytes": asked(text("<image>Who?"), images=[{"bytes": content, "path": None}]),
        "of the message": {
            "messages": [{"role": "user", "content": "Who?", "images": ["wide.png"]}, ANSWER]
        },
        "of the message, in its place": {
            "messages": [{"role": "user", "content": "<image>Who?", "image": "wide.png"}, ANSWER]
        },
        "of the message, in a part": {
            "messages": [
                {"role": "user", "content": [{"type": "image"}, question], "images": ["wide.png"]},
                ANSWER,
            ]
        },
        "the_cauldron": {
            "images": ["wide.png"],
            "texts": [{"user": "Who?", "assistant": "A thing.", "source": "aokvqa"}],
        },
        "file url of one slash": asked({"type": "image", "url": f"file:{path}"}, question),
        "JSON in a .csv": asked(text("<image>Who?"), images='["wide.png"]'),
    }
    found = encoded(folder, rows.values())
    for name, one in zip(rows, found, strict=True):
        assert not one.problem, name
        assert one.ids.tolist() == found[0].ids.tolist(), name
    assert found[0].attachments[0]["is_file"][0]
    assert not found[4].attachments[0]["is_file"][0]


def test_images_of_datasets_are_read_with_their_bytes(folder):
    rows = [
        {
            "messages": [{"role": "user", "content": "<image>Who?"}, ANSWER],
            "images": [{"bytes": (folder / "wide.png").read_bytes(), "path": None}],
        }
    ]
    data = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    data.to_parquet(folder / "rows.parquet")
    data.save_to_disk(folder / "saved")
    wanted = encoded(folder, [asked(text("<image>Who?"), images=["wide.png"])])[0].ids.tolist()
    for name in ("rows.parquet", "saved"):
        [row] = read_all(find_parts((str(folder / name),), kind="chat"))
        [found] = encoded(folder, [row.values])
        assert found.ids.tolist() == wanted, name
        # The file itself: an image that datasets decodes would be stored as a larger PNG
        [image], stored = found.attachments
        assert not image["is_file"]
        assert stored == (folder / "wide.png").read_bytes(), name


def test_pairs_show_their_images_to_both_answers(folder):
    row = {
        "prompt": [{"role": "user", "content": "<image>Who?"}],
        "chosen": [{"role": "assistant", "content": "Yes."}],
        "rejected": [{"role": "assistant", "content": "Not at all."}],
        "images": ["wide.png"],
    }
    [found] = encoded(folder, [row], kind="preference")
    first, second = found.attachments[0]
    assert found.first_length < second["first"]
    assert second["first"] - found.first_length == first["first"]
    assert first["checksum"] == second["checksum"]
    data = Data(kind="preference", sequence_length=128, workers=0, cache=str(folder / "cache"))
    dataset = opened(folder, [row], data, objective=Preference())
    made = dataset.collate([dataset[0]]).micro_batch.inputs
    assert made["attachments"]["image"]["count"] == 2
    assert made["image_grid_thw"].shape == (2, 3)
    assert made["position_ids"].shape[0] == 4


def test_instructions_with_images(folder):
    row = {"instruction": "<image>Who?", "output": "A thing.", "images": ["wide.png"]}
    [found] = encoded(folder, [row], kind="instruct")
    [wanted] = encoded(folder, [asked(text("<image>Who?"), images=["wide.png"])])
    assert found.ids.tolist() == wanted.ids.tolist()
    [found] = encoded(folder, [row], kind="instruct", prompt_format="text")
    assert "data.prompt_format=chat" in found.problem


def test_captions(folder):
    """The example of docs/images.md: the image alone is what the user shows."""
    found = encoded(
        folder,
        [{"image": "wide.png", "caption": "A thing."}, {"image": None, "caption": "A thing."}],
        kind="instruct",
        columns={"response": "caption"},
    )
    [wanted] = encoded(folder, [asked({"type": "image", "path": "wide.png"})])
    assert found[0].ids.tolist() == wanted.ids.tolist()
    assert found[0].labels.tolist() == wanted.labels.tolist()
    assert found[1].problem == "column 'image' is empty, and the row has no other prompt"


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (asked(text("<image>a"), images=["none.png"]), "no-such-file"),
        (asked(text("<image>a"), images=["broken.png"]), "damaged"),
        (asked(text("<image>a"), images=["text.png"]), "format"),
        (asked(text("<image><image>a"), images=["wide.png"]), "fewer-than-shown"),
        (asked(text("<image>a"), images=[]), "none-for-its-mark"),
        (asked(text("<image>a"), images=None), "none-for-its-mark"),
        (asked(text("<image>a")), "none-for-its-mark"),
        (
            asked({"type": "input_image", "file_id": "file-123"}),
            "part-of-another-key",
        ),
        (
            asked({"type": "image", "image": "wide.png", "max_pixels": 1000}),
            "key-that-is-not-read",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {**ANSWER, "content": "<image>"}]},
            "in-an-answer",
        ),
        (
            asked({"type": "image", "url": "file://wide.png"}),
            "host-in-a-path",
        ),
        (asked({"type": "image", "path": "a.eps"}), "format"),
        (asked({"type": "image", "path": "a\u001b[31m\nb.png"}), "control-characters"),
        (asked({"type": "image", "path": "b/" * 1000 + "c.png"}), "long-path"),
        (asked({"type": "image", "path": "huge.png"}), "too-many-pixels"),
        (asked(text("a"), images='["none.png"]'), "no-such-file"),
        (asked(text("<image>a"), images=[None]), "type"),
        (asked(text("<image>a"), images=[["wide.png"]]), "type"),
        (asked(text("<image>a"), image="\ud800.png"), "surrogate"),
        (asked(text("<image>a"), image_path="wide.png"), "column-is-not-read"),
        (
            asked(text("<image 1>a"), image_1="wide.png"),
            "column-by-number",
        ),
        (
            {"messages": [{"role": "user", "content": "<image>", "images": ["a", "b"]}, ANSWER]},
            "fewer-in-the-text",
        ),
        ({"texts": ["a", "b"], "images": ["wide.png"]}, "texts-alone"),
        (asked(text("<image>a"), images=["gray16.png"]), "depth"),
        (asked(text("<image>a"), images=["float.tiff"]), "depth"),
        (
            asked(text("<image>a"), images=[Image.new("F", (4, 4))]),
            "depth-of-an-opened-image",
        ),
        (asked(text("<image>a"), images=["wide.png"] * 2), "more-than-shown"),
        (asked({"type": "image", "url": "https://a.b/c.jpg"}), "address"),
        (asked(text("the token <|image_pad|>")), "token-in-a-text"),
        (asked({"type": "video", "video": "a.mp4"}), "part-of-a-video"),
        (asked({"type": "image", "image": 3}), "type-of-a-part"),
        (asked({"type": "image", "base64": "%%%"}), "not-base64"),
        (asked({"type": "image", "path": "/dev/zero"}), "not-a-file"),
        (asked({"type": "image", "path": "."}), "not-a-file"),
        (
            asked(text("a"), video="a.mp4"),
            "column-of-videos",
        ),
        (asked(text("a"), audio="a.mp3"), "column-of-audio"),
        (
            asked(text("a <|video_pad|> b")),
            "token-of-a-video",
        ),
        (asked({"type": "image", "path": "line.png"}), "shape"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": [{"type": "image", "path": "wide.png"}]},
                ]
            },
            "in-an-answer",
        ),
    ],
)
def test_rows_that_cannot_be_used(folder, words, row, rule):
    content = (folder / "wide.png").read_bytes()
    (folder / "broken.png").write_bytes(content[: len(content) // 2])
    (folder / "text.png").write_text("no image")
    Image.new("RGB", (5000, 2)).save(folder / "line.png")
    # Pillow starts Ghostscript for it
    (folder / "a.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    header = b"IHDR" + struct.pack(">II", 30_000, 30_000) + content[24:29]
    header += struct.pack(">I", zlib.crc32(header))
    (folder / "huge.png").write_bytes(content[:12] + header + content[33:])
    Image.fromarray(np.full((40, 40), 1000, np.uint16)).save(folder / "gray16.png")
    Image.fromarray(np.full((40, 40), 0.5, np.float32)).save(folder / "float.tiff")
    [found] = encoded(folder, [row])
    words.check(rule, found.problem)
    assert found.problem.isprintable()
    assert len(found.problem) < 800


def test_large_images_are_not_decoded(folder, monkeypatch):
    make_image(folder / "large.png", size=(120, 60), seed=7)
    monkeypatch.setattr(images_module, "MOST_PIXELS", 7_000)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 6_000)  # Pillow's own limit is no second one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [found] = encoded(folder, [asked({"type": "image", "path": "large.png"})])
    assert "large.png: has 120 x 60 pixels, more than 7,000; scale it down" in found.problem


def test_a_chat_template_in_json_is_that_of_the_processor(folder, tmp_path):
    """Models of images keep it in chat_template.json, which tokenizers do not read."""
    rows = [asked({"type": "image", "path": "wide.png"}, text("Who?"))]
    [wanted] = encoded(folder, rows)
    model = make_model(tmp_path / "model", "qwen2_5_vl", shape_only=True)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    file = model / "chat_template.json"
    file.write_text(json.dumps({"chat_template": template}))

    def ids(**data):
        encoder = make_encoder(
            "chat",
            Data(kind="chat", **data),
            tokenizer=str(model),
            modalities=(RowImages(str(model)),),
        )
        part = SourcePart(str(folder / "rows.jsonl"), "jsonl")
        return [found.ids.tolist() for found in encoder.encode_rows([Row(part, 1, rows[0])])]

    assert ids() == ids(chat_template=str(file)) == [wanted.ids.tolist()]
    file.write_text("{}")
    with pytest.raises(RecipeError, match=r"chat_template.json: is JSON without a text chat_templ"):
        ids(chat_template=str(file))


def test_loss_on_all_leaves_out_the_tokens_of_images(folder):
    [found] = encoded(folder, [asked({"type": "image", "path": "wide.png"})], loss_on="all")
    [image] = found.attachments[0]
    assert (found.labels[image["first"] : image["end"]] == IGNORED).all()
    assert (found.labels[image["end"] + 1 :] != IGNORED).all()


def test_max_pixels(folder):
    row = asked({"type": "image", "path": "wide.png"})
    [found], [less] = encoded(folder, [row]), encoded(folder, [row], max_pixels=4000)
    assert len(less.ids) < len(found.ids)
    with pytest.raises(RecipeError, match=r"images.max_pixels: must be at least 3,136"):
        encoded(folder, [row], max_pixels=100)
    with pytest.raises(RecipeError, match="LlavaProcessor has no limit of pixels"):
        encoded(folder, [row], "llava", max_pixels=4000)


@pytest.mark.parametrize("length", [160, 70, 40, 22])
@pytest.mark.parametrize("packing", [True, False])
def test_images_stay_whole(folder, length, packing):
    rows = [
        asked({"type": "image", "path": name}, text("?"), {"type": "image", "path": "tall.png"})
        for name in ("wide.png", "small.png")
    ] * 3 + [asked(text("a" * 20))]
    for row in rows:  # an answer before the images too
        row["messages"] = [{"role": "user", "content": "a"}, ANSWER, *row["messages"]]
    data = Data(
        kind="chat", sequence_length=length, packing=packing, overlong="cut", workers=0,
        cache=str(folder / "cache"),
    )  # fmt: skip
    dataset = opened(folder, rows, data)
    tokens = load_processor(str(folder / "qwen2_5_vl"), None).token_ids
    shown = 0
    for index in range(len(dataset)):
        made = dataset.collate([dataset[index]]).micro_batch.inputs
        images = made["attachments"]["image"]["count"]
        count = int(torch.isin(made["input_ids"], torch.tensor(tokens)).sum())
        features = int(made["image_grid_thw"].prod(-1).sum()) // 4 if images else 0
        assert count == features
        assert len(made["image_grid_thw"]) == max(1, images)  # without images, a blank one
        shown += images
    assert (shown == 12) is (length >= 70)


@pytest.mark.parametrize("parts", [2, 4, 7])
@pytest.mark.parametrize("packing", [True, False])
def test_parts_of_rows_have_the_features_of_their_tokens(folder, parts, packing):
    """Context parallel ranks have the images of which they have a token, and all positions."""
    rows = [
        asked({"type": "image", "path": name}, text("?"), {"type": "image", "path": "tall.png"})
        for name in ("wide.png", "small.png")
    ] + [asked(text("a" * 20))]
    data = Data(
        kind="chat", sequence_length=168, packing=packing, workers=0, cache=str(folder / "cache")
    )
    dataset = opened(folder, rows, data)
    [images] = dataset.inputs.attachments.modalities
    form = PatchGrid(merge=2, patch=14, patch_values=1176)
    images = replace(images, tower=TowerInputs(images.token_ids[0], form))
    attachments = replace(dataset.inputs.attachments, modalities=(images,))
    inputs = replace(dataset.inputs, attachments=attachments, width_multiple=28)
    samples, few = [dataset[index] for index in range(len(dataset))], []
    whole = contents(inputs.collate(samples).micro_batch)
    of_parts = [
        contents(
            replace(inputs, division=RowDivision(parts, rank=number)).collate(samples).micro_batch
        )
        for number in range(parts)
    ]
    for name in ("input_ids", "targets"):
        joined = torch.cat([made[name] for made in of_parts], dim=1)
        assert torch.equal(joined, whole[name])
    joined = torch.cat([made["position_ids"] for made in of_parts], dim=2)
    assert torch.equal(joined[-3:], whole["position_ids"][-3:])

    def features(made):
        """The pixels of each image token, by its place in the rows of a part."""
        found = made["attachments"]["image"]
        pixels = found["tower"]["pixel_values"].view(-1, 4 * 1176)
        chosen = found.get("chosen", torch.arange(len(pixels)))
        if not found["count"]:
            assert not len(chosen)
        few.append(found["count"])
        return dict(zip(found["positions"].tolist(), pixels[chosen], strict=found["count"] > 0))

    wanted, width = features(whole), whole["input_ids"].shape[1]
    size, found = width // parts, {}
    for number, made in enumerate(of_parts):
        for place, pixels in features(made).items():
            row, column = divmod(place, size)
            found[row * width + number * size + column] = pixels
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[place], wanted[place]) for place in wanted)
    assert sum(few[1:]) < parts * few[0]  # not each part needs all images


def test_positions_are_those_of_the_model(folder):
    """The positions of the model's own function, which reads the device."""
    rows = [
        asked(
            {"type": "image", "path": "wide.png"}, text("?"), {"type": "image", "path": "tall.png"}
        ),
        asked(text("hello")),
        asked({"type": "image", "path": "small.png"}),
    ]
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"):
        config = transformers.AutoConfig.from_pretrained(model_in(folder, family))
        with torch.device("meta"):
            model = transformers.AutoModelForImageTextToText.from_config(config).model
        for found in encoded(folder, rows, family):
            ids = torch.from_numpy(found.ids.astype(np.int64))[None]
            table = found.attachments[0]
            grid = torch.tensor([[1, *(2 * i["meta"][:2])] for i in table])
            wanted, _ = model.get_rope_index(
                ids,
                (ids == config.image_token_id).int(),
                image_grid_thw=grid if len(table) else None,
            )
            images = RowImages("")
            places = [(int(i["first"]), *images.grid(i["meta"].tolist(), ids)) for i in table]
            made = grid_positions(np.arange(len(found.ids)), places)
            assert np.array_equal(made, wanted[:, 0].numpy()), family


def test_documents_of_a_store_keep_their_images(folder):
    rows = [asked({"type": "image", "path": f"{name}.png"}) for name in ("wide", "tall", "small")]
    data = Data(kind="chat", sequence_length=64, workers=0, cache=str(folder / "cache"))
    store = opened(folder, rows, data).store
    for chosen in ([0, 2], [1], [2]):
        copied = copy_documents(store, np.array(chosen))
        for number, document in enumerate(chosen):
            first, moved = store.offsets[document], copied.offsets[number]
            [wanted] = store.attachments_between(*store.offsets[document : document + 2])
            [image] = copied.attachments_between(*copied.offsets[number : number + 2])
            assert image.source == wanted.source
            assert image.first - moved == wanted.first - first


def test_a_changed_file_ends_the_run_by_name(folder):
    make_image(folder / "changing.png", seed=1)
    rows = [asked({"type": "image", "path": "changing.png"})]
    data = Data(kind="chat", sequence_length=64, workers=0, cache=str(folder / "cache"))
    dataset = opened(folder, rows, data)
    assert isinstance(dataset.collate([dataset[0]]), Collated)
    make_image(folder / "changing.png", seed=2)
    error = dataset.collate([dataset[0]]).message
    assert "changing.png: has changed since its row was tokenized" in error
    (folder / "changing.png").unlink()
    assert "changing.png: no such file" in dataset.collate([dataset[0]]).message


def test_models_without_a_processor(folder):
    path = model_in(folder, "llava")
    bare = folder / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (bare / name).write_bytes((path / name).read_bytes())
    with pytest.raises(RecipeError, match="no processor of images could be loaded"):
        load_processor(str(bare), None)
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config["text_config"]))
    with pytest.raises(
        RecipeError, match="transformers has no processor of images for its type; remove"
    ):
        load_processor(f"{bare}/", None)


def test_the_folder_of_images(folder):
    other = folder / "elsewhere"
    other.mkdir()
    name = str(model_in(folder, "qwen2_5_vl"))
    encoder = make_encoder(
        "chat", Data(kind="chat"), tokenizer=name, modalities=(RowImages(name, str(folder)),)
    )
    row = Row(
        SourcePart(str(other / "rows.jsonl"), "jsonl"),
        1,
        asked({"type": "image", "path": "wide.png"}),
    )
    [found] = encoder.encode_rows([row])
    assert not found.problem
    [missing] = replace(encoder, modalities=(RowImages(name),)).encode_rows([row])
    assert "elsewhere/wide.png: no such file" in missing.problem


def test_a_processor_that_needs_torchvision_is_named(folder, monkeypatch):
    """As that of Gemma 4 in transformers 5.17."""

    def refused(name):
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

    name = str(model_in(folder, "qwen2_5_vl"))
    monkeypatch.setattr(image_processor_module.importlib, "import_module", refused)
    with pytest.raises(RecipeError, match=r"images: Qwen2_5_VLProcessor of .* needs torchvision"):
        load_processor.__wrapped__(name, None)


def test_pixels_of_odd_files_are_those_of_transformers(tmp_path):
    """Orientations, colour spaces, palettes, transparency, animations, and names of files."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 4), dtype=np.uint8)
    picture = Image.fromarray(noise[..., :3])
    files = {"with a space, ü 猫.png": picture, "a#b?c%20'.png": picture, "plain.webp": picture}
    files |= {f"mode {mode}.png": picture.convert(mode) for mode in ("P", "1", "L", "LA")}
    files |= {f"{mode}.jpg": picture.convert(mode) for mode in ("CMYK", "L", "YCbCr")}
    files |= {f"alpha.{kind}": Image.fromarray(noise) for kind in ("png", "webp", "tiff")}
    for name, image in files.items():
        image.save(tmp_path / name)
    for kind in ("jpg", "png", "webp"):
        for orientation in range(1, 9):
            exif = Image.Exif()
            exif[0x0112] = orientation
            picture.save(tmp_path / f"{orientation}.{kind}", exif=exif)
    for kind in ("gif", "png", "webp"):
        frames = [picture.rotate(180)]
        picture.save(tmp_path / f"moving.{kind}", save_all=True, append_images=frames)
    picture.convert("P").save(tmp_path / "clear.png", transparency=3)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert len(names) == len(files) + 24 + 3 + 1
    for name in names:
        source: Any = source_of(name, RowImages("", folder=str(tmp_path)))
        wanted = load_image(str(tmp_path / name))
        assert np.array_equal(source.decode(source.read()), wanted), name
        # datasets may hold the opened image
        with Image.open(tmp_path / name) as image:
            source = source_of(image, RowImages(""))
        assert np.array_equal(source.decode(source.read()), wanted), name


@pytest.mark.parametrize("mode", ["I", "I;16", "F", "La"])
def test_opened_images_that_cannot_be_used(mode):
    """Pillow's errors ended the run."""
    with pytest.raises(RowError, match=r"an image in the row: (has pixels of more|cannot be)"):
        source_of(Image.new(mode, (4, 4)), RowImages(""))


@pytest.mark.parametrize("family", slow_but(IN_CHECK, FAMILIES))
@pytest.mark.parametrize("size", [(2, 1), (1, 50), (10_000, 10), (1000, 700)])
def test_pixels_are_those_of_the_processor(folder, family, size):
    skip_without_packages(family)
    if family == "mistral3" and size == (2, 1):
        size = (30, 1)  # which has two tokens
    path = str(model_in(folder, family))
    processor, reference = load_processor(path, None), reference_processor(path)
    noise = np.random.default_rng(1).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    try:
        wanted = reference(images=[image], text=[processor.placeholder], return_tensors="np")
    except ValueError as error:
        with pytest.raises(RowError, match=re.escape(str(error)[:20])):
            processor.process(image)
        return
    found = processor.process(image)
    tokenizer = reference.tokenizer
    assert tokenizer(found.text)["input_ids"] == wanted["input_ids"][0].tolist()
    arrays = processor.join([found.arrays])
    assert arrays
    for name, array in arrays.items():
        assert np.array_equal(array, wanted[name]), name


@pytest.mark.parametrize("packing", [True, False])
def test_a_stream_has_the_images_of_its_documents(folder, packing):
    """Its micro-batches are those of a store, and in several shards each document has its images."""
    name = str(model_in(folder, "qwen2_5_vl"))
    rows = [
        asked(
            text(f"{number}"),
            *({"type": "image", "path": f"{name}.png"} for name in ("wide", "tall")[: number % 3]),
            images=None,
        )
        for number in range(9)
    ]
    train = written(folder, rows)
    data = Data(
        kind="chat",
        train=train,
        sequence_length=160,
        packing=packing,
        overlong="cut",
        cache=str(folder / "cache"),
    )
    options = {"objective": NextToken(), "tokenizer": name}
    options |= {"model": ModelTraits(tokenizer=name, attachments=with_images(name, grid=True))}
    stored = open_dataset(data, train, **options, build=True)
    order = make_order(stored, seed=3, shuffle=True, epochs=None)
    for size in ("1MB", "0.3KB"):
        section = replace(data, streaming=True, shard_size=size)
        stream = StreamingDataset(section, **options, seed=3, build=True)
        of_stream = StreamOrder(stream)
        assert (stream.shards > 1) == (size != "1MB")
        if stream.shards == 1:
            for position in range(2 * len(stored)):
                one, other = stream[of_stream.sample(position)], stored[order.sample(position)]
                whole, expected = (contents(each.collate([row]).micro_batch) for each, row in (
                    (stream, one), (stored, other)))  # fmt: skip
                assert whole.keys() == expected.keys()
                for key, value in whole.items():
                    assert np.array_equal(value, expected[key]), key
            continue
        samples, position = [], 0
        while of_stream.sample(position) >> 40 < stream.shards:
            samples.append(stream[of_stream.sample(position)])
            position += 1
        shown = [image.arrays for sample in samples for image in sample["attachments"]]
        expected = [
            image.arrays for number in range(len(stored)) for image in stored[number]["attachments"]
        ]
        assert len(shown) == len(expected) == 9


@pytest.fixture
def decoded(folder, monkeypatch):
    """The names of images that are decoded, by a processor that has read none."""
    decode, names = ImageSource.decode, []
    monkeypatch.setattr(
        ImageSource,
        "decode",
        lambda self, content: names.append(self.name.rpartition("/")[2]) or decode(self, content),
    )
    load_processor.cache_clear()
    yield names
    load_processor.cache_clear()


def test_images_that_were_read_last_are_kept(folder, decoded, monkeypatch):
    """As many as the limit of bytes allows, and at least one; a file that changes is noticed."""
    processor = load_processor(str(model_in(folder, "qwen2_5_vl")), None)
    wide, tall = (
        source_of(f"{name}.png", RowImages("", folder=str(folder))) for name in ("wide", "tall")
    )
    first, checksum = processor.read(wide, in_bytes=True)
    again, _ = processor.read(wide, in_bytes=True, checksum=checksum)
    assert again is first
    processor.read(wide, in_bytes=False)
    processor.read(tall, in_bytes=True)
    processor.read(wide, in_bytes=True)
    assert decoded == ["wide.png", "wide.png", "tall.png"]
    monkeypatch.setattr(image_processor_module, "_KEPT_BYTES", 1)
    processor.read(tall, in_bytes=True)
    processor.read(wide, in_bytes=True)
    assert decoded[3:] == ["wide.png"]
    with pytest.raises(RowError, match=r"wide.png: has changed since its row was tokenized"):
        processor.read(wide, in_bytes=True, checksum=checksum + 1)


def test_an_image_of_a_single_token_is_refused_for_mistral(folder):
    """Mistral 3 of transformers squeezes its features away."""
    skip_without_packages("mistral3")
    processor = load_processor(str(model_in(folder, "mistral3")), None)
    assert processor.blank["pixel_values"].shape[-1] > 28
    with pytest.raises(RowError, match="the image of 20 x 20 pixels has a single token"):
        processor.process(Image.new("RGB", (20, 20)))
