"""A recipe of a few lines that is right, to be broken or changed by the tests."""

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
    """Whether a message is what is expected, `...` standing for anything."""
    return (
        re.fullmatch(".*".join(re.escape(part) for part in expected.split("...")), line, re.DOTALL)
        is not None
    )
