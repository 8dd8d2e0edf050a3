"""Coordinates in the texts of rows with images, such as boxes, in the numbers that a model was trained
with.

A model sees most images in another size than that of their files. Qwen2.5-VL was trained with pixels of
the size that it sees, and others with thousandths of the width and height, so the numbers of a row may
mean something else to the model.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from launcher.errors import RowError

if TYPE_CHECKING:
    from launcher.data.chat_template import Rendered

Unit = Literal["pixels", "thousandths", "fractions"]
"""What the numbers in texts are (images.coordinates): pixels, thousandths of the width and height, or
parts of them from 0 to 1."""
Size = tuple[int, int]
"""Width and height, in pixels."""

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_BETWEEN = re.compile(r"""(?:[\[\](),\s"']|\\[ntr]|\\)*""")
"""What stands between numbers, also in JSON that is a text of JSON."""
_RUN = re.compile(r"""[\[\](),\s"'\\0-9.+\-eEntr]*""")
"""The characters of a list of numbers: another one ends the search for its end."""
_LONGEST_VALUE = 200
"""Characters of another value than a list, in which numbers are looked for."""
_KEY = re.compile(r"""(?<![/\w])(bbox_2d|point_2d)[\\"']*\s*[:>](?:\s|\\[ntr])*[\\"']*""")
"""Begins coordinates: as a key of JSON, or as the name of a parameter of a call (Qwen3.5)."""
_MARKS = re.compile(
    r"(<\|box_start\|>)([^<]*)<\|box_end\|>|(<\|quad_start\|>)([^<]*)<\|quad_end\|>"
    r"|(<\|point_start\|>)([^<]*)<\|point_end\|>|(<box>)([^<]*)</box>|(<quad>)([^<]*)</quad>"
)
_VALUES = {
    "bbox_2d": 4,
    "point_2d": 2,
    "<|box_start|>": 4,
    "<|quad_start|>": 8,
    "<|point_start|>": 2,
    "<box>": 4,
    "<quad>": 8,
}
"""The numbers of one box or point of each form: x and y in turn."""
_OTHERS = re.compile(r"""[\\"']bbox[\\"']|<\|begin_of_box\|>\s*\[|<bbox>|<loc\d{4}>|<points? """)
"""Further forms, whose numbers are not read: they mean other things, or may be no coordinates."""
_SLACK = 0.01
"""How far coordinates may be outside of an image, as a part of its side: boxes of objects at its edge
are rounded. At least two pixels."""
_LARGEST = 1e9
"""More than any coordinate; NaN is not less, either."""
FORMS = ("pixels_of_file", "pixels_of_model", "thousandths", "fractions")
"""The fields of `Located` that say what the numbers could be."""


class Located(NamedTuple):
    """The coordinates in the texts of rows, in numbers of rows, which can be added."""

    coordinate_rows: int = 0
    """Those whose coordinates are read."""
    unread_coordinates: int = 0
    """Those with coordinates in another form, or that are no numbers."""
    pixels_of_file: int = 0
    """Those whose numbers could be pixels of the image's file."""
    pixels_of_model: int = 0
    """Pixels of the size in which the model sees the image."""
    thousandths: int = 0
    fractions: int = 0
    image_scales: int = 0
    """The sum of 1000 times the width that the model sees over that of the file; 0: it is not known."""


class _Group(NamedTuple):
    """The numbers of a box or point, or of several ones: x and y in turn."""

    form: str
    start: int
    """In the text."""
    spans: list[tuple[int, int]]
    """Where the numbers stand in the text."""
    values: list[float]


class SizedImage(NamedTuple):
    """An image of a conversation."""

    start: int
    """Its place in the text."""
    file: Size
    """Upright, as the EXIF data of its file say."""
    seen: Size | None
    """As the model sees it; None: not known."""


def located(
    rendered: Rendered,
    images: Sequence[SizedImage],
    own: Unit | None,
    videos: Sequence[int] = (),
) -> Located | None:
    """What the coordinates in a text could be; None: it has none, or they mean the same for the model
    because their images keep their sizes. own: what the model was trained with; None: not known.
    videos: the places of videos in the text."""
    groups, unread = _groups_of(rendered)
    scaled = [image for image in images if image.file != image.seen]
    if not images or not (groups or unread) or (own != "thousandths" and not scaled):
        return None
    if not groups:
        return Located(unread_coordinates=1)
    fitting = dict.fromkeys(FORMS, 1)
    for group in groups:
        image, *others = _images_of(group, rendered, images, videos)
        sides = {"thousandths": (1000, 1000), "fractions": (1, 1)}
        if image is not None and not others:
            sides["pixels_of_file"] = image.file
            sides["pixels_of_model"] = image.seen or (0, 0)
        for form in FORMS:
            if form not in sides or _outside(group.values, sides[form]) is not None:
                fitting[form] = 0
        if _are_fractions(group.values):
            fitting = dict.fromkeys(FORMS, 0) | {"fractions": fitting["fractions"]}
    image = (scaled or images)[0]
    scale = 0 if image.seen is None else round(1000 * image.seen[0] / image.file[0])
    return Located(1, int(unread), **fitting, image_scales=scale)


def converted(
    rendered: Rendered,
    images: Sequence[SizedImage],
    unit: Unit,
    own: Unit,
    videos: Sequence[int] = (),
) -> Rendered:
    """The conversation with its coordinates, which are in `unit`, as the model was trained with them.
    Numbers are whole ones, as Qwen's and InternVL's scripts of training data make them, within the
    image. The rest of the text stays as it is.

    A box belongs to the image in its own part of the conversation (a prompt, and the answer to it), or
    in the one before. Raises RowError if several images of different sizes or a video are there, and for
    numbers that cannot be what `unit` says. videos: the places of videos in the text.
    """
    groups, unread = _groups_of(rendered)
    if not (images or videos) or not (groups or unread):
        return rendered
    edits = list[tuple[int, int, str]]()
    for group in groups:
        image, *others = _images_of(group, rendered, images, videos)
        if image is None or others:
            sizes = [f"{one.file[0]} x {one.file[1]}" for one in images]
            what = (
                f"after several images of different sizes ({', '.join(sizes)} pixels) could belong "
            )
            what += "to each of them"
            if image is None or None in others:
                what = "could belong to a video, for which no numbers are converted"
            raise RowError(
                f"{group.form} {what}; show one image in a message, or write the numbers that the "
                "model knows into all rows and set images.coordinates=null"
            )
        sides = _sides(image, unit)
        _check(group, sides, image, f"images.coordinates: {unit}")
        if unit == own == "thousandths":
            continue
        made = _scaled(group.values, sides, image, own)
        edits += [(*span, str(number)) for span, number in zip(group.spans, made, strict=True)]
    found = Located(int(bool(groups)), int(unread))
    return replace(rendered.with_edits(edits), coordinates=found)


class Objects(NamedTuple):
    """What stands in the places of `<ref-object>` and `<bbox>` in the texts of a row (ms-swift)."""

    column: str
    references: list[str]
    boxes: list[list[float]]
    """Of each, x and y in turn."""
    images: list[int]
    """The number of the image of each box, from 0."""
    unit: Unit


OBJECT_MARKS = ("<ref-object>", "<bbox>")


def read_objects(value: object, column: str) -> Objects:
    """The objects in a column: `{"ref": [...], "bbox": [...], "bbox_type": "real" | "norm1",
    "image_id": [...]}`, also as JSON. Without bbox_type boxes are pixels of the file, and without
    image_id they belong to the first image. Raises RowError."""
    what = f"column {column!r}"
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        raise RowError(
            f'{what} must be an object such as {{"ref": ["a cat"], "bbox": [[1, 2, 3, 4]]}}'
        )
    units: dict[object, Unit] = {None: "pixels", "real": "pixels", "norm1": "fractions"}
    lists: list[Any] = [value.get(key) or [] for key in ("ref", "bbox", "image_id")]
    references, boxes, numbers = lists
    kind = value.get("bbox_type")
    if not isinstance(kind, str | None) or kind not in units:
        raise RowError(f"{what}: bbox_type must be real or norm1; got {kind!r}")
    if not isinstance(references, list) or not all(isinstance(one, str) for one in references):
        raise RowError(f"{what}: ref must be a list of texts")
    if not isinstance(boxes, list) or not all(map(_is_box, boxes)):
        raise RowError(f"{what}: bbox must be a list of lists of 2, 4 or 8 numbers")
    if not isinstance(numbers, list) or not all(type(one) is int for one in numbers):
        raise RowError(f"{what}: image_id must be a list of whole numbers")
    if len(numbers) > len(boxes):
        raise RowError(
            f"{what}: image_id has {len(numbers)} numbers for {len(boxes)} boxes of bbox"
        )
    of_images = [*numbers, *[0] * (len(boxes) - len(numbers))]
    values = [[float(one) for one in box] for box in boxes]
    return Objects(column, references, values, of_images, units[kind])


def _is_box(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) in (2, 4, 8)
        and all(type(one) in (int, float) and abs(one) < _LARGEST for one in value)
    )


def with_objects(
    rendered: Rendered, images: Sequence[SizedImage], own: Unit, texts: tuple[str, str]
) -> Rendered:
    """The conversation with its objects in the places of their marks. texts: how a model writes a
    reference and a box; in JSON both are plain. Raises RowError if their numbers do not agree, or for
    boxes that are outside of their images."""
    objects, text = rendered.objects, rendered.text
    assert objects is not None
    what = f"column {objects.column!r}"
    counts = len(objects.references), len(objects.boxes)
    for mark, count in zip(OBJECT_MARKS, counts, strict=True):
        if text.count(mark) != count:
            shown = f"the text of the conversation shows {mark} {text.count(mark)} times"
            raise RowError(f"{what} has {count} for {mark}, and {shown}")
    references, boxes = iter(objects.references), zip(objects.boxes, objects.images, strict=True)
    edits, list_end = list[tuple[int, int, str]](), -1
    for match in re.finditer("|".join(OBJECT_MARKS), text):
        before = text[max(0, match.start() - 100) : match.start()]
        if match[0] == OBJECT_MARKS[0]:
            reference, form = next(references), "{ref}"
            if before.endswith('"'):
                reference = json.dumps(reference, ensure_ascii=False)[1:-1]
            elif not before.endswith("'"):
                form = texts[0]
            edits.append((*match.span(), form.format(ref=reference)))
            continue
        values, number = next(boxes)
        if not 0 <= number < len(images):
            raise RowError(
                f"{what}: image_id {number} is no image of the row, which has {len(images)}"
            )
        image = images[number]
        group, sides = _Group("bbox", match.start(), [], values), _sides(image, objects.unit)
        source = "norm1" if objects.unit == "fractions" else "real"
        _check(group, sides, image, f"bbox_type: {source} in {what}")
        made = _scaled(values, sides, image, own)
        pairs = ",".join(f"({x},{y})" for x, y in zip(made[::2], made[1::2], strict=True))
        in_list = list_end >= 0 and re.fullmatch(r"[\s,\[\]]*", text[list_end : match.start()])
        in_json = in_list or re.search(r"""["']\s*:[\s\[]*$""", before)
        list_end = match.end() if in_json else -1
        form = "{list}" if in_json else texts[1]
        edits.append((*match.span(), form.format(list=made, pairs=pairs)))
    return rendered.with_edits(edits)


def joined(found: Iterable[Located | None]) -> Located | None:
    """Of the answers of a row, which count as one."""
    known = [each for each in found if each is not None]
    if not known:
        return None
    read = [each for each in known if each.coordinate_rows] or known
    fields = {form: min(getattr(each, form) for each in read) for form in FORMS}
    unread = max(each.unread_coordinates for each in known)
    return read[0]._replace(unread_coordinates=unread, **fields)


def total(found: Iterable[Located]) -> Located:
    """Of all rows."""
    return Located(*map(sum, zip(Located(), *found, strict=True)))


_MEANING = {
    "pixels_of_file": "pixels of the image files",
    "pixels_of_model": "pixels of the size that the model sees",
    "thousandths": "thousandths of the width and height",
    "fractions": "parts of the width and height from 0 to 1",
}


def note(found: Located, unit: Unit | None, own: Unit | None) -> list[str]:
    """Lines about the coordinates in the texts of rows. unit: images.coordinates; own: what the model was
    trained with; None: not known."""
    rows, unread = found.coordinate_rows, found.unread_coordinates
    known = "pixels_of_model" if own == "pixels" else own
    trained = "not known" if known is None else _MEANING[known]
    lines = []
    if unread:
        lines.append(
            f"note: {_rows(unread)} coordinates in a form that is not read, which stay as "
            "they are (docs/images.md#coordinates)"
        )
    if unit is not None and rows:
        source = _MEANING["pixels_of_file" if unit == "pixels" else unit]
        target = "as this model was trained" if unit == known else f"which became {trained}"
        lines.append(f"{_rows(rows)} coordinates, {source} (images.coordinates: {unit}), {target}")
    elif unit is not None and not unread:
        lines.append("note: images.coordinates: no row holds coordinates in a form that is read")
    elif rows:
        counts = {form: getattr(found, form) for form in FORMS}
        each = [f"{_MEANING[form]} in {count:,}" for form, count in counts.items() if count]
        text = f"note: {_rows(rows)} coordinates, which stay as they are. "
        if found.image_scales:
            scale = found.image_scales / rows / 1000
            text += f"The model sees their images at {scale:.2f} times their width. "
        text += (
            f"By their size the numbers could be {' and '.join(each) or 'none of what is known'}. "
        )
        text += f"What this model was trained with: {trained}"
        if known is not None and counts[known] < max(1, *counts.values()):
            text += "; images.coordinates says what they are, and converts them"
        elif known is not None and [*counts.values()].count(rows) > 1:
            text += "; if they are others, images.coordinates says so, and converts them"
        lines.append(text)
    return lines


def _rows(count: int) -> str:
    return "1 row holds" if count == 1 else f"{count:,} rows hold"


def _groups_of(rendered: Rendered) -> tuple[list[_Group], bool]:
    """The coordinates in a text, in their order; and whether it has others that are not read."""
    text = rendered.text
    others = (match[0] for match in _OTHERS.finditer(text))
    unread = any(other != "<bbox>" or rendered.objects is None for other in others)
    groups = list[_Group]()
    for form, start, end in _places(text):
        group = _read(text, form, start, end)
        if group is not None:
            groups.append(group)
        elif re.search(r"(?<![\w.])[-+]?\.?\d", text[start:end]):  # else such as [x1, y1, x2, y2]
            unread = True
    return sorted(groups, key=lambda group: group.start), unread


def _places(text: str) -> Iterator[tuple[str, int, int]]:
    """The forms in a text, and where the numbers of each begin and end."""
    for match in _KEY.finditer(text):
        yield match[1], match.end(), _end_of_list(text, match.end())
    for match in _MARKS.finditer(text):
        number = match.lastindex
        assert number is not None
        yield match[number - 1], match.start(number), match.end(number)


def _end_of_list(text: str, start: int) -> int:
    """Where the list ends that begins here; of another value, about where its object or line does."""
    run = _RUN.match(text, start)
    assert run is not None
    depth = 0
    for index in range(start, run.end()):
        depth += (text[index] in "[(") - (text[index] in "])")
        if depth <= 0 and text[index] in "])":
            return index + (depth == 0)
    end, depth = start, 0
    for end in range(start, min(len(text), start + _LONGEST_VALUE)):
        depth += (text[end] in "{") - (text[end] in "}")
        if depth <= 0 and text[end] in "}\n,<":
            break
    return end


def _read(text: str, form: str, start: int, end: int) -> _Group | None:
    """The numbers there; None: there are none, something else is between them, or too few or too many."""
    spans, at = list[tuple[int, int]](), start
    while True:
        between = _BETWEEN.match(text, at, end)
        assert between is not None
        if between.end() == end:
            break
        number = _NUMBER.match(text, between.end(), end)
        if number is None or (spans and between.end() == spans[-1][1]):
            return None
        spans.append(number.span())
        at = number.end()
    if not spans or len(spans) % _VALUES[form]:
        return None
    return _Group(form, start, spans, [float(text[a:b]) for a, b in spans])


def _images_of(
    group: _Group, rendered: Rendered, images: Sequence[SizedImage], videos: Sequence[int]
) -> list[SizedImage | None]:
    """The images of different sizes that coordinates may belong to; None stands for a video.

    A part of the conversation is a prompt with the answer to it that has loss. Of its images all are
    possible, because a question may stand before its image. Without one the images of the part before
    count, and at the beginning those of the first part that has some.
    """
    ends = sorted(turn.end for turn in rendered.turns)

    def part(offset: int) -> int:
        return sum(end <= offset for end in ends)

    shown: list[tuple[int, SizedImage | None]] = [(part(image.start), image) for image in images]
    shown += [(part(start), None) for start in videos]
    own, parts = part(group.start), [number for number, _ in shown]
    before = [number for number in parts if number <= own]
    chosen = max(before) if before else min(parts)
    possible = [image for number, image in shown if number == chosen]
    return [*{image and (image.file, image.seen): image for image in possible}.values()]


def _outside(values: Sequence[float], sides: Size) -> float | None:
    """The first value that is outside of an image with these sides."""
    for index, value in enumerate(values):
        side = sides[index % 2]
        slack = max(_SLACK * side, 2) if side > 1 else _SLACK
        if not -slack <= value <= side + slack:
            return value
    return None


def _are_fractions(values: Sequence[float]) -> bool:
    return max(values) <= 1 and any(not value.is_integer() for value in values)


def _sides(image: SizedImage, unit: Unit) -> Size:
    """The numbers of the right and lower edge of an image."""
    return {"pixels": image.file, "thousandths": (1000, 1000), "fractions": (1, 1)}[unit]


def _scaled(values: Sequence[float], sides: Size, image: SizedImage, own: Unit) -> list[int]:
    """The numbers as the model was trained with them, within the image."""
    seen = image.seen or image.file
    whole = (1000, 1000) if own == "thousandths" else seen
    most = whole if own == "thousandths" else (seen[0] - 1, seen[1] - 1)
    made = [round(value * whole[at % 2] / sides[at % 2]) for at, value in enumerate(values)]
    return [min(max(number, 0), most[at % 2]) for at, number in enumerate(made)]


def _check(group: _Group, sides: Size, image: SizedImage, said: str) -> None:
    """Raises RowError if the numbers cannot be what is said of them."""
    size = f"its image of {image.file[0]} x {image.file[1]} pixels"
    value = _outside(group.values, sides)
    if value is not None:
        what = f"{value:g} is outside of {size}"
        if sides != image.file:
            what = f"{value:g} is not from 0 to {sides[0]:,}"
    elif sides != (1, 1) and _are_fractions(group.values):
        what = "its numbers are parts of the width and height from 0 to 1"
    else:
        return
    raise RowError(
        f"{group.form}: {what}, with {said}; correct the row, or say what the numbers are instead"
    )
