"""Coordinates in the texts of rows with images, such as boxes, in the numbers that a model was trained
with.

A model sees most images in another size than that of their files. Qwen2.5-VL was trained with pixels of
the size that it sees, and others with thousandths of the width and height, so the numbers of a row may
mean something else to the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

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


def located(rendered: Rendered, images: Sequence[SizedImage], own: Unit | None) -> Located | None:
    """What the coordinates in a text could be; None: it has none, or they mean the same for the model
    because their images keep their sizes. own: what the model was trained with; None: not known."""
    groups, unread = _groups_of(rendered.text)
    scaled = [image for image in images if image.file != image.seen]
    if not images or not (groups or unread) or (own != "thousandths" and not scaled):
        return None
    if not groups:
        return Located(unread_coordinates=1)
    fitting = dict.fromkeys(FORMS, 1)
    for group in groups:
        image = _image_of(group, rendered, images)
        sides = {"thousandths": (1000, 1000), "fractions": (1, 1)}
        if image is not None:
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


def converted(rendered: Rendered, images: Sequence[SizedImage], unit: Unit, own: Unit) -> Rendered:
    """The conversation with its coordinates, which are in `unit`, as the model was trained with them.
    Numbers are whole ones, as Qwen's and InternVL's scripts of training data make them, within the
    image. The rest of the text stays as it is.

    A box belongs to the image in its own part of the conversation (a prompt, and the answer to it), or
    in the one before. Raises RowError if several images of different sizes are there, and for numbers
    that cannot be what `unit` says.
    """
    groups, unread = _groups_of(rendered.text)
    if not images or not (groups or unread):
        return rendered
    edits = list[tuple[int, int, str]]()
    for group in groups:
        image = _image_of(group, rendered, images)
        if image is None:
            sizes = [f"{one.file[0]} x {one.file[1]}" for one in images]
            raise RowError(
                f"{group.form} after several images of different sizes ({', '.join(sizes)} pixels) could "
                "belong to each of them; show one image in a message, or write the numbers that the "
                "model knows into all rows and set images.coordinates=null"
            )
        sides = {"pixels": image.file, "thousandths": (1000, 1000), "fractions": (1, 1)}[unit]
        _check(group, sides, image, unit)
        if unit == own == "thousandths":
            continue
        seen = image.seen or image.file
        most = (1000, 1000) if own == "thousandths" else (seen[0] - 1, seen[1] - 1)
        whole = (1000, 1000) if own == "thousandths" else seen
        for index, (span, value) in enumerate(zip(group.spans, group.values, strict=True)):
            axis = index % 2
            made = round(value * whole[axis] / sides[axis])
            edits.append((*span, str(min(max(made, 0), most[axis]))))
    found = Located(int(bool(groups)), int(unread))
    return replace(rendered.with_edits(edits), coordinates=found)


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


def _groups_of(text: str) -> tuple[list[_Group], bool]:
    """The coordinates in a text, in their order; and whether it has others that are not read."""
    groups, unread = list[_Group](), _OTHERS.search(text) is not None
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
    """Where the list ends that begins here; of another value, where its line or object does."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in "[({") - (text[index] in "])}")
        if depth <= 0 and text[index] in "])}\n,<":
            return index + (depth == 0 and text[index] in "])}")
    return len(text)


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


def _image_of(group: _Group, rendered: Rendered, images: Sequence[SizedImage]) -> SizedImage | None:
    """The image that coordinates belong to; None: it could be one of several of different sizes.

    A part of the conversation is a prompt with the answer to it that has loss. Of its images all are
    possible, because a question may stand before its image. Without one the images of the part before
    count, and at the beginning those of the first part that has some.
    """
    ends = sorted(turn.end for turn in rendered.turns)

    def part(offset: int) -> int:
        return sum(end <= offset for end in ends)

    parts = [part(image.start) for image in images]
    own = part(group.start)
    before = [number for number in parts if number <= own]
    chosen = max(before) if before else min(parts)
    possible = [image for image, number in zip(images, parts, strict=True) if number == chosen]
    same = {(image.file, image.seen) for image in possible}
    return possible[0] if len(same) == 1 else None


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


def _check(group: _Group, sides: Size, image: SizedImage, unit: Unit) -> None:
    """Raises RowError if the numbers cannot be what the recipe says."""
    size = f"its image of {image.file[0]} x {image.file[1]} pixels"
    value = _outside(group.values, sides)
    if value is not None:
        what = f"{value:g} is outside of {size}"
        if unit != "pixels":
            what = f"{value:g} is not from 0 to {sides[0]:,}"
    elif unit != "fractions" and _are_fractions(group.values):
        what = "its numbers are parts of the width and height from 0 to 1"
    else:
        return
    raise RowError(
        f"{group.form}: {what}, with images.coordinates: {unit}; correct the row, or say what the numbers "
        "are: pixels of the file, thousandths or fractions"
    )
