"""Rows of queries and documents: the layouts of published sets and tools, prompts, limits, errors."""

import json
import math

import numpy as np
import pytest

from launcher.data.encoder import make_encoder
from launcher.data.retrieval_rows import NEGATIVE, POSITIVE, QUERY
from launcher.recipe.schema import Data
from launcher.sources.rows import Row, SourcePart

TITLE = {"title": "Moon", "text": "It shines."}


def user(text):
    return [{"role": "user", "content": text}]


LAYOUTS = {
    "sentence-transformers, triplets": {"anchor": "q", "positive": "p", "negative": "n"},
    "sentence-transformers, numbered": {"query": "q", "positive": "p", "negative_2": "m", "negative_1": "n"},
    "question and answer": {"question": "q", "answer": "p"},
    "FlagEmbedding": {"query": "q", "pos": ["p"], "neg": ["n", "m"], "prompt": "find: "},
    "FlagEmbedding, scores": {
        "query": "q", "pos": ["p"], "neg": ["n"], "pos_scores": [0.9], "neg_scores": [0.1],
    },
    "ms-swift": {
        "messages": user("q"),
        "positive_messages": [user("p")],
        "negative_messages": [user("n"), user("m")],
    },
    "tevatron": {"query": "q", "positive_passages": [TITLE], "negative_passages": [{"text": "n"}]},
    "sentence pairs": {"sentence1": "q", "sentence2": "p", "score": 0.5},
    "a document alone": {"_id": "1", "text": "n"},
    "several positives": {"query": "q", "positive": ["p", "r"]},
}  # fmt: skip
FOUND = {
    "sentence-transformers, triplets": "q p n",
    "sentence-transformers, numbered": "q p n m",
    "question and answer": "q p",
    "FlagEmbedding": "find: q p n m",
    "FlagEmbedding, scores": "q p:0.9 n:0.1",
    "ms-swift": "q p n m",
    "tevatron": "q Moon It shines. n",
    "sentence pairs": "q p:0.5",
    "a document alone": "n",
    "several positives": "q p r",
}


def encoded(row, kind="retrieval", tokenizer="bytes", **settings):
    data = Data(kind=kind, tokenizer=tokenizer, **{"sequence_length": 64, **settings})
    encoder = make_encoder(kind, data, tokenizer=tokenizer)
    part = SourcePart("rows.jsonl", "jsonl")
    (found,) = encoder.encode_rows([Row(part, 1, json.loads(json.dumps(row)), size=10)])
    return found


def texts(found):
    """Text, role and score of each text."""
    ends = np.flatnonzero(found.labels >= 0) + 1
    parts = np.split(found.ids, ends[:-1])
    return [
        (bytes(part.astype(np.uint8)).decode(), int(found.labels[end - 1]), found.weights[end - 1])
        for part, end in zip(parts, ends, strict=True)
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_published_sets(name):
    found = encoded(LAYOUTS[name])
    assert not found.problem
    shown = " ".join(
        text if math.isnan(score) else f"{text}:{score:.1f}" for text, _, score in texts(found)
    )
    assert shown == FOUND[name]
    roles = [role for _, role, _ in texts(found)]
    assert roles[0] == (NEGATIVE if name == "a document alone" else QUERY)
    assert (POSITIVE in roles) == (QUERY in roles)


def test_a_query_may_hold_the_name_of_a_part():
    row = {"query": "{instruction} {document}", "pos": "{query}", "prompt": "find"}
    found = encoded(row, kind="reranking", pair_template="{instruction}|{query}|{document}")
    assert [text for text, *_ in texts(found)] == ["find|{instruction} {document}|{query}"]


def test_values_of_a_csv_are_texts():
    row = {"query": "[1] a", "positive": '["b", "c"]', "negative_1": "d", "negative_2": ""}
    found = encoded({**row, "scores": "[1, 0.5, 0]"})
    assert [(text, score) for text, _, score in texts(found)[1:]] == [
        ("b", 1),
        ("c", 0.5),
        ("d", 0),
    ]
    assert texts(found)[0][0] == "[1] a"
    assert texts(encoded({"query": "a", "positive": "[1, 2]"}))[1][0] == "[1, 2]"
    assert texts(encoded({"sentence1": "a", "sentence2": "b", "score": "0.25"}))[1][2] == 0.25


def test_prompts_are_in_front_and_a_row_has_its_own():
    prompts = {"query_prompt": "q: ", "document_prompt": "d: "}
    assert [text for text, *_ in texts(encoded({"query": "a", "pos": "b"}, **prompts))] == [
        "q: a",
        "d: b",
    ]
    own = {"query": "a", "pos": "b", "prompt": ""}
    assert [text for text, *_ in texts(encoded(own, **prompts))] == ["a", "d: b"]


def test_texts_are_cut_and_further_documents_are_not_used():
    row = {"query": "a" * 100, "pos": ["b", "c"], "neg": ["d"] * 5}
    found = encoded(row, documents=3, sequence_length=10)
    assert [text for text, *_ in texts(found)] == ["a" * 10, "b", "c", "d"]
    assert found.cut_tokens == 90


def test_pairs_by_a_template():
    row = {"query": "a", "pos": "b", "neg": ["c"], "scores": [1, 0.25]}
    found = texts(encoded(row, kind="reranking"))
    assert found == [
        ("Query: a\nDocument: b", POSITIVE, 1.0),
        ("Query: a\nDocument: c", NEGATIVE, 0.25),
    ]
    template = "{instruction}|{query}|{document}|?"
    cut = encoded(
        {"query": "a", "pos": "b" * 50, "prompt": "find"},
        kind="reranking",
        pair_template=template,
        sequence_length=20,
    )
    assert [text for text, *_ in texts(cut)] == ["find|a|" + "b" * 11 + "|?"]
    assert cut.cut_tokens == 39


BROKEN = [
    ({"query": "a", "pos": []}, "no-positive"),
    ({"query": "", "pos": "b"}, "empty-query"),
    ({"query": ["a", "b"], "pos": "b"}, "several-queries"),
    ({"query": "a", "pos": 3}, "type"),
    (
        {"query": "a", "pos": None},
        "type",
    ),
    ({"query": "a", "pos": "b", "scores": [1, 2]}, "number-of-scores"),
    ({"query": "a", "pos": "b", "scores": ["x"]}, "scores"),
    ({"query": "a", "pos": "b", "scores": [float("nan")]}, "scores"),
    ({"query": "a"}, "no-column"),
    ({"query": "a", "pos": "\ud800"}, "surrogate"),
]


@pytest.mark.parametrize(("row", "rule"), BROKEN)
def test_rows_that_cannot_be_used(words, row, rule):
    words.check(rule, encoded(row).problem)
