"""Measures what a rank needs to open the data: CPU time, and private memory at the peak and held.

    python benchmarks/data_index.py --kind text --documents 5000000
    python benchmarks/data_index.py --kind tokens --documents 1000000 --split 0.02

The store is made first, with documents of random lengths and empty files of tokens. Each opening is a
process of its own, and reads 200 samples: the first may build what the next ones find. Private
memory is RssAnon, without the pages of mapped files, which all processes of a machine share; what
the process has before it opens the data is not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LENGTH, MEAN = 8192, 1000


def private() -> int:
    """Bytes of private memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def make_store(folder: Path, documents: int) -> None:
    """A token store without tokens: its largest files are holes."""
    from launcher.data.store_files import ORIGIN

    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(MEAN) - 0.5, 1, documents), 2, None).astype(np.int64)
    offsets = np.append(0, np.cumsum(lengths))
    folder.mkdir(parents=True)
    np.save(folder / "offsets.npy", offsets)
    hashes = random.integers(0, 2**64, documents, dtype=np.uint64)
    hashes.tofile(folder / "hashes.bin")
    sizes = {"ids.bin": 4 * int(offsets[-1]), "origins.bin": documents * ORIGIN.itemsize}
    for name, size in sizes.items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
    sizes["hashes.bin"] = hashes.nbytes
    meta = {"documents": documents, "tokens": int(offsets[-1]), "content": "", "sizes": sizes}
    meta |= {"skipped": [], "unused": [], "largest_id": 0, "prompt_form": None}
    meta |= dict.fromkeys(("empty", "cut_documents", "cut_tokens"), 0)
    (folder / "meta.json").write_text(json.dumps(meta))


def open_store(folder: Path, kind: Any, split: float | None) -> None:
    """Opens the data as a rank does, and prints what it took."""
    from launcher.data import opening
    from launcher.data.encoder import make_encoder
    from launcher.data.token_store import ModelTraits, _load
    from launcher.objectives.next_token import NextToken
    from launcher.recipe import schema

    data = schema.Data(
        train=("x",),
        tokenizer="bytes",
        kind=kind,
        sequence_length=LENGTH,
        packing=True,
        validation_split=split,
    )
    before, peak, done = private(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, private())

    threading.Thread(target=watch, daemon=True).start()
    started, cpu = time.monotonic(), time.process_time()
    store = _load(folder, [], make_encoder(kind, data, tokenizer="bytes"))
    make = partial(
        opening.make_dataset,
        store,
        data,
        objective=NextToken(),
        tokenizer="bytes",
        model=ModelTraits(),
        build=True,
    )
    opened = [make()]
    if split is not None:
        opened.append(make(held_out=True))
    lengths = [dataset.lengths or () for dataset in opened]
    cpu, seconds = time.process_time() - cpu, time.monotonic() - started
    held = private() - before
    for dataset in opened:
        for index in range(0, len(dataset), -(-len(dataset) // 200)):
            dataset[index]
    done.set()
    found = {"sequences": [*map(len, lengths)], "cpu_s": round(cpu, 1), "wall_s": round(seconds, 1)}
    found |= {"peak_mb": round((peak - before) / 1e6), "held_mb": round(held / 1e6, 1)}
    print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=["text", "tokens"], default="text")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--split", type=float, help="data.validation_split")
    parser.add_argument("--times", type=int, default=2, help="openings, one after another")
    parser.add_argument("--folder", type=Path, help="a store that exists; for each opening")
    options = parser.parse_args()
    if options.folder is not None:
        open_store(options.folder, options.kind, options.split)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        make_store(store, options.documents)
        for _ in range(options.times):
            subprocess.run([sys.executable, *sys.argv, "--folder", str(store)], check=True)


if __name__ == "__main__":
    main()
