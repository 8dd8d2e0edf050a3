"""Exports of vectors and rerankers, read by sentence-transformers. `make test-readers` installs it."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from launcher.reliability.json_files import read_jsonl
from tests.distributed.launching import run
from tests.readers.test_readers import READERS
from tests.run_files import write_lines

PACKAGES = READERS / "sentence_transformers"
WORDS = [a + b for a in "bdfgkl" for b in "aeiou"]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LLAMA = (
    "{model_type: llama, vocab_size: 300, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 256, pad_token_id: 256}"
)
BERT = (
    "{model_type: bert, vocab_size: 40, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, max_position_embeddings: 128, pad_token_id: 0}"
)
RECIPE = """
run: {name: texts, max_steps: 3}
data: {train: rows.jsonl, validation: rows.jsonl, tokenizer: bytes, sequence_length: 96, workers: 0, cache: cache}
batch: {global_batch_size: 8, micro_batch_size: 4}
strategy: {kind: ddp, mixed_precision: null}
optimizer: {learning_rate: 3.0e-3}
schedule: {warmup_steps: 0}
evaluation: {every_steps: null}
checkpoint: {every_steps: null, export: at_end}
"""
LAST = "embedding.pooling=last"
PROMPTS = ("data.query_prompt='find: '", "data.document_prompt='text: '")
CASES = {
    "decoder": ("vectors", [f"model.config={LLAMA}", "model.task=embedding", *PROMPTS]),
    "both ways, mean": (
        "vectors",
        [f"model.config={LLAMA}", "model.task=embedding", "model.bidirectional=true"],
    ),
    "encoder": (
        "vectors",
        [f"model.config={BERT}", "model.task=embedding", "data.tokenizer=tokenizer", LAST],
    ),
    "encoder, first": (
        "vectors",
        [
            f"model.config={BERT}",
            *("model.task=embedding", "data.tokenizer=tokenizer", "embedding.pooling=first"),
        ],
    ),
    "cross-encoder": (
        "scores",
        [f"model.config={BERT}", "model.task=reranker", "data.tokenizer=tokenizer"],
    ),
    "decoder as a classifier": ("scores", [f"model.config={LLAMA}", "model.task=reranker"]),
    "answers": (
        "scores",
        [
            f"model.config={LLAMA}",
            "data.kind=reranking",
            "reranker={positive_answer: a, negative_answer: b}",
        ],
    ),
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs `make test-readers`"),
]


def rows():
    generator = random.Random(5)
    found = []
    for number in range(24):
        topic = generator.sample(WORDS, 3)
        others = [" ".join(generator.choices(WORDS, k=4)) for _ in range(number % 3)]
        text = " ".join([*topic, *generator.choices(WORDS, k=number % 5)])
        found.append({"query": " ".join(topic), "positive": text, "negatives": others})
    return found


def write_tokenizer(folder: Path) -> None:
    """Words as tokens, in BERT's forms of one text and of two."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)


def train(folder, name, *words):
    launcher = [sys.executable, "-m", "launcher", "train", "recipe=x.yaml", "gpus=1"]
    run([*launcher, f"run.dir={name}", "run.device=cpu", *words], cwd=folder).check()
    return read_jsonl(folder / name / "metrics.jsonl")[-1]


def read(folder, export, kind):
    options = {"temperature": 0.05} if kind == "vectors" else {}
    request = {"packages": str(PACKAGES), "folder": str(export), "kind": kind, "options": options}
    file = folder / "request.json"
    file.write_text(json.dumps({**request, "rows": rows()}))
    script = Path(__file__).with_name("sentence_vectors.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_lines(folder / "rows.jsonl", rows())
    write_tokenizer(folder / "tokenizer")
    (folder / "x.yaml").write_text(RECIPE)
    return folder


def assert_equal(read_values, evaluated):
    assert {name: evaluated[name] for name in read_values} == pytest.approx(read_values, rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_exports_compute_the_same(folder, name, figures):
    kind, words = CASES[name]
    run_name = name.replace(" ", "_").replace(",", "")
    evaluated = train(folder, run_name, *words)
    found = read(folder, folder / run_name / "hf", kind)
    assert_equal(found, evaluated)
    figures("sentence-transformers", name, "all weights", f"loss {found['eval_loss']:.6f}")


def test_adapters_compute_the_same(folder, figures):
    words = ["model.task=embedding", *PROMPTS]
    train(folder, "base", f"model.config={LLAMA}", *words)
    base = [f"model.path={folder}/base/hf", "data.tokenizer=null", "lora={rank: 2}"]
    evaluated = train(folder, "adapter", *base, *words, "optimizer.learning_rate=0.03")
    assert_equal(read(folder, folder / "adapter/hf", "vectors"), evaluated)
    command = [sys.executable, "-m", "launcher", "export", "adapter", "out=merged", "--merged"]
    run(command, cwd=folder).check()
    found = read(folder, folder / "merged", "vectors")
    assert_equal(found, evaluated)
    figures("sentence-transformers", "decoder", "adapter; merged", f"loss {found['eval_loss']:.6f}")
