"""Coordinates in the texts of rows with images: what is read, and what becomes of the numbers."""

import json
import re

import pytest
from transformers import AutoTokenizer

from launcher.data.chat_template import Rendered, Turn
from launcher.data.coordinates import Located, SizedImage, converted, joined, located, note, total
from launcher.data.encoder import make_encoder
from launcher.data.images import RowImages
from launcher.data.token_store import ModelTraits, open_store
from launcher.errors import RecipeError, RowError
from launcher.libraries.families import COORDINATES
from launcher.models.micro_batch import IGNORED
from launcher.recipe.schema import Data, Images
from launcher.sources.rows import Row, SourcePart
from tests.image_models import make_image, make_model, with_images
from tests.run_files import write_lines

FULL_HD = SizedImage(0, (1920, 1080), (1316, 728))
"""As `smart_resize` of Qwen2.5-VL gives it with at most 1280 x 28 x 28 pixels: 1080 / 1.4375 = 751 is
26.8 times 28, and 1920 / 1.4375 = 1336 is 47.7 times 28, both rounded down."""


def rendered(text, *turns):
    return Rendered(text, [Turn(start, end, True) for start, end in turns], closed=True)


def changed(text, *, unit="pixels", own="pixels", images=(FULL_HD,), turns=()):
    return converted(rendered(text, *turns), images, unit, own).text


FORMS = [
    '[{"bbox_2d": [100, 200, 1500, 1000], "label": "a 7"}]',
    '{"bbox_2d":[100,200,1500,1000],"n": 7}',
    "{'bbox_2d': [[100, 200, 1500, 1000],\n [0, 0, 100, 200]]}",
    r'"{\"bbox_2d\": [\n100,\n200, 1500, 1000]}"',
    '"bbox_2d": ["100", "200", "1500", "1000"]',
    '"point_2d": [100.4, 2e2]',
    "<parameter=bbox_2d>\n[100, 200, 1500, 1000]\n</parameter>",
    "<|box_start|>(100,200),(1500,1000)<|box_end|>",
    "<|point_start|>(100,200)<|point_end|>",
    "<quad>(100,200),(1500,200),(1500,1000),(100,1000)</quad>",
    "<box>[[100, 200, 1500, 1000]]</box>",
]
SCALED = {"100": 69, "100.4": 69, "200": 135, "2e2": 135, "1500": 1028, "1000": 674}


@pytest.mark.parametrize("text", FORMS)
def test_numbers_become_pixels_of_the_size_that_the_model_sees(text):
    """1316 / 1920 and 728 / 1080 times each, rounded. All else stays byte for byte."""
    numbers = "|".join(sorted(map(re.escape, SCALED), key=len, reverse=True))
    expected = re.sub(numbers, lambda match: str(SCALED[match[0]]), text)
    assert expected != text
    assert changed(text) == expected


@pytest.mark.parametrize(
    ("unit", "own", "expected"),
    [
        ("pixels", "pixels", [10, 67, 699, 727]),
        ("pixels", "thousandths", [8, 93, 531, 1000]),
        ("thousandths", "pixels", [20, 73, 1315, 727]),
        ("thousandths", "thousandths", [15, 100, 1000, 1000]),
        ("fractions", "pixels", [20, 73, 658, 727]),
        ("fractions", "thousandths", [15, 100, 500, 1000]),
    ],
)
def test_units(unit, own, expected):
    """At the edge, the last pixel, as in Qwen's scripts."""
    box = {
        "pixels": [15, 100, 1020, 1080],
        "thousandths": [15, 100, 1000, 1000],
        "fractions": [0.015, 0.1, 0.5, 1.0],
    }[unit]
    assert json.loads(changed(json.dumps({"bbox_2d": box}), unit=unit, own=own)) == {
        "bbox_2d": expected
    }


def test_thousandths_stay_as_they_are_for_models_of_thousandths():
    text = '{"bbox_2d": [015, 100.50, 1000, 1000]}'
    images = (SizedImage(0, (1920, 1080), None),)
    assert changed(text, unit="thousandths", own="thousandths", images=images) == text


@pytest.mark.parametrize(
    "text",
    [
        "Answer as {'bbox_2d': [x1, y1, x2, y2]}.",
        '{"bbox_2d": null, "n": 3}',
        "<bbox_2d>no</bbox_2d> 12",
        "A bbox_2d is a box of 4 numbers: [1, 2, 3, 4]",
        "my_bbox_2d: [1, 2, 3, 4]",
    ],
)
def test_texts_without_numbers_stay(text):
    assert changed(text) == text
    assert located(rendered(text), [FULL_HD], "pixels") is None


@pytest.mark.parametrize(
    "text",
    [
        '{"bbox_2d": {"x1": 10, "y1": 20}}',
        '{"bbox_2d": [1, 2, 3]}',
        '{"bbox_2d": [1, 2, 3, NaN]}',
        '{"bbox_2d": "1, 2, 3, 4"}',
        "<box>1-2, 3, 4</box>",
        '{"bbox": [1, 2, 3, 4]}',
        "<loc0001><loc0002>",
        "<|begin_of_box|>[[1, 2, 3, 4]]<|end_of_box|>",
    ],
)
def test_other_forms_are_counted(text):
    made = converted(rendered(text), [FULL_HD], "pixels", "pixels")
    assert made.text == text
    assert made.coordinates == Located(unread_coordinates=1)
    assert located(rendered(text), [FULL_HD], "pixels") == Located(unread_coordinates=1)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ('"bbox_2d": [0, 0, 2000, 1]', "pixels"),
        ('"bbox_2d": [-50, 0, 1, 1]', "pixels"),
        ('"point_2d": [1, 1900]', "pixels"),
        ('"bbox_2d": [0, 0, 1900, 900]', "thousandths"),
        ('"bbox_2d": [0, 0, 2, 2]', "fractions"),
        ('"bbox_2d": [0, 0.25, 1, 1]', "pixels"),
        ('"bbox_2d": [0, 0.25, 1, 1]', "thousandths"),
        ('"bbox_2d": [0, 0, 1e999, 1]', "pixels"),
    ],
)
def test_numbers_that_cannot_be_what_the_recipe_says(words, text, unit):
    with words.refused(f"{text} {unit}", RowError):
        changed(text, unit=unit)


def test_the_sizes_are_those_of_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    for image in (FULL_HD, SQUARE, WIDE):
        width, height = image.file
        assert smart_resize(height, width, factor=28) == image.seen[::-1]


def test_a_box_at_the_edge_is_put_into_the_image():
    """Annotations are rounded: up to a hundredth of a side."""
    assert changed('"bbox_2d": [-3, -2, 1925, 1082]') == '"bbox_2d": [0, 0, 1315, 727]'


SQUARE = SizedImage(0, (100, 100), (112, 112))
WIDE = SizedImage(0, (200, 100), (196, 112))
BOX = '"point_2d": [50, 50]'


def test_a_box_belongs_to_the_image_of_its_part_of_the_conversation():
    """Also before its image, and in later parts without one."""
    parts = [f"{BOX} I|", f"{BOX}|", f"I {BOX}|", f"{BOX}|", f"{BOX}|", f"{BOX}"]
    text = "".join(parts)
    ends = [match.end() for match in re.finditer(r"\|", text)]
    turns = [(ends[0], ends[1]), (ends[2], ends[3])]
    places = [match.start() for match in re.finditer("I", text)]
    images = [one._replace(start=at) for one, at in zip((SQUARE, WIDE), places, strict=True)]
    found = re.findall(r"\[(\d+)", changed(text, images=images, turns=turns))
    assert found == ["56", "56", "49", "49", "49", "49"]
    early = f"system {BOX}|answer|I"
    images = [WIDE._replace(start=len(early) - 1)]
    assert "[49, 56]" in changed(early, images=images, turns=[(early.index("|"), len(early) - 1)])


def test_a_box_that_could_belong_to_several_images():
    images = [SQUARE, WIDE._replace(start=1)]
    with pytest.raises(RowError, match=r"could belong to each.*one image in a message"):
        changed(f"II {BOX}", images=images)
    assert "[56, 56]" in changed(f"II {BOX}", images=[SQUARE, SQUARE._replace(start=1)])
    found = located(rendered(f"II {BOX}"), images, "pixels")
    assert found == Located(1, thousandths=1, image_scales=1120)


@pytest.mark.parametrize(
    ("text", "videos"),
    [
        (f"I V {BOX}", [2]),
        (f"V {BOX}", [0]),
        (f"I|answer|V {BOX}", [9]),
        (f"V {BOX}|answer|I", [0]),
    ],
)
def test_a_box_that_could_belong_to_a_video(text, videos):
    """Its numbers are not those of an image in another part of the conversation."""
    images = [WIDE._replace(start=text.index("I"))] if "I" in text else []
    ends = [match.end() for match in re.finditer(r"\|", text)]
    made = rendered(text, *zip(ends[::2], ends[1::2], strict=True))
    with pytest.raises(RowError, match=r"could belong to a video.*one image in a message"):
        converted(made, images, "pixels", "pixels", videos)
    if images:
        found = located(made, images, "pixels", videos)
        assert found == Located(1, thousandths=1, image_scales=980)
    else:
        assert located(made, images, "pixels", videos) is None


def test_a_box_of_an_image_beside_a_video_of_another_part():
    text = f"V|answer|I {BOX}"
    made = rendered(text, (2, 9))
    images = [WIDE._replace(start=text.index("I"))]
    assert "[49, 56]" in converted(made, images, "pixels", "pixels", [0]).text


def test_what_follows_a_changed_number_keeps_its_loss():
    text = f"I {BOX} {BOX}|answer {BOX}|end"
    start, end = text.index("answer"), text.index("|end")
    made = Rendered(text, [Turn(start, end, True, parts=((start + 7, 0.5),))], closed=True)
    made = converted(made, [SizedImage(0, (50, 50), (500, 500))], "pixels", "pixels")
    (turn,) = made.turns
    assert made.text[turn.start : turn.end] == 'answer "point_2d": [499, 499]'
    assert made.text[turn.parts[0][0] :].startswith('"point_2d": [499')


def test_what_numbers_could_be():
    def one(text, own="pixels"):
        return located(rendered(text), [FULL_HD], own)

    assert one('"bbox_2d": [1, 2, 900, 1000]') == Located(1, 0, 1, 0, 1, 0, 685)
    assert one('"bbox_2d": [1, 2, 900, 700]') == Located(1, 0, 1, 1, 1, 0, 685)
    assert one('"bbox_2d": [1, 2, 1900, 1070]') == Located(1, 0, 1, 0, 0, 0, 685)
    assert one('"bbox_2d": [0.1, 0.2, 0.9, 1]') == Located(1, 0, 0, 0, 0, 1, 685)
    assert one('"bbox_2d": [0, 0, 5000, 1]') == Located(1, 0, 0, 0, 0, 0, 685)
    same = SizedImage(0, (112, 112), (112, 112))
    assert located(rendered(BOX), [same], "pixels") is None
    assert located(rendered(BOX), [same], "thousandths") == Located(1, 0, 1, 1, 1, 0, 1000)
    assert located(rendered(BOX), [], "thousandths") is None
    pair = joined([None, Located(1, 0, 1, 0, 1, 0, 685), Located(1, 0, 1, 1, 0, 0, 685)])
    assert pair == Located(1, 0, 1, 0, 0, 0, 685)
    assert total([pair, pair]) == Located(2, 0, 2, 0, 0, 0, 1370)
    assert (joined([None]), total([])) == (None, Located())


@pytest.mark.parametrize(
    ("found", "own", "words"),
    [
        (
            Located(3, 0, 3, 1, 2, 0, 2055),
            "pixels",
            "note: 3 rows hold coordinates, which stay as they are. The model sees their "
            "images at 0.69 times their width. By their size the numbers could be pixels of the image "
            "files in 3 and pixels of the size that the model sees in 1 and thousandths of the width and "
            "height in 2. What this model was trained with: pixels of the size that the model sees; "
            "images.coordinates says what they are, and converts them",
        ),
        (
            Located(3, 0, 3, 3, 2, 0, 0),
            "pixels",
            "; if they are others, images.coordinates says so",
        ),
        (
            Located(1, 0, 0, 0, 1, 0, 0),
            "thousandths",
            "height in 1. What this model was trained with",
        ),
        (Located(2, 0, 1, 0, 1, 0, 0), None, "What this model was trained with: not known"),
        (
            Located(2),
            "pixels",
            "none of what is known. What this model was trained with: pixels of",
        ),
        (Located(2), "pixels", "images.coordinates says what they are"),
        (
            Located(0, 5),
            "pixels",
            "5 rows hold coordinates in a form that is not read",
        ),
    ],
)
def test_notes(found, own, words):
    (line,) = note(found, None, own)
    assert words in line


def test_notes_of_what_was_converted():
    (line,) = note(Located(3), "pixels", "pixels")
    assert line.endswith(
        "pixels of the image files (images.coordinates: pixels), which became pixels of the size that "
        "the model sees"
    )
    assert note(Located(3), "thousandths", "thousandths")[0].endswith("as this model was trained")
    assert "no row holds coordinates" in note(Located(), "pixels", "pixels")[0]
    assert len(note(Located(2, 1), "pixels", "pixels")) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("coordinates")
    make_image(root / "wide.png", size=(120, 60), seed=1)
    make_image(root / "tall.png", size=(40, 150), seed=2)
    return root


def in_model(
    folder,
    row,
    family,
    max_pixels=None,
    coordinates=None,
    *,
    kind="chat",
    problem=False,
    unused=None,
):
    """The text of the tokens of a row, and of those with loss; or why it cannot be used."""
    name = folder / family
    name = str(name if name.exists() else make_model(name, family))
    images = RowImages.of(Images(max_pixels=max_pixels, coordinates=coordinates), name)
    encoder = make_encoder(kind, Data(kind=kind), tokenizer=name, modalities=(images,))
    part = SourcePart(str(folder / "rows.jsonl"), "jsonl")
    (found,) = encoder.encode_rows([Row(part, 1, row)], unused=unused)
    if problem:
        return found.problem
    assert not found.problem, found.problem
    tokenizer = AutoTokenizer.from_pretrained(name)
    learned = found.ids[found.labels != IGNORED]
    return tokenizer.decode(found.ids), tokenizer.decode(learned), found


ROW = {
    "messages": [
        {"role": "user", "content": '<image>What is at {"bbox_2d": [10, 20, 110, 50]}?'},
        {"role": "assistant", "content": '[{"bbox_2d": [10, 20, 110, 50], "label": "12"}]'},
    ],
    "images": ["wide.png"],
}


@pytest.mark.parametrize(
    ("family", "max_pixels", "coordinates", "box"),
    [
        ("qwen2_5_vl", None, None, [10, 20, 110, 50]),
        ("qwen2_5_vl", None, "pixels", [9, 19, 103, 47]),  # 112 x 56
        ("qwen2_5_vl", 4000, "pixels", [7, 9, 77, 23]),  # 84 x 28
        ("qwen2_5_vl", None, "thousandths", [1, 1, 12, 3]),
        ("qwen2_vl", 4000, "pixels", [83, 333, 917, 833]),
        ("qwen3_vl", None, "pixels", [83, 333, 917, 833]),
        ("qwen3_vl", None, "thousandths", [10, 20, 110, 50]),
        ("internvl", None, "pixels", [83, 333, 917, 833]),
    ],
)
def test_rows_of_models(folder, family, max_pixels, coordinates, box):
    """In the prompt and in the answer, and the loss is on the answer with its numbers."""
    text, learned, _ = in_model(folder, ROW, family, max_pixels, coordinates)
    assert f'What is at {{"bbox_2d": {box}}}?' in text
    assert f'[{{"bbox_2d": {box}, "label": "12"}}]' in learned
    assert text.count("bbox_2d") == 2
    assert learned.count("bbox_2d") == 1


OBJECTS = {
    "messages": [
        {"role": "user", "content": "<image><image>Where is <ref-object>? Not <bbox>"},
        {"role": "assistant", "content": '{"bbox_2d": <bbox>, "label": "<ref-object>"} at <bbox>.'},
    ],
    "images": ["wide.png", "tall.png"],
    "objects": {
        "ref": ["the {cat}", 'a "cat"'],
        "bbox": [[10, 20, 110, 50], [10, 20, 110, 50], [20, 100]],
        "image_id": [0, 0, 1],
    },
}


@pytest.mark.parametrize(
    ("family", "prompt", "answer"),
    [
        (
            "qwen2_5_vl",  # of 120 x 60 and 40 x 150 pixels: 112 x 56 and 28 x 140
            "the {cat}? Not [9, 19, 103, 47]",
            '{"bbox_2d": [9, 19, 103, 47], "label": "a \\"cat\\""} at [14, 93].',
        ),
        (
            "qwen3_vl",
            "the {cat}? Not [83, 333, 917, 833]",
            '{"bbox_2d": [83, 333, 917, 833], "label": "a \\"cat\\""} at [500, 667].',
        ),
        (
            "qwen2_vl",
            "<|object_ref_start|>the {cat}<|object_ref_end|>? Not <|box_start|>(83,333),(917,833)<|box_end|>",
            '{"bbox_2d": [83, 333, 917, 833], "label": "a \\"cat\\""} at <|box_start|>(500,667)<|box_end|>.',
        ),
        (
            "internvl",
            "<ref>the {cat}</ref>? Not <box>[[83, 333, 917, 833]]</box>",
            '{"bbox_2d": [83, 333, 917, 833], "label": "a \\"cat\\""} at <box>[[500, 667]]</box>.',
        ),
    ],
)
def test_objects_take_the_places_of_their_marks(folder, family, prompt, answer):
    """As ms-swift writes them. Also as JSON text, and as parts of 1."""
    text, learned, _ = in_model(folder, OBJECTS, family)
    assert f"Where is {prompt}" in text
    assert answer in learned
    again = OBJECTS | {"objects": json.dumps(OBJECTS["objects"])}
    assert in_model(folder, again, family)[0] == text
    boxes = [[10 / 120, 20 / 60, 110 / 120, 50 / 60]] * 2 + [[0.5, 100 / 150]]
    parts = OBJECTS | {"objects": OBJECTS["objects"] | {"bbox": boxes, "bbox_type": "norm1"}}
    assert in_model(folder, parts, family)[0] == text
    instruct = {
        "prompt": OBJECTS["messages"][0]["content"],
        "response": OBJECTS["messages"][1]["content"],
        "images": OBJECTS["images"],
        "objects": OBJECTS["objects"],
    }
    assert in_model(folder, instruct, family, kind="instruct")[0] == text


def test_objects_in_a_list_of_json(folder):
    """All boxes of the list are numbers, and one behind it is written as in a text."""
    row = {
        "messages": [
            {"role": "user", "content": "<image>Where are they?"},
            {"role": "assistant", "content": '{"boxes": [<bbox>,\n <bbox>, <bbox>]} and <bbox>'},
        ],
        "images": ["wide.png"],
        "objects": {"bbox": [[10, 20, 110, 50]] * 4},
    }
    box = "[83, 333, 917, 833]"
    learned = in_model(folder, row, "qwen2_vl")[1]
    last = "<|box_start|>(83,333),(917,833)<|box_end|>"
    assert f'{{"boxes": [{box},\n {box}, {box}]}} and {last}' in learned


@pytest.mark.parametrize(
    ("objects", "rule"),
    [
        ([1], "object"),
        ("{", "object"),
        ({"bbox_type": "norm1000"}, "bbox_type"),
        ({"bbox_type": ["real"]}, "list-of-bbox_type"),
        ({"ref": "cat"}, "ref"),
        ({"bbox": [[1, 2, 3]]}, "bbox"),
        ({"bbox": [[1, 2, 3, "4"]]}, "bbox"),
        ({"bbox": [[1, 2, 3, True]]}, "bbox"),
        ({"bbox": [[1, 2, 3, float("nan")]]}, "bbox"),
        ({"bbox": [[1, 2, 3, 10**400]]}, "bbox"),
        ({"image_id": ["0"]}, "image_id"),
        ({"image_id": [0] * 4}, "number-of-images"),
        ({"image_id": [0, 0, 2]}, "no-such-image"),
        ({"image_id": [0, 0, -1]}, "negative-image"),
        ({"ref": ["a"]}, "fewer-texts"),
        ({"bbox": [], "image_id": []}, "no-boxes"),
        ({"bbox": [[0, 0, 500, 9]] * 3}, "outside"),
        ({"bbox": [[0, 0, 0.5, 1]] * 3}, "parts"),
        ({"ref": ["<|image_pad|>", "a"]}, "token-of-images"),
        ({"ref": ["a", "<|end|>"]}, "token"),
    ],
)  # fmt: skip
def test_objects_that_cannot_be_used(folder, words, objects, rule):
    row = OBJECTS | {
        "objects": OBJECTS["objects"] | objects if isinstance(objects, dict) else objects
    }
    words.check(rule, in_model(folder, row, "qwen2_5_vl", problem=True))


def test_objects_without_marks_or_images_are_not_used(folder):
    """A column of another meaning is told as one that is not used, as before."""
    row = ROW | {"objects": {"bbox": [[1, 2, 3, 4]], "categories": [1]}}
    unused = []
    in_model(folder, row, "qwen2_5_vl", unused=unused)
    assert unused == ["objects"]
    alone = {"messages": OBJECTS["messages"][1:], "objects": OBJECTS["objects"]}
    alone["messages"] = [{"role": "user", "content": "<bbox>"}, *alone["messages"]]
    problem = in_model(folder, alone, "qwen2_5_vl", problem=True)
    assert problem == "column 'objects' has boxes, and the row has no images"
    unused = []
    encoder = make_encoder("chat", Data(kind="chat"), tokenizer=str(folder / "qwen2_5_vl"))
    part = SourcePart(str(folder / "rows.jsonl"), "jsonl")
    (found,) = encoder.encode_rows([Row(part, 1, alone)], unused=unused)
    assert (found.problem, unused) == ("", ["objects"])
    with pytest.raises(RecipeError, match=r"type llava .* data.ignore_columns=.* trains without"):
        in_model(folder, OBJECTS, "llava")


def test_a_model_whose_coordinates_are_not_known(folder):
    with pytest.raises(RecipeError, match=r"not known what coordinates .* type llava was trained"):
        in_model(folder, ROW, "llava", None, "pixels")


def test_the_store_says_what_its_rows_hold(folder):
    """Also when it comes from the cache. A store without the key keeps its name."""
    name = str(make_model(folder / "noted", "qwen2_5_vl"))
    write_lines(folder / "rows.jsonl", [ROW, ROW])
    data = Data(kind="chat", workers=0, cache=str(folder / "cache"))

    def opened():
        model = ModelTraits(tokenizer=name, attachments=with_images(name))
        files = (str(folder / "rows.jsonl"),)
        return open_store(files, data, tokenizer=name, model=model, build=True)

    made, again = opened(), opened()
    assert made.located == Located(2, 0, 2, 2, 2, 0, 2 * 933)
    assert again.located == made.located
    assert any("2 rows hold coordinates, which stay" in each for each in again.notes)
    before = RowImages(name, "f", max_pixels=9).identity()
    assert before[-2:] == [9, "f"]
    assert RowImages(name, "f", max_pixels=9, coordinates="pixels").identity() == [
        *before,
        "pixels",
    ]


def test_each_family_is_a_type_of_transformers():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert [kind for kind in COORDINATES if kind not in CONFIG_MAPPING_NAMES] == []
