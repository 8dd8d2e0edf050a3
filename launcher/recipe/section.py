"""The base class of a recipe's sections, and the types of their keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, dataclass_transform

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, StrictInt


def form(pattern: str, message: str) -> AfterValidator:
    """Of a text: refuses what does not match the pattern as a whole, with this message."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text, re.DOTALL) is None:
            raise ValueError(message)
        return text

    return AfterValidator(check)


# Nothing is converted but a whole number to a float: 3 is not true, "4" is not 4
StrictFloat = Annotated[float, Strict(), Field(allow_inf_nan=False)]
PositiveInt = Annotated[StrictInt, Field(ge=1)]
NonNegativeInt = Annotated[StrictInt, Field(ge=0)]
PositiveFloat = Annotated[StrictFloat, Field(gt=0)]
NonNegativeFloat = Annotated[StrictFloat, Field(ge=0)]
Fraction = Annotated[StrictFloat, Field(ge=0, lt=1)]
Share = Annotated[StrictFloat, Field(ge=0, le=1)]
Text = Annotated[str, form(r".*\S.*", "must not be empty")]
Name = Annotated[
    str,
    form(r"[A-Za-z_][\w-]*", "a name has letters, digits, _ and - (it is part of metrics)"),
]
Folder = Annotated[
    str,
    form(r"(?!~).*\S.*", "must be a folder; for ~ write the whole path, or ${oc.env:HOME}"),
]
FolderName = Annotated[
    str, form(r"(?!\.\.?$)(?=.*\S)[^/\\\n\t\0]+", "must be usable as a folder's name")
]
Size = Annotated[
    str,
    form(
        r"\d+(\.\d+)?\s*[KMGTkmgt][Ii]?[Bb]",
        "must be a size with a unit, such as 40GiB, or a number from 0 to 1",
    ),
]
Function = Annotated[
    str, form(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "must be `package.module:function`")
]
ListOfOne = BeforeValidator(
    lambda value: [value] if isinstance(value, str) else value,
    json_schema_input_type=str | tuple[str, ...],
)
"""A list that may be written as one value: `train: a.txt` is `train: [a.txt]`."""
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
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(I?)B", text.upper(), re.ASCII)
    if match is None or float(match[1]) <= 0:
        return None
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** ("KMGT".index(match[2]) + 1))
