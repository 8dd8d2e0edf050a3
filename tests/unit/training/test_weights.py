"""data.weights_column: from rows to the loss of a global batch."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.data import token_store
from launcher.data.batching import NO_SAMPLE
from launcher.data.collation import EMPTY, collate_sequences
from launcher.data.dataset import MixtureDataset
from launcher.data.encoder import make_encoder
from launcher.data.loader import StepStatistics, StepTotals
from launcher.data.opening import open_dataset
from launcher.data.streaming import StreamingDataset, StreamOrder
from launcher.data.token_store import ModelTraits, open_store
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.models import head as head_module
from launcher.models.head import Head, Transform
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.models.record import record_of
from launcher.models.row_division import RowDivision
from launcher.objectives.base import dataset_objective
from launcher.objectives.loss import summed_loss
from launcher.objectives.next_token import NextToken
from launcher.recipe import schema
from launcher.sources.finding import file_part
from launcher.sources.location import Location
from launcher.sources.rows import read_rows
from launcher.training.evaluation import Evaluated, over_all
from tests.unit.data.rows import documents_of, write

WEIGHTED = {"kind": "tokens", "weights_column": "weights"}
UNWEIGHTED = {"weights_column": None, "ignore_columns": ("weights",)}
ROWS = [
    {"input_ids": [1, 2, 3, 4, 5], "weights": [9, 1, 0.5, 0, 2]},
    {"input_ids": [6, 7, 8], "weights": 3},
    {"input_ids": [9, 10, 11, 12], "labels": [9, IGNORED, 11, 12], "weights": [1, 1, 0.25, 4]},
    {"input_ids": [13, 14], "weights": 0.125},
]
PAIRS = [(2, 1), (3, 0.5), (5, 2), (7, 3), (8, 3), (11, 0.25), (12, 4), (14, 0.125)]
"""Each target with its weight. Those of the rows are different."""


def data_of(tmp_path, **more):
    return schema.Data(cache=str(tmp_path / "cache"), **(WEIGHTED | more))


def opened(tmp_path, rows=ROWS, **more):
    file = write(tmp_path / "rows.jsonl", rows)
    data = data_of(tmp_path, train=(str(file),), **({"sequence_length": 8} | more))
    options = {"tokenizer": None, "model": ModelTraits(), "build": True}
    return open_dataset(data, data.train, objective=NextToken(), **options)


def pairs_of(made):
    kept, weights = made.counted, made.weights
    weights = torch.ones(kept.shape) if weights is None else weights
    return sorted(zip(made.targets[kept].tolist(), weights[kept].tolist(), strict=True))


@pytest.mark.slow
def test_weights_stay_with_their_targets(tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, "_TASK_BYTES", 64)
    for packing, length in itertools.product((True, False), (8, 3)):
        found = opened(tmp_path, packing=packing, sequence_length=length, processes=2)
        assert documents_of(found.store) == [row["input_ids"] for row in ROWS]
        rows = [found[index] for index in range(len(found))]
        collated = found.collate([*rows, EMPTY])
        assert pairs_of(collated.micro_batch) == PAIRS
        assert (collated.loss_tokens, collated.loss_weight) == (8, 13.875)
        assert collated.micro_batch.weights.dtype == torch.float32
        options = {"length": length, "packed": packing, "document_masking": "varlen"}
        parts = [
            collate_sequences(rows, **options, division=RowDivision(2, rank=at)) for at in range(2)
        ]
        assert sorted(itertools.chain(*(pairs_of(part.micro_batch) for part in parts))) == PAIRS
        assert sum(part.loss_weight for part in parts) == 13.875
    unweighted = opened(tmp_path, **UNWEIGHTED)
    collated = unweighted.collate([unweighted[0]])
    assert collated.micro_batch.weights is None
    assert collated.loss_weight is None
    assert unweighted.fingerprint["content"] != found.fingerprint["content"]


def test_a_stream_has_the_same_weights(tmp_path):
    file = write(tmp_path / "rows.jsonl", ROWS)
    data = data_of(tmp_path, sequence_length=8, shuffle=False, streaming=True, packing=False)
    options = {"objective": NextToken(), "tokenizer": None, "model": ModelTraits()}
    stream = StreamingDataset(replace(data, train=(str(file),)), **options, seed=0, build=True)
    order = StreamOrder(stream)
    collated = stream.collate([stream[order.sample(position)] for position in range(4)])
    assert pairs_of(collated.micro_batch) == PAIRS


def test_a_source_without_weights_counts_one(tmp_path):
    weighted, plain = opened(tmp_path), opened(tmp_path, **UNWEIGHTED, sequence_length=7)
    mixture = MixtureDataset({"a": weighted, "b": plain}, None)
    collated = mixture.collate([mixture[0], mixture[len(weighted)]])
    found = collated.micro_batch.weights
    assert found[1].tolist() == [1] * found.shape[1]
    assert collated.loss_weight == pytest.approx(sum(w for _, w in pairs_of(collated.micro_batch)))


def test_the_weight_of_a_source(tmp_path):
    """It is that of each target, times the row's own weights; evaluations have none."""
    weighted = write(tmp_path / "rows.jsonl", ROWS)
    source = {
        "a": schema.Source(files=(str(weighted),), loss_weight=0.5),
        "b": schema.Source(files=(str(weighted),), loss_weight=3.0),
    }
    data = replace(data_of(tmp_path, sequence_length=8, packing=False), train=source)
    options = {"objective": NextToken(), "tokenizer": None, "model": ModelTraits(), "build": True}
    mixture = open_dataset(data, source, **options)
    alone = opened(tmp_path, sequence_length=8, packing=False)
    for part, factor in (("a", 0.5), ("b", 3.0)):
        for index in range(len(alone)):
            found, plain = mixture.parts[part][index], alone[index]
            np.testing.assert_array_equal(found["weights"], plain["weights"] * np.float32(factor))
    evaluated = open_dataset(data, source, **options, validation=True)
    assert {part.loss_weight for part in evaluated.parts.values()} == {1.0}
    without = {"a": replace(source["a"], loss_weight=None), "b": source["b"]}
    opened_without = open_dataset(replace(data, train=without), without, **options)
    np.testing.assert_array_equal(opened_without.parts["a"][0]["weights"], alone[0]["weights"])


@pytest.mark.parametrize("unit", ["sequences", "rows", "tokens"])
def test_the_unit_of_the_shares(tmp_path, unit):
    """Sequences of a have two rows of three tokens, and those of b one of four, with equal weights."""
    files = {
        name: write(tmp_path / f"{name}.jsonl", [{"input_ids": ids}] * 12)
        for name, ids in (("a", [1, 2, 3]), ("b", [1, 2, 3, 4]))
    }
    source = {name: schema.Source(files=(str(file),), weight=1.0) for name, file in files.items()}
    options = {"sequence_length": 6, "packing": True, "mixture_unit": unit, "weights_column": None}
    data = replace(data_of(tmp_path, **options), train=source)
    mixture = open_dataset(
        data, source, objective=NextToken(), tokenizer=None, model=ModelTraits(), build=True
    )
    rows = {name: len(part) / 12 for name, part in mixture.parts.items()}
    tokens = {name: part.tokens / len(part) for name, part in mixture.parts.items()}
    per_row = {
        "sequences": {"a": 1, "b": 1},
        "rows": rows,
        "tokens": {n: 1 / t for n, t in tokens.items()},
    }
    first, second = per_row[unit]["a"], per_row[unit]["b"]
    assert mixture.shares == pytest.approx([first / (first + second), second / (first + second)])


def test_the_weight_of_a_chat(tmp_path):
    tokenizer = hugging_face_tokenizer("bytes")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": turns, "worth": worth} for worth in (0.5, 2, [1, 2], 0)] + [
        {"messages": turns}
    ]
    file = write(tmp_path / "chats.jsonl", rows)
    data = data_of(tmp_path, kind="chat", weights_column="worth", on_error="skip")
    store = open_store((str(file),), data, tokenizer="bytes", build=True)
    ids = tokenizer.apply_chat_template(turns)["input_ids"]
    assert documents_of(store) == [ids, ids]
    assert store.weights.tolist() == [0.5] * len(ids) + [2] * len(ids)
    assert [one["problem"] for one in store.skipped] == [
        "column 'worth' must hold a number; got list (data.weights_column names it)",
        "column 'worth': all weights are 0; remove the row",
        "column 'worth' must hold a number; no such column (data.weights_column names it)",
    ]


LIMITS = "column 'weights': a weight must be 0, or from 1e-20 to 1e+20; got"
BROKEN = [
    ([1, float("nan"), 1], f"{LIMITS} nan"),
    ([1, 2, -0.5], f"{LIMITS} -0.5"),
    ([1, 2, -1e-300], f"{LIMITS} -1e-300"),
    ([1, float("inf"), 2], f"{LIMITS} inf"),
    ([1e39, 1, 1], f"{LIMITS} 1e+39"),
    ([1, 1e-40, 0], f"{LIMITS} 1e-40"),
    (1e-44, f"{LIMITS} 1e-44"),
    (1e21, f"{LIMITS} 1e+21"),
    (10**400, f"{LIMITS} 1000"),
    (float("nan"), f"{LIMITS} nan"),
    ([0, 0, 0], "column 'weights': all weights are 0; remove the row"),
    (0.0, "column 'weights': all weights are 0; remove the row"),
    ([1, 2], "3 input_ids, but 2 weights; there must be one for each"),
    ([], "3 input_ids, but 0 weights; there must be one for each"),
    (
        [1, None, 1],
        "column 'weights' must hold a number, or a list with one for each token; got list",
    ),
    (
        [1, True, 1],
        "column 'weights' must hold a number, or a list with one for each token; got list",
    ),
    ("1", "column 'weights' must hold a number, or a list with one for each token; got str"),
    (None, "column 'weights' must hold a number, or a list with one for each token; got NoneType"),
]


def test_rows_with_unusable_weights_are_named(tmp_path):
    rows = [{"input_ids": [1, 2, 3], "weights": weights} for weights, _ in BROKEN]
    file = write(tmp_path / "rows.jsonl", rows)
    encoder = make_encoder("tokens", data_of(tmp_path), tokenizer=None)
    found = list(encoder.encode_rows(read_rows(file_part(Location(str(file))))))
    for number, (one, (_, problem)) in enumerate(zip(found, BROKEN, strict=True), start=1):
        assert one.problem.startswith(problem), one.problem
        assert one.row.where == f"{file}:{number}"
    with pytest.raises(RecipeError, match=r"rows.jsonl:1: column 'weights': a weight must be"):
        open_store((str(file),), data_of(tmp_path), tokenizer=None, build=True)


# The loss


def small_model(*, chunked):
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 48}
    config = AutoConfig.for_model("llama", num_attention_heads=2, num_key_value_heads=1, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if chunked:
        record_of(model).head = Head(model.lm_head, Transform())
    return model


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def reference(model, rows):
    """The sum of w * loss over the sum of w, of each row alone, from the logits of transformers."""
    total = weights = 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        labels = torch.tensor(row.get("labels", row["input_ids"]))[1:]
        given = row["weights"]
        given = given if isinstance(given, list) else [given] * ids.shape[1]
        weight = torch.tensor(given, dtype=torch.float64)[1:] * (labels != IGNORED)
        losses = torch.nn.functional.cross_entropy(
            model(input_ids=ids).logits[0, :-1], labels, reduction="none"
        )
        total, weights = total + (losses * weight).sum(), weights + weight.sum()
    return total / weights


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("width", [None, 16, 48])
def test_loss_is_the_weighted_mean(tmp_path, monkeypatch, packing, width):
    """Over micro-batches, with full logits and in chunks."""
    if width is not None:
        monkeypatch.setattr(head_module, "chunk_width", lambda *_: width)
    found = opened(tmp_path, packing=packing)
    expected = reference(plain := small_model(chunked=False), ROWS)
    expected_gradients = gradients(plain, expected)
    model = small_model(chunked=width is not None)
    micro_batches = [found.collate([found[index]]) for index in range(len(found))]
    total = sum(part.loss_weight for part in micro_batches)
    assert len(micro_batches) > 1
    loss = sum(found.objective.loss(model, part.micro_batch) for part in micro_batches) / total
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradients(model, loss), expected_gradients, rtol=1e-5, atol=1e-7)


def test_weights_of_one_and_their_scale_do_not_matter(tmp_path):
    model, found = small_model(chunked=True), opened(tmp_path, **UNWEIGHTED)
    collated = found.collate([found[index] for index in range(len(found))])
    plain = collated.micro_batch
    expected = gradients(model, summed_loss(model, plain) / collated.loss_tokens)
    for weight in (1.0, 1e-6, 1e6):
        weighted = replace(plain, weights=torch.full(plain.targets.shape, weight))
        total = weight * collated.loss_tokens
        actual = gradients(model, summed_loss(model, weighted) / total)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_loss_of_a_mixture_by_source(tmp_path, chunked, weighted):
    """The parts are the losses of the sources' own rows; the sum and its gradient do not change."""
    model, more = small_model(chunked=chunked), {} if weighted else UNWEIGHTED
    (tmp_path / "b").mkdir()
    parts = {
        "a": opened(tmp_path, ROWS[:2], **more),
        "b": opened(tmp_path / "b", ROWS[2:], **more),
    }
    mixture = MixtureDataset(parts, None)
    assert mixture.sources == ("a", "b")
    order = [*reversed(range(len(mixture))), NO_SAMPLE]
    collated = mixture.collate([mixture[index] for index in order])
    found = dataset_objective(mixture).loss(model, collated.micro_batch)
    whole = summed_loss(model, replace(collated.micro_batch, sources=None))
    assert found[0].item() == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(gradients(model, found[0]), gradients(model, whole))
    for number, part in enumerate(parts.values()):
        alone = part.collate([part[index] for index in range(len(part))])
        own = summed_loss(model, alone.micro_batch).item()
        assert found[1 + number].item() == pytest.approx(own, rel=1e-5)
        assert (alone.loss_weight is None) is not weighted
        weight = alone.loss_weight if weighted else alone.loss_tokens
        assert found[3 + number].item() == pytest.approx(weight, rel=1e-6)
    assert MixtureDataset({"a": parts["a"]}, None).sources == ()


def test_router_loss_counts_by_the_weights():
    """The auxiliary loss of a micro-batch counts as much as its cross-entropies."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 48}
    config = AutoConfig.for_model(
        *("mixtral",),
        **(sizes | {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}),
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    ids = torch.randint(48, (2, 9))
    batch = MicroBatch({"input_ids": ids[:, :-1]}, ids[:, 1:])
    expected = gradients(model, summed_loss(model, batch) / 16)
    weighted = replace(batch, weights=torch.full((2, 8), 0.25))
    actual = gradients(model, summed_loss(model, weighted) / 4)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


ALONE = RankLayout(rank=0, size=1, group=None, device=torch.device("cpu"))


def test_statistics_hold_whole_numbers_and_the_weight():
    totals = StepTotals(loss_tokens=2**40 + 1, tokens=2**52 + 1, stop_requests=1)
    read = StepStatistics(totals, ALONE).read()
    assert read == totals._replace(loss_weight=2**40 + 1)
    assert all(type(value) is int for value in read[:4])
    weighted = StepStatistics(totals._replace(loss_weight=0.25), ALONE)
    assert weighted.loss_weight().item() == 0.25
    assert weighted.loss_weight().dtype == torch.float32
    assert StepStatistics(totals, ALONE).loss_weight().item() == np.float32(2**40 + 1)


def test_sets_of_an_evaluation_count_by_their_weights():
    sets = {"a": Evaluated(1.0, 10, weight=1.0), "b": Evaluated(2.0, 30, weight=3.0)}
    assert over_all(sets) == Evaluated(1.75, 40)
    assert over_all({"a": sets["a"], "b": Evaluated(2.0, 3)}).loss == 1.75
