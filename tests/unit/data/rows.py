"""Helpers that write files of rows and read token stores."""

import itertools
import json

import pyarrow
import pyarrow.parquet


def write(file, content, **options):
    """Writes text or bytes unchanged, and a list as the rows of a .jsonl, .json or .parquet file.

    A string in the list becomes a row with the column `text`.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str | bytes):
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file
    rows = [{"text": row} if isinstance(row, str) else row for row in content]
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, **options)
    return file


def documents_of(store):
    return [store.ids[start:end].tolist() for start, end in itertools.pairwise(store.offsets)]


def texts_of(store):
    return [bytes(ids[:-1]).decode() for ids in documents_of(store)]


def store_names(cache):
    """Names of the stores in the cache, including incomplete ones."""
    return sorted({path.name for path in cache.iterdir()} - {"locks"})
