"""A small valid recipe that tests modify."""

import re

SMALL = """\
run:
  name: small
  max_steps: 10
model:
  config:
    model_type: llama
    vocab_size: 300
data:
  train: [data.txt]
  tokenizer: bytes
batch:
  global_batch_size: 64
  micro_batch_size: 8
"""


def says(expected, line):
    """Returns whether a message matches the expected text, in which `...` matches any text."""
    return (
        re.fullmatch(".*".join(re.escape(part) for part in expected.split("...")), line, re.DOTALL)
        is not None
    )
