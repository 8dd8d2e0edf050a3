"""A recipe of a few lines that is right, to be broken or changed by the tests."""

import pytest

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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to be in, with SMALL as x.yaml and the data it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(SMALL)
    (tmp_path / "data.txt").write_text("some text\n")
    return tmp_path
