"""Reward models, compared with TRL: losses, gradients and metrics of packed pairs."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig
from transformers import LlamaForSequenceClassification as Llama
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from launcher.data.batching import NO_SAMPLE
from launcher.data.columns import read_margin
from launcher.data.token_store import open_store
from launcher.errors import RecipeError, RowError
from launcher.models.attention import VARLEN, varlen_attention
from launcher.models.micro_batch import IGNORED
from launcher.models.predictions import logits
from launcher.objectives.reward import Reward
from launcher.recipe.schema import Data
from tests import datasets
from tests.micro_batches import contents
from tests.unit.data.rows import write
from tests.unit.objectives.test_preference import LENGTH, PAIRS, SMALL, dataset_of

PADDING = 2
TRL = {
    # Loss, gradient norm, accuracy, margin and mean reward of the RewardTrainer of TRL 1.16.0 on
    # PAIRS, without margins and with the MARGINS
    False: (0.47383856773, 15.23487854, 0.66666668653, 0.75038999319, -0.06051298976),
    True: (0.47625634074, 15.4584445953, 0.66666668653, 0.75038999319, -0.06051298976),
}
MARGINS = [0.25 * number - 0.5 for number in range(6)]


def make_model(masked=False):
    """A model whose weights are a formula."""
    model = Llama(LlamaConfig(**SMALL, num_labels=1, pad_token_id=PADDING)).float()
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            at = torch.arange(parameter.numel(), dtype=torch.float64)
            values = torch.sin(at * (n + 1) * 0.37 + n) * 0.5
            parameter.copy_((values + (parameter.ndim == 1)).view(parameter.shape))
    Reward().change_model(model, row_length=2 * LENGTH)
    if not masked:
        ALL_ATTENTION_FUNCTIONS.register(VARLEN, varlen_attention)
        model.set_attn_implementation(VARLEN)
    return model, "mask" if masked else "varlen"


def rewards_of(store, sequences, masking, *, packing=True):
    objective = Reward(padding=PADDING)
    return datasets.dataset_of(
        store, sequences, 2 * LENGTH, joined=packing, document_masking=masking, objective=objective
    )


def dataset(masking, *, packing=True, margins=False):
    pairs = dataset_of(PAIRS, packing=packing)
    store = pairs.store
    if margins:
        store = dataclasses.replace(store, margins=np.array(MARGINS, dtype=np.float32))
    return rewards_of(store, pairs.sequences, masking, packing=packing)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("margins", [True, False])
def test_losses_gradients_and_metrics_are_those_of_trl(margins, packing, masked):
    model, masking = make_model(masked)
    data = dataset(masking, packing=packing, margins=margins)
    total, gradient = torch.zeros(1 + len(Reward.metrics)), torch.zeros(1)
    for half in (range(0, len(data), 2), range(1, len(data), 2)):  # micro-batches
        collated = data.collate(datasets.rows_of(data, [*half, NO_SAMPLE]))
        sums = data.objective.loss(model, collated.micro_batch) / len(PAIRS)
        sums[0].backward()
        total += sums.detach()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    loss, norm, *metrics = TRL[margins]
    # The constants are of another machine: matrix products differ by 1.1e-6 between CPUs
    assert total[0].item() == pytest.approx(loss, rel=2e-6)
    assert gradient.norm().item() == pytest.approx(norm, rel=5e-6)
    assert total[1:].tolist() == pytest.approx(metrics, rel=2e-6, abs=1e-6)


def test_a_micro_batch():
    data = dataset("varlen", packing=False, margins=True)
    collated = data.collate([data[4], data[1]])
    tensors = contents(collated.micro_batch)
    (prompt, chosen, rejected), (other, *answers) = PAIRS[4], PAIRS[1]
    first = [*prompt, *chosen, *prompt, *rejected]
    assert tensors["input_ids"][0].tolist()[: len(first)] == first
    assert tensors["margins"].tolist() == [MARGINS[4], MARGINS[1]]
    assert collated.loss_tokens == 2
    ends = [len(prompt + chosen) - 1, len(first) - 1]
    width = tensors["input_ids"].shape[1]
    ends += [
        width + len(other + answers[0]) - 1,
        width + 2 * len(other) + sum(map(len, answers)) - 1,
    ]
    assert tensors["ends"].flatten().tolist() == ends
    assert not {"targets", "positions"} & tensors.keys()


def test_the_score_is_that_of_the_last_token_that_is_not_padding():
    """transformers looks for it in this way, also where an answer ends with the padding's id."""
    pairs = [([5, 6], [7, PADDING], [8]), ([PADDING], [PADDING], [PADDING, PADDING])]
    model, masking = make_model()
    made = dataset_of(pairs)
    data = rewards_of(made.store, made.sequences, masking)
    micro_batch = data.collate([data[0, 1]]).micro_batch
    ends = micro_batch.extra["ends"]
    assert ends.tolist() == [[2, 6], [7, 9]]
    alone = make_model()[0]
    expected = alone(torch.tensor([[5, 6, 7, PADDING]])).logits
    assert expected.shape == (1, 1)
    scores = logits(model, micro_batch.inputs).flatten()[ends]
    assert scores[0, 0].item() == pytest.approx(expected.item(), rel=1e-6)


def test_inspect_marks_the_tokens_whose_scores_count():
    made = dataset_of([([5, 6], [7, PADDING], [8])])
    data = rewards_of(made.store, made.sequences, "mask")
    marks = data.objective.marks(data, data[0], 0, 7)
    assert [index for index, marked in enumerate(marks) if marked] == [2, 6]


def test_an_encoder_is_refused():
    small = {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 9}
    model = BertForSequenceClassification(BertConfig(**small, num_hidden_layers=1, num_labels=1))
    with pytest.raises(RecipeError, match="BertForSequenceClassification does not score each"):
        Reward().change_model(model, row_length=8)


def test_margins_of_rows(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "cc", "m": m} for m in (1, -0.5)]
    file, cache = write(tmp_path / "rows.jsonl", rows), str(tmp_path / "c")
    data = Data(kind="preference", margin_column="m", prompt_format="text", cache=cache)
    store = open_store((str(file),), data, tokenizer="bytes", build=True)
    assert store.margins.tolist() == [1.0, -0.5]
    assert np.fromfile(store.folder / "weights.bin", np.float32).tolist() == [1.0] * 7 + [-0.5] * 7
    assert (store.labels != IGNORED).sum() == 10


@pytest.mark.parametrize("value", ["1", None, True, float("nan"), float("inf"), 10**400])
def test_margins_that_are_no_numbers(value):
    with pytest.raises(RowError, match="column 'm' must hold a number"):
        read_margin({"m": value}, "m")
    with pytest.raises(RowError, match="no such column"):
        read_margin({}, "m")
