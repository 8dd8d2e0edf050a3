"""The sources of a mixture of training data."""

from typing import Annotated, Any, Literal

from pydantic import Field

from launcher.recipe.layouts import DataKind
from launcher.recipe.section import PositiveFloat, PositiveInt, Section, Text, TextList


class Source(Section):
    """One part of a mixture. Its keys that are null have the values of the same keys of data."""

    files: TextList
    """Files, globs, folders, or a hub data set id."""
    weight: PositiveFloat | Literal["size"] = "size"
    """Share of the sequences: weight / sum of all weights. size, for all sources or for none: each
    epoch has each sequence once."""
    kind: DataKind | None = None
    """null: data.kind."""
    limit: PositiveInt | None = None
    """Rows that are used at most, the first ones; null: data.limit."""
    text_column: Text | None = None
    """null: data.text_column."""
    messages_column: Text | None = None
    """null: data.messages_column."""
    prompt_column: Text | None = None
    """null: data.prompt_column."""
    response_column: Text | None = None
    """null: data.response_column."""
    chosen_column: Text | None = None
    """null: data.chosen_column."""
    rejected_column: Text | None = None
    """null: data.rejected_column."""
    label_column: Text | None = None
    """null: data.label_column."""
    weights_column: Text | None = None
    """null: data.weights_column."""
    system_column: Text | None = None
    """null: data.system_column."""
    columns: Annotated[dict[Text, Text], Field(min_length=1)] | None = None
    """null: data.columns."""
    ignore_columns: TextList | None = None
    """null: data.ignore_columns."""
    prompt_format: Literal["auto", "chat", "text"] | None = None
    """null: data.prompt_format."""
    overlong: Literal["cut", "drop", "error"] | None = None
    """null: data.overlong."""

    def given(self) -> dict[str, Any]:
        """The keys that replace those of data."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        del given["files"], given["weight"]
        return given
