"""Writes documents of token ids with other tools: a program that test_token_files.py runs.

    python token_writers.py REQUEST.json

The request has the folder of the packages, the tool, the folder to write to, and the documents. Prints JSON.
"""

import json
import sys
import warnings
from pathlib import Path
from unittest.mock import MagicMock

request = json.loads(Path(sys.argv[1]).read_text())
sys.path.insert(0, request["packages"])
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

OF_CLOUDS = (
    *("boto3", "botocore", "botocore.config", "botocore.credentials", "botocore.exceptions"),
    *("botocore.utils", "google", "google.api_core", "google.api_core.exceptions", "google.auth"),
    *("google.api_core.retry", "google.auth.exceptions", "google.cloud", "google.cloud.storage"),
    *("cached_path", "cached_path.schemes", "bettermap"),
)
"""Modules for object stores and others, which are imported and not needed."""


def megatron(out, documents, *, dtype, parts=1, multimodal=False):
    """parts: sequences of each document."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    prefix = str(out / "corpus_text_document")
    builder = IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=getattr(np, dtype), multimodal=multimodal
    )
    for ids in documents:
        pieces = np.array_split(np.array(ids), parts)
        tensor, lengths = torch.tensor(ids), [len(piece) for piece in pieces]
        builder.add_document(tensor, lengths, modes=[0] * parts if multimodal else None)
    builder.finalize(f"{prefix}.idx")
    read = IndexedDataset(prefix, multimodal=multimodal)
    return {"read": [] if multimodal else [read[number].tolist() for number in range(len(read))]}


def datatrove(out, documents, *, token_size, masks=None, save_index=True):
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    file = TokenizedFile(
        str(out),
        "00000_unshuffled.ds",
        save_index=save_index,
        save_loss_metadata=masks is not None,
        tokenizer_name_or_path="gpt2",
        save_final_metadata=True,
        token_size=token_size,
    )
    for number, ids in enumerate(documents):
        file.write(ids, None if masks is None else np.array(masks[number], dtype=bool))
    file.close()
    return {}


def datatrove_megatron(out, documents, *, token_size):
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile

    file = MegatronTokenizedFile(str(out), "00000_tokens", token_size=token_size)
    for ids in documents:
        file.write(ids)
    file.close()
    return {}


def _document(index):
    yield torch.tensor(
        request["documents"][index], dtype=getattr(torch, request["settings"]["dtype"])
    )


def litdata(out, documents, *, dtype, compression=None):
    import litdata as tool
    from litdata.streaming.item_loader import TokensLoader

    tool.optimize(
        fn=_document,
        inputs=list(range(len(documents))),
        output_dir=str(out / "optimized"),
        chunk_bytes=200,
        num_workers=1,
        compression=compression,
        compression_level=compression and "chunk",
        item_loader=TokensLoader(block_size=4),
        start_method="fork",
    )
    read = tool.StreamingDataset(str(out / "optimized"), item_loader=TokensLoader(block_size=4))
    return {"read": [] if compression else [read[number].tolist() for number in range(len(read))]}


def olmo(out, documents, *, dtype, eos=None):
    from olmo_core.data.utils import (
        iter_document_indices,
        write_array_to_disk,
        write_document_indices,
    )

    file, dtype = out / "part-0-00000.npy", getattr(np, dtype)
    write_array_to_disk(np.array([id for ids in documents for id in ids], dtype=dtype), file)
    if eos is None:
        return {}
    write_document_indices(file, dtype=dtype, eos_token_id=eos)
    found = iter_document_indices(file, use_array_if_local=False, local_cache=out)
    return {"read": [[int(start), int(end)] for start, end in found]}


if __name__ == "__main__":
    for name in OF_CLOUDS:
        sys.modules.setdefault(name, MagicMock())
    tools = (megatron, datatrove, datatrove_megatron, litdata, olmo)
    tool = {each.__name__: each for each in tools}[request["tool"]]
    folder = Path(request["out"])
    made = tool(folder, request["documents"], **request["settings"])
    print(json.dumps(made))
