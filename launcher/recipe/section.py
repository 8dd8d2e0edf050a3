"""The base class of a recipe's sections, and the types of their keys."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StrictInt,
    WrapValidator,
)


def refuse_unless(accepts: Callable[[str], object], message: str) -> AfterValidator:
    """Refuses a text that a function does not accept."""

    def check(text: str) -> str:
        if not accepts(text):
            raise ValueError(message)
        return text

    return AfterValidator(check)


def form(pattern: str, message: str) -> AfterValidator:
    """Refuses a text that does not match the whole pattern."""
    return refuse_unless(re.compile(pattern, re.DOTALL).fullmatch, message)


def _fits_file_system(path: str) -> bool:
    whole = os.fsencode(path)
    return len(whole) <= 3000 and max(map(len, whole.split(b"/"))) <= 255


def _has_no_marks(path: str) -> bool:
    return not re.search("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]", path)


def size_in_bytes(text: str) -> int | None:
    """`80GiB` is 80 x 1024^3, `80GB` is 80 x 1000^3. None if it is not a size with a unit."""
    match = re.fullmatch(SIZE, text)
    if match is None:
        return None
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** ("KMGT".index(match[2].upper()) + 1)) or None


class AutoInt(int):
    """`auto`: a whole number that is chosen from the rows of the data (`planner/sizes.py`). Until then,
    and where the rows cannot be seen, its value counts."""


class AutoFloat(float):
    """The same for a number."""


def auto(value: int | float) -> WrapValidator:
    """Accepts `auto`, which stands for `value` until it is chosen."""
    kind = type(value)
    stands_for = AutoInt(value) if isinstance(value, int) else AutoFloat(value)

    def read(given: Any, check: Callable[[Any], Any]) -> Any:
        return stands_for if given == "auto" else check(given)

    return WrapValidator(read, json_schema_input_type=kind | Literal["auto"])


Dtype = Literal["bfloat16", "float16", "float32"]
_TENSORWISE = (
    "has one scale for a whole tensor, so that losses depend on how rows are divided over ranks; "
    "use rowwise or rowwise_with_gw_hp"
)


def _not_tensorwise(value: Any) -> Any:
    if value == "tensorwise":
        raise ValueError(_TENSORWISE)
    return value


Float8 = Annotated[
    Literal["rowwise", "rowwise_with_gw_hp"],
    BeforeValidator(
        _not_tensorwise, json_schema_input_type=Literal["rowwise", "rowwise_with_gw_hp"]
    ),
]
# The only conversion is from an integer to a float: 3 is not true, and "4" is not 4
StrictFloat = Annotated[float, Strict(), Field(allow_inf_nan=False)]
# Larger numbers overflow the integers and floats that they are computed with
LARGEST_INT, LARGEST_FLOAT = 2**31 - 1, 1e30
PositiveInt = Annotated[StrictInt, Field(ge=1, le=LARGEST_INT)]
NonNegativeInt = Annotated[StrictInt, Field(ge=0, le=LARGEST_INT)]
Seconds = Annotated[StrictInt, Field(ge=1, le=30 * 24 * 3600)]
"""A time: at most 30 days, which all timers can hold."""
Processes = Annotated[StrictInt, Field(ge=0, le=1024)]
PositiveFloat = Annotated[StrictFloat, Field(gt=0, le=LARGEST_FLOAT)]
NonNegativeFloat = Annotated[StrictFloat, Field(ge=0, le=LARGEST_FLOAT)]
Fraction = Annotated[StrictFloat, Field(ge=0, lt=1)]
Share = Annotated[StrictFloat, Field(ge=0, le=1)]
Text = Annotated[str, form(r".*\S.*", "must not be empty")]
Name = Annotated[str, form(r"[A-Za-z_][\w-]*", "must be a name of letters, digits, _ and -")]
Day = Annotated[
    str, form(r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", "must be YYYY-MM-DD")
]
_LENGTHS = "must be shorter: a name in a path may have 255 bytes, and a folder's path 3,000"
_ShortPath = refuse_unless(_fits_file_system, _LENGTHS)
_MARKS = "must not hold control characters or marks of text direction, which hide what a name is"
_PlainPath = refuse_unless(_has_no_marks, _MARKS)
_NotNone = refuse_unless(
    lambda path: path not in ("None", "none"),
    "is text, not the value null; a folder of that name is written ./None",
)
Folder = Annotated[
    str,
    form(r"(?!~).*\S.*", "must be a folder; instead of ~ write ${oc.env:HOME}"),
    _NotNone,
    _ShortPath,
    _PlainPath,
]
FolderName = Annotated[
    str,
    form(r"(?!(\.\.?|\?\?\?)$)(?=.*\S)[^/\\\x00-\x1f\x7f]+", "must be usable as a folder's name"),
    _NotNone,
    _ShortPath,
    _PlainPath,
]
SIZE = r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([KMGTkmgt])([Ii]?)[Bb]"
Size = Annotated[
    str, refuse_unless(size_in_bytes, "must be a size such as 40GiB, or a number from 0 to 1")
]
_BYTES = "must be a size such as 64MiB"


def _is_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(_BYTES)
    return value


ByteSize = Annotated[
    str, BeforeValidator(_is_text, json_schema_input_type=str), refuse_unless(size_in_bytes, _BYTES)
]
LABEL_SMOOTHING = "label_smoothing"
"""The value of objective.loss that is no function of the user's."""
_FUNCTION = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
Function = Annotated[str, form(_FUNCTION, "must be `package.module:function`")]
TargetLoss = Annotated[
    str,
    form(
        f"{LABEL_SMOOTHING}|{_FUNCTION}",
        f"must be {LABEL_SMOOTHING} or `package.module:function`",
    ),
]
Metric = Annotated[
    str,
    form(
        f"exact_match|f1|rouge_l|{_FUNCTION}",
        "must be exact_match, f1, rouge_l or `package.module:function`",
    ),
]
ListOfOne = BeforeValidator(
    lambda value: [value] if isinstance(value, str) else value,
    json_schema_input_type=str | tuple[str, ...],
)
"""Lets a list of one be written without brackets: `train: a.txt`."""
TextList = Annotated[tuple[Text, ...], Field(min_length=1), ListOfOne]
MaybeEmpty = Annotated[tuple[Text, ...], ListOfOne]
"""A TextList that may be empty."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """Makes each subclass a frozen dataclass with keyword arguments only."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    __pydantic_config__ = ConfigDict(extra="forbid")

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
