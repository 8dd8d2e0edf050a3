"""Reads the files that wandb writes in offline mode."""

import json


def read_records(folder):
    """Yields (kind, message) for each record of the transaction logs below a folder, in order.

    The format is LevelDB's log: a header of 7 bytes, then blocks of 32 KiB. A block consists of
    chunks with a checksum, a length and a type (1 whole, 2 first, 3 middle, 4 last).
    """
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.glob("offline-run-*/*.wandb")):
        content, at, data = file.read_bytes(), 7, b""
        while at + 7 <= len(content):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
            data += content[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                data = b""
                name = record.WhichOneof("record_type")
                yield name, getattr(record, name)


def history(folder):
    """Yields each logged row as a dict."""
    for kind, message in read_records(folder):
        if kind == "history":
            yield {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in message.item
            }
