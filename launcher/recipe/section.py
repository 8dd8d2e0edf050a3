"""The base class of a recipe's sections, and the types of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, Strict, StrictInt

# Nothing is converted but a whole number to a float: 3 is not true, "4" is not 4
StrictFloat = Annotated[float, Strict(), Field(allow_inf_nan=False)]
PositiveInt = Annotated[StrictInt, Field(ge=1)]
NonNegativeInt = Annotated[StrictInt, Field(ge=0)]
PositiveFloat = Annotated[StrictFloat, Field(gt=0)]
NonNegativeFloat = Annotated[StrictFloat, Field(ge=0)]
Fraction = Annotated[StrictFloat, Field(ge=0, lt=1)]
Text = Annotated[str, Field(pattern=r"\S")]
TextList = Annotated[
    tuple[Text, ...],
    Field(min_length=1),
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=Text | tuple[Text, ...],
    ),
]
"""A list that may be written as one value: `train: a.txt` is `train: [a.txt]`."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """Makes each subclass a frozen dataclass with keyword arguments only."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    __pydantic_config__ = ConfigDict(extra="forbid")

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
