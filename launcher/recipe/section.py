"""The base class of a recipe's sections, and the types of their keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, StrictInt


def form(pattern: str, message: str) -> AfterValidator:
    """Refuses a text that does not match the whole pattern."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text, re.DOTALL) is None:
            raise ValueError(message)
        return text

    return AfterValidator(check)


Dtype = Literal["bfloat16", "float16", "float32"]
# The only conversion is that of an integer to a float: 3 is not true, and "4" is not 4
StrictFloat = Annotated[float, Strict(), Field(allow_inf_nan=False)]
PositiveInt = Annotated[StrictInt, Field(ge=1)]
NonNegativeInt = Annotated[StrictInt, Field(ge=0)]
PositiveFloat = Annotated[StrictFloat, Field(gt=0)]
NonNegativeFloat = Annotated[StrictFloat, Field(ge=0)]
Fraction = Annotated[StrictFloat, Field(ge=0, lt=1)]
Share = Annotated[StrictFloat, Field(ge=0, le=1)]
Text = Annotated[str, form(r".*\S.*", "must not be empty")]
Name = Annotated[str, form(r"[A-Za-z_][\w-]*", "must be a name of letters, digits, _ and -")]
Day = Annotated[str, form(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", "must be YYYY-MM-DD")]
Folder = Annotated[str, form(r"(?!~).*\S.*", "must be a folder; instead of ~ write ${oc.env:HOME}")]
FolderName = Annotated[
    str, form(r"(?!\.\.?$)(?=.*\S)[^/\\\n\t\0]+", "must be usable as a folder's name")
]
SIZE = r"(\d+(?:\.\d+)?)\s*([KMGTkmgt])([Ii]?)[Bb]"
Size = Annotated[str, form(SIZE, "must be a size such as 40GiB, or a number from 0 to 1")]
_FUNCTION = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
Function = Annotated[str, form(_FUNCTION, "must be `package.module:function`")]
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


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """Makes each subclass a frozen dataclass with keyword arguments only."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    __pydantic_config__ = ConfigDict(extra="forbid")

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


def size_in_bytes(text: str) -> int | None:
    """`80GiB` is 80 x 1024^3, `80GB` is 80 x 1000^3. None: not a size with a unit."""
    match = re.fullmatch(SIZE, text, re.ASCII)
    if match is None or float(match[1]) <= 0:
        return None
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** ("KMGT".index(match[2].upper()) + 1))
