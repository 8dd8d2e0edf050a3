"""The values of the columns of a row."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.data.tokenizer import Ids
from launcher.errors import RowError
from launcher.sources.layouts import KEYS
from launcher.sources.rows import Values

Weights = npt.NDArray[np.float32]
SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-20, 1e20
"""Of weights other than 0. A loss is divided by the sum of the weights in float32: beyond this
range, that sum or its inverse, times ranks and loss scale, could be 0 or infinite."""


def read_value(
    row: Values, column: str, kinds: type | tuple[type, ...], what: str, *, role: str
) -> Any:
    """The value of the column of a role. Raises RowError unless it is of these kinds, which `what`
    names."""
    value = row.get(column)
    if value is not None and isinstance(value, kinds):
        return value
    if value is None and column in row:
        raise RowError(f"column {column!r} is empty (null); it must hold {what}")
    if isinstance(value, bool | int | float):
        raise RowError(f"column {column!r} must hold {what}; got {value!r}: write it as text")
    key = f"data.{KEYS[role]}" if role in KEYS else "data.columns"
    got = f"got {described(value)}" if column in row else "no such column"
    key += " names another" if column in row else " names it"
    raise RowError(f"column {column!r} must hold {what}; {got}; columns: {', '.join(row)} ({key})")


def described(value: object) -> str:
    """The type of a value of a row, and the keys of an object."""
    if isinstance(value, dict):
        return f"an object with the keys {', '.join(map(str, value)) or '(none)'}"
    return type(value).__name__


def read_list(value: object, where: str) -> list[object] | None:
    """A list, or a list as JSON; None or an empty text: there is none. Raises RowError."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{where} is not JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, list):
        raise RowError(f"{where} must hold a list; got {type(value).__name__}")
    return value


def read_text(value: object, column: str) -> str:
    """The text of an optional column, which may be null. Raises RowError."""
    if not isinstance(value, str | None):
        raise RowError(f"column {column!r} must hold text; got {type(value).__name__}")
    return value or ""


HALF_PAIR = "holds half a surrogate pair (\\ud800 to \\udfff), which is no character"


def encodable(text: str, where: str) -> str:
    """The text. Raises RowError if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(f"{where} {HALF_PAIR}") from None
    return text


def read_integers(row: Values, column: str) -> Ids:
    """A list of whole numbers. Raises RowError."""
    values = row.get(column)
    if values is None:
        raise RowError(f"no column {column!r}; columns: {', '.join(row)}")
    wrong = RowError(f"{column} must be a list of whole numbers")
    if isinstance(values, np.ndarray):  # of a .parquet file
        if values.dtype == np.int32:
            return values
        if values.dtype.kind not in "iu":
            raise wrong
        limits = np.iinfo(np.int32)
        if values.size and (values.max() > limits.max or values.min() < limits.min):
            raise RowError(f"{column} has an id beyond 32 bits")
        return values.astype(np.int32)
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise wrong
    try:
        return np.array(values, dtype=np.int32)
    except OverflowError:
        raise RowError(f"{column} has an id beyond 32 bits") from None


def read_margin(row: Values, column: str | None) -> float | None:
    """The number in a column; None without a column. Raises RowError."""
    if column is None:
        return None
    value: Any = row.get(column)
    if type(value) in (int, float) and abs(value) < 1e30:
        return float(value)
    got = f"got {value!r}" if column in row else "no such column"
    raise RowError(f"column {column!r} must hold a number; {got} (data.margin_column names it)")


_MARKS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_MARKS |= {"-1": False, "-1.0": False}


def read_mark(row: Values, column: str) -> bool:
    """Whether an answer is a good one. Raises RowError."""
    value = row.get(column)
    mark = _MARKS.get(str(value).strip().lower())
    if mark is None:
        what = "must say whether the answer is good: true or false, or 1 or 0"
        raise RowError(f"column {column!r} {what}; got {value!r}")
    return mark


def read_weights(row: Values, column: str, tokens: int | None = None) -> Weights:
    """A number, or a list with one number for each of `tokens` tokens: (1,) or (tokens,). Raises
    RowError."""
    value = row.get(column)
    if isinstance(value, np.ndarray):  # of a .parquet file
        value = value.tolist()
    values = value if isinstance(value, list) and tokens is not None else [value]
    if any(type(number) not in (int, float) for number in values):
        form = "a number" + (", or a list with one for each token" if tokens is not None else "")
        got = f"got {type(value).__name__}" if column in row else "no such column"
        raise RowError(f"column {column!r} must hold {form}; {got} (data.weights_column names it)")
    if values is value and len(values) != tokens:
        raise RowError(
            f"{tokens} input_ids, but {len(values)} {column}; there must be one for each"
        )
    try:
        numbers = np.array(values, dtype=np.float64)
    except OverflowError:
        numbers = np.full(len(values), np.inf)
    sound = (numbers == 0) | ((numbers >= SMALLEST_WEIGHT) & (numbers <= LARGEST_WEIGHT))
    if not sound.all():
        wrong = values[int(np.argmin(sound))]
        limits = f"0, or from {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}"
        raise RowError(f"column {column!r}: a weight must be {limits}; got {wrong}")
    weights = numbers.astype(np.float32)
    if not weights.any():
        raise RowError(f"column {column!r}: all weights are 0; remove the row")
    return weights
