"""Masked language models: which tokens are predicted, and losses compared with transformers."""

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    DataCollatorForLanguageModeling,
    ModernBertConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from launcher.data.batching import NO_SAMPLE, SampleOrder, TokenBatchSampler
from launcher.data.opening import make_order, open_dataset
from launcher.data.token_store import ModelTraits
from launcher.errors import RecipeError
from launcher.models.build import build_model
from launcher.models.description import embeddings
from launcher.models.head import Head, logits_transform
from launcher.models.load import starting_weights
from launcher.models.micro_batch import IGNORED
from launcher.models.record import record_of
from launcher.objectives.loss import summed_loss
from launcher.objectives.masked import Masked, masking_vocabulary
from launcher.objectives.target_loss import load_target_loss
from launcher.recipe.schema import Data, Model, Objective
from tests.unit.data.rows import write

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = 95
SMALL = {
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 70,
}
CONFIGS = [
    BertConfig(**SMALL, pad_token_id=0),
    RobertaConfig(**SMALL, pad_token_id=0),
    ModernBertConfig(
        **SMALL, pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3
    ),
]


def save_tokenizer(folder):
    """A tokenizer of words, which adds [CLS] and [SEP], without tokens for begin and end."""
    words = {word: n for n, word in enumerate([*SPECIAL, *(f"w{n}" for n in range(WORDS))])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    options = dict(zip(names, SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=made, **options).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def masked(tmp_path):
    rows = [
        {"text": " ".join(f"w{(7 * n + i) % WORDS}" for i in range(9 * n))} for n in range(1, 9)
    ]
    file = write(tmp_path / "rows.jsonl", rows)
    tokenizer, cache = save_tokenizer(tmp_path / "tokenizer"), str(tmp_path / "cache")
    data = Data(packing=False, sequence_length=64, tokenizer=tokenizer, cache=cache)
    options = {"tokenizer": tokenizer, "model": ModelTraits(vocabulary=100), "build": True}
    opened = open_dataset(data, (str(file),), objective=Masked(), **options)
    assert isinstance(opened.objective, Masked)
    return opened


def test_documents_have_the_special_tokens_of_an_encoder(masked):
    store = masked.store
    first = store.ids[: store.offsets[1]].tolist()
    assert first == [2, *(5 + (7 + i) % WORDS for i in range(9)), 3]
    assert len(masked) == 9  # the last two documents have more than 64 tokens
    assert max(masked.lengths) == 64


def test_masks_are_those_of_the_collator_of_transformers(masked):
    """In distribution: over 400 epochs, the shares of tokens that are predicted, masked, replaced
    by another one and kept agree within five standard deviations."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(masked_tokenizer(masked))
    collator = DataCollatorForLanguageModeling(tokenizer, seed=0)
    counts = {"ours": np.zeros(4), "theirs": np.zeros(4)}
    for epoch in range(400):
        sample = masked[4 + epoch * len(masked)]
        [(_, start, end)] = masked.pieces(4)
        ids = masked.store.ids[start:end].astype(np.int64)
        made = collator([{"input_ids": ids.tolist()}])
        theirs = made["input_ids"][0].numpy(), made["labels"][0].numpy()
        ours = sample["input_ids"], sample["targets"]
        for name, (inputs, targets) in {"ours": ours, "theirs": theirs}.items():
            where = targets != IGNORED
            assert (targets[where] == ids[where]).all()
            assert (inputs[~where] == ids[~where]).all()
            assert not where[[0, -1]].any()  # [CLS] and [SEP]
            hidden = inputs[where] == 4
            kept = inputs[where] == ids[where]
            counts[name] += (where.sum(), hidden.sum(), kept.sum(), (~hidden & ~kept).sum())
    tokens = 400 * (len(ids) - 2)
    expected = np.array([0.15, 0.12, 0.015 * 1.01, 0.015 * 0.98])
    for found in counts.values():
        deviation = np.sqrt(tokens * expected * (1 - expected))
        assert (np.abs(found - tokens * expected) < 5 * deviation).all()


def test_a_users_loss_counts_the_predicted_tokens(masked):
    model = BertForMaskedLM(CONFIGS[0]).eval()
    for function in ("dynamic_fine_tuning", "label_smoothing"):
        loss = load_target_loss(Objective(loss=f"tests.target_losses:{function}"))
        own = dataclasses.replace(
            masked, objective=dataclasses.replace(masked.objective, target_loss=loss)
        )
        micro_batch = own.collate([own[5], own[6]]).micro_batch
        assert micro_batch.inputs.keys() == {"input_ids", "attention_mask"}
        logits, targets = model(**micro_batch.inputs).logits, micro_batch.targets
        predicted = targets != IGNORED
        expected = loss.of_logits if loss.needs == "logits" else None
        if expected is None:
            losses = cross_entropy(logits[predicted], targets[predicted], reduction="none")
            summed = ((-losses).exp() * losses).sum()
        else:
            summed = expected(logits[predicted], targets[predicted]).sum()
        torch.testing.assert_close(own.objective.loss(model, micro_batch), summed)


def masked_tokenizer(dataset):
    return dataset.store.folder.parent.parent / "tokenizer"


def test_masks_follow_from_seed_epoch_and_sample(masked):
    count = len(masked)
    again = dataclasses.replace(masked)
    other = dataclasses.replace(masked, objective=masked.objective.with_seed(1))
    for index in (0, 5, count + 5):
        assert (masked[index]["targets"] == again[index]["targets"]).all()
        assert not (masked[index]["targets"] == other[index]["targets"]).all() or index == 0
    assert not (masked[5]["targets"] == masked[count + 5]["targets"]).all()
    order = make_order(masked, seed=3, shuffle=True, epochs=2)
    drawn = [order.sample(position) for position in range(2 * count)]
    assert sorted(drawn) == list(range(2 * count))
    sampler = TokenBatchSampler(
        order=order,
        global_batch_size=count,
        steps=2,
        lengths=masked.lengths,
        micro_batch_tokens=128,
    )
    assert sorted(itertools.chain(*sampler)) == list(range(2 * count))
    plain = SampleOrder(samples=count, seed=0, shuffle=False, epochs=1)  # of an evaluation
    assert [plain.sample(position) for position in range(count)] == list(range(count))


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_losses_are_those_of_transformers(config, chunked, masked):
    """Rows of several lengths and one without tokens, and a micro-batch of these alone."""
    values = {k: v for k, v in config.to_dict().items() if k in SMALL or k.endswith("token_id")}
    section = Model(config={"model_type": config.model_type, **values}, task="masked_lm")
    model = build_model(section, sequence_length=64)
    transform = logits_transform(model)
    assert transform is not None
    starting_weights(section, model, seed=0)[0](model, torch.device("cpu"), torch.device("cpu"))
    reference = copy.deepcopy(model.eval())
    if chunked:
        record_of(model).head = Head(embeddings(model)[1], transform)
    collated = masked.collate([masked[index] for index in (0, 3, 8, NO_SAMPLE)])
    micro_batch = collated.micro_batch
    assert collated.loss_tokens == int((micro_batch.targets != IGNORED).sum()) > 3
    loss = summed_loss(model, micro_batch) / collated.loss_tokens
    assert micro_batch.inputs.keys() == {"input_ids", "attention_mask"}
    expected = reference(**micro_batch.inputs, labels=micro_batch.targets).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    empty = masked.collate([masked[NO_SAMPLE]])
    assert summed_loss(model, empty.micro_batch).item() == 0.0
    assert empty.loss_tokens == 0


def test_a_pretrained_encoder_with_a_pooler(tmp_path, caplog):
    """BERT's checkpoints hold a pooler and a head for pairs of sentences, which are not used."""
    BertForPreTraining(CONFIGS[0]).save_pretrained(tmp_path / "bert")
    section = Model(path=str(tmp_path / "bert"), task="masked_lm")
    with caplog.at_level("INFO"):
        model = build_model(section, sequence_length=64)
        starting_weights(section, model, seed=0)
    assert "skipped: bert.pooler.dense.bias, bert.pooler.dense.weight, cls.seq_relat" in caplog.text


def test_models_and_tokenizers_that_cannot_be_used(tmp_path):
    for tokenizer, what in (("bytes", "bytes has no mask token"), (None, "missing")):
        with pytest.raises(
            RecipeError, match=f"data.tokenizer: {what}; model.task: masked_lm needs"
        ):
            masking_vocabulary(tokenizer, vocabulary=None)
    with pytest.raises(RecipeError, match="its mask token 4 is beyond the model's vocabulary of 4"):
        masking_vocabulary(save_tokenizer(tmp_path), vocabulary=4)
    assert masking_vocabulary(str(tmp_path), vocabulary=50).size == 50
