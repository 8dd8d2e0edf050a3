"""The loss of distillation against full logits, without chunks, and the predictions of a teacher."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy, kl_div

from launcher.data.collation import Collated
from launcher.data.packing import separate
from launcher.data.token_alignment import TokenTexts, equal_tokens
from launcher.data.token_store import TokenStore
from launcher.errors import RecipeError
from launcher.models import head as head_module
from launcher.models.build import build_model
from launcher.models.head import Head, logits_transform
from launcher.models.initialization import random_weights
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.models.record import record_of
from launcher.objectives import kept_files
from launcher.objectives.distillation import Distillation as Objective
from launcher.objectives.distillation import collate_distilled, teacher_top_k, token_losses
from launcher.objectives.teacher import targets_of_pieces, targets_of_sequences
from launcher.objectives.teacher_rows import CONTINUES, UNKNOWN, Alignment, TeacherRows
from launcher.planner.machine import known_machine
from launcher.planner.plan import make_plan
from launcher.recipe import schema
from launcher.recipe.schema import Distillation, Model
from launcher.training.model import prepare_model, prepare_teacher
from tests.datasets import dataset_of

VOCABULARY, TOKENS = 300, 24


def model_of(seed, *, softcap=None, chunked=False):
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    if softcap is not None:
        config |= {"model_type": "gemma2", "final_logit_softcapping": softcap}
    model = build_model(Model(config=config, attention="eager"), sequence_length=TOKENS)
    if chunked:
        transform = logits_transform(model)
        assert transform is not None
        record_of(model).head = Head(model.lm_head, transform)
    random_weights(model, torch.device("cpu"), torch.device("cpu"), seed=seed)
    for index, parameter in enumerate(model.parameters()):
        parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(100 * seed + index))
    return model


def micro_batch(seed=0):
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=drawn)
    targets = torch.randint(0, VOCABULARY, (2, TOKENS), generator=drawn)
    targets[:, ::5] = IGNORED
    positions = (targets.flatten() != IGNORED).nonzero()[:, 0]
    return MicroBatch({"input_ids": ids}, targets, positions)


def logits_at_targets(model, batch):
    return model(**batch.inputs).logits.flatten(0, 1)[batch.positions].float()


def direct(logits, targets, teacher, settings, weights):
    """The definition on full logits: all tokens but the teacher's top k are one token."""

    def merged(log_probabilities, ids):
        others = torch.ones_like(log_probabilities, dtype=torch.bool).scatter(1, ids, False)
        rest = log_probabilities.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
        top = log_probabilities.gather(1, ids)
        return torch.cat([top, rest], 1) if others.any() else top

    p = (teacher / settings.temperature).log_softmax(1)
    q = (logits / settings.temperature).log_softmax(1)
    ids = p.topk(settings.top_k).indices
    divergence = kl_div(merged(q, ids), merged(p, ids), log_target=True, reduction="none").sum(1)
    entropy = cross_entropy(logits, targets, reduction="none")
    sums = torch.stack([(entropy * weights).sum(), (divergence * weights).sum()])
    loss = (1 - settings.weight) * sums[0] + settings.weight * settings.temperature**2 * sums[1]
    return torch.cat([loss.view(1), sums])


@pytest.mark.parametrize(
    ("top_k", "temperature", "weight", "softcap", "weighted"),
    [
        (8, 1.0, 0.5, None, False),
        (8, 2.5, 0.7, 5.0, True),
        (VOCABULARY, 1.0, 1.0, None, False),
        (1, 0.5, 0.0, None, True),
        (8, 0.01, 0.5, None, False),
    ],
)
def test_loss_and_gradients_are_those_of_full_logits(
    monkeypatch, top_k, temperature, weight, softcap, weighted
):
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 64 * TOKENS)  # several chunks, one partial
    settings = Distillation(teacher="x", top_k=top_k, temperature=temperature, weight=weight)
    batch, plain = micro_batch(), model_of(1, softcap=softcap)
    model, teacher = model_of(1, softcap=softcap, chunked=True), model_of(2, softcap=softcap)
    positions = batch.positions
    weights = torch.ones(2, TOKENS)
    if weighted:
        weights = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(5))
        batch = dataclasses.replace(batch, weights=weights)
    with torch.no_grad():
        of_teacher = logits_at_targets(teacher, batch)
        found = teacher_top_k(
            model_of(2, softcap=softcap, chunked=True),
            batch,
            settings=settings,
            vocabulary=VOCABULARY,
        )
    p = (of_teacher / temperature).log_softmax(1)
    values, ids = found[:, :top_k], found[:, top_k:].long()
    assert torch.equal(ids.sort(1).values, p.topk(top_k).indices.sort(1).values)
    # Rounding of the logits is divided by the temperature
    close = {"rtol": 1e-6, "atol": 1e-6} if temperature > 0.1 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(values, p.gather(1, ids), **close)
    stored = {"ids": ids, "log_probabilities": values}
    ours = Objective(settings).loss(model, dataclasses.replace(batch, extra=stored))
    targets = batch.targets.flatten()[positions]
    theirs = direct(
        logits_at_targets(plain, batch), targets, of_teacher, settings, weights.flatten()[positions]
    )
    torch.testing.assert_close(ours, theirs, **close)
    count = len(positions)
    (ours[0] / count).backward()
    (theirs[0] / count).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **close, msg=name)


@pytest.mark.parametrize(
    ("temperature", "divergence", "norm"),
    [(1.0, 0.2545057, 0.1576008), (2.5, 0.04088214, 0.02509254)],
)
def test_divergence_and_gradient_are_those_of_trl(temperature, divergence, norm):
    """Of generalized_jsd_loss of TRL 1.16.0's GKDTrainer, with beta=0, on these models and targets:
    a mean over the targets, without the factor temperature^2."""
    settings = Distillation(teacher="x", top_k=VOCABULARY, temperature=temperature, weight=1.0)
    batch, model = micro_batch(), model_of(1, chunked=True)
    with torch.no_grad():
        found = teacher_top_k(
            model_of(2, chunked=True), batch, settings=settings, vocabulary=VOCABULARY
        )
    values, ids = found.split(VOCABULARY, 1)
    stored = {"ids": ids.long(), "log_probabilities": values}
    loss = Objective(settings).loss(model, dataclasses.replace(batch, extra=stored))[0]
    loss = loss / temperature**2 / len(found)
    loss.backward()
    assert loss.item() == pytest.approx(divergence, rel=1e-6, abs=1e-7)
    total = torch.stack([parameter.grad.square().sum() for parameter in model.parameters()]).sum()
    assert total.sqrt().item() == pytest.approx(norm, rel=1e-6)


def test_a_model_that_agrees_has_no_divergence_and_no_gradient_of_it():
    settings = Distillation(teacher="x", top_k=4, weight=1.0)
    batch, model = micro_batch(), model_of(1, chunked=True)
    with torch.no_grad():
        found = teacher_top_k(model, batch, settings=settings, vocabulary=VOCABULARY)
    stored = {"ids": found[:, 4:].long(), "log_probabilities": found[:, :4]}
    loss, entropy, divergence = Objective(settings).loss(
        model, dataclasses.replace(batch, extra=stored)
    )
    assert abs(divergence) < 1e-4 < entropy
    loss.backward()
    assert max(p.grad.abs().max() for p in model.parameters()) < 1e-4


def test_a_teacher_with_spare_entries_predicts_tokens_of_the_model_only():
    settings = Distillation(teacher="x", top_k=100)
    batch, model = micro_batch(), model_of(3, chunked=True)
    batch.inputs["input_ids"].remainder_(200)
    batch.targets[batch.counted] %= 200
    with torch.no_grad():
        found = teacher_top_k(model, batch, settings=settings, vocabulary=200)
    assert found[:, 100:].max() < 200
    assert (found[:, :100].exp().sum(1) <= 1 + 1e-6).all()


def test_targets_of_each_sequence():
    from types import SimpleNamespace

    # Documents of 5, 0 and 4 tokens; the first continues in the second sequence
    labels = np.array([1, 2, IGNORED, 4, 5, 6, IGNORED, 8, 9])
    store = SimpleNamespace(labels=labels, offsets=np.array([0, 5, 5, 9]))
    sequences = SimpleNamespace(
        starts=np.array([0, 3, 5]), lengths=np.array([3, 2, 4]), bounds=np.array([0, 1, 3])
    )
    dataset = SimpleNamespace(store=store, sequences=sequences)
    assert targets_of_sequences(dataset).tolist() == [2, 3]
    # Packed: the second document is first
    sequences.starts, sequences.lengths = np.array([5, 0, 3]), np.array([4, 3, 2])
    assert targets_of_sequences(dataset).tolist() == [2, 3]
    store.labels = None
    assert targets_of_sequences(dataset).tolist() == [3, 4]


def test_targets_are_counted_in_blocks(monkeypatch):
    """The labels of a store may be larger than the memory of the ranks of a node."""
    from types import SimpleNamespace

    class Labels:
        def __init__(self, values):
            self.values = values

        def __getitem__(self, part):
            assert part.stop - part.start <= 40
            return self.values[part]

    monkeypatch.setattr("launcher.data.packing._COUNTED_TOKENS", 30)
    values = np.where(np.arange(300) % 3, 1, IGNORED)
    offsets = np.arange(0, 301, 10)
    sequences = SimpleNamespace(starts=offsets[:-1], lengths=np.diff(offsets), bounds=np.arange(31))
    dataset = SimpleNamespace(
        store=SimpleNamespace(labels=Labels(values), offsets=offsets), sequences=sequences
    )
    counts = [np.count_nonzero(values[start + 1 : start + 10] != IGNORED) for start in offsets[:-1]]
    assert targets_of_sequences(dataset).tolist() == counts


SECTION = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def taught(folder, *, vocabulary=50, top_k=1, teacher=SECTION | {"vocab_size": 50}):
    """A recipe, and its teacher in this folder."""
    config = transformers.AutoConfig.for_model(**teacher)
    auto = transformers.AutoModelForMaskedLM if "bert" in str(teacher) else None
    (auto or transformers.AutoModelForCausalLM).from_config(config).save_pretrained(folder)
    return schema.Recipe(
        run=schema.Run(name="taught", max_steps=1),
        model=Model(config=SECTION | {"vocab_size": vocabulary}),
        data=schema.Data(kind="tokens", sequence_length=8),
        batch=schema.Batch(global_batch_size=1, micro_batch_size=1),
        strategy=schema.Strategy(kind="ddp", mixed_precision=None),
        distillation=Distillation(teacher=str(folder), top_k=top_k),
    )


def prepare_both(recipe):
    cpu = torch.device("cpu")
    plain = dataclasses.replace(recipe, distillation=None)
    return prepare_teacher(recipe, prepare_model(plain, device=cpu), "", device=cpu)


def plan_both(recipe):
    make_plan(recipe, known_machine("cpu", nodes=1, gpus_per_node=1))


@pytest.mark.parametrize("prepare", [prepare_model, prepare_both])
def test_more_teacher_predictions_than_tokens_are_refused(tmp_path, prepare):
    """When the model is built: before the log names the space that the predictions take, and in
    `launcher plan`."""
    options = {"device": torch.device("cpu")} if prepare is prepare_model else {}
    prepare(taught(tmp_path, top_k=50), **options)
    message = "distillation.top_k: 51 is more than the vocabulary of 50 of LlamaForC"
    with pytest.raises(RecipeError, match=message):
        prepare(taught(tmp_path, top_k=51), **options)


@pytest.mark.parametrize("prepare", [prepare_both, plan_both])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "bert is an encoder (is_decoder is false)"),
        (
            {"max_position_embeddings": 4},
            "data.sequence_length: 8 is more than the 4 positions of the model; shorten it",
        ),
        (
            {"vocab_size": 60},
            "its vocabulary of 60 entries is not that of the model, 50: ids must mean",
        ),
        ({"vocab_size": 50}, "not available for LlamaForCausalLM, which does more than a linear"),
    ],
)
def test_teachers_are_checked_alike_by_training_and_plan(
    tmp_path, monkeypatch, prepare, change, message
):
    recipe = taught(tmp_path, teacher=SECTION | {"vocab_size": 50} | change)
    if "linear" in message:
        forward = transformers.LlamaForCausalLM.forward

        def modified(self, *arguments, **options):
            outputs = forward(self, *arguments, **options)
            outputs.logits = outputs.logits * (2 if self.config._name_or_path else 1)
            return outputs

        monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", modified)
    with pytest.raises(RecipeError) as error:
        prepare(recipe)
    assert str(error.value).startswith(f"distillation.teacher: {message}")


def events(logits, spans, teacher, temperature):
    """The divergence of each span on full logits, by its definition. teacher: for each span the
    probability of its text, and those of other tokens by id."""
    q = (logits / temperature).softmax(1)
    found = []
    for (tokens, (begin, end)), (p_span, others) in zip(spans, teacher, strict=True):
        q_span = torch.stack([q[at, tokens[at - begin]] for at in range(begin, end)]).prod()
        pairs = [(p_span, q_span), *((p, q[begin, id]) for id, p in others.items())]
        pairs.append((1 - sum(p for p, _ in pairs), 1 - sum(q for _, q in pairs)))
        found.append(sum(p * (torch.log(torch.tensor(p)) - q.log()) for p, q in pairs if p > 1e-9))
    return torch.stack(found).sum()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_a_span_of_several_tokens_is_one_event(temperature):
    """Beside the other tokens that the teacher finds likely, and all the rest. A target without a
    prediction has none of it."""
    settings = Distillation(teacher="x", top_k=2, temperature=temperature, weight=0.7)
    batch, plain, model = micro_batch(), model_of(1), model_of(1, chunked=True)
    targets = batch.targets.flatten()[batch.positions].tolist()
    count = len(targets)
    rows = np.zeros(count, dtype=kept_files.top_k_dtype(3))
    rows["id"], rows["id"][:, 0] = -1, -2
    bounds = [(0, 1), (1, 4), (4, 6), (8, 9), (9, 12)]
    of_teacher = [
        (0.4, {7: 0.2, 9: 0.1}),
        (0.05, {7: 0.5, 9: 0.3}),
        (0.3, {12: 0.3}),
        (0.5, {}),
        (0.2, {2: 0.8}),
    ]
    for (begin, end), (p_span, others) in zip(bounds, of_teacher, strict=True):
        rows["id"][begin + 1 : end, 0] = -1
        rows["id"][begin, : 1 + len(others)] = [targets[begin], *others]
        rows["log_probability"][begin, : 1 + len(others)] = np.log([p_span, *others.values()])
        assert not {*others} & {*targets[begin:end]}
    made = Collated(batch, 0, 0, 0)
    stored = collate_distilled(made, [rows[:5], rows[5:]], with_target=True).micro_batch
    assert stored.extra["spans"].tolist()[:12] == [0, 1, 1, 1, 4, 4, -1, -1, 8, 9, 9, 9]
    assert {*stored.extra["spans"].tolist()[12:]} == {-1}
    ours = Objective(settings, with_target=True).loss(model, stored)
    logits = logits_at_targets(plain, batch)
    spans = [(targets[begin:end], (begin, end)) for begin, end in bounds]
    entropy = cross_entropy(logits, torch.tensor(targets), reduction="sum")
    divergence = events(logits, spans, of_teacher, temperature)
    loss = 0.3 * entropy + 0.7 * temperature**2 * divergence
    torch.testing.assert_close(ours, torch.stack([loss, entropy, divergence]))
    (ours[0] / count).backward()
    (loss / count).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_spans_of_one_token_are_those_of_gold():
    """Of TRL 1.16.0's GOLD: `ULDLoss` with spans of one token, the "bayesian" logits, beta=0, the weight 1
    of tokens that both vocabularies have and 0 of the others, which ours counts as one."""
    drawn = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 12, generator=drawn)[:5].requires_grad_()
    teacher = torch.randn(6, 10, generator=drawn)[:5].log_softmax(1)
    targets = torch.tensor([5, 6, 7, 8, 11])
    # The first seven tokens of the teacher are tokens 5 to 11
    ids, values = torch.arange(5, 12).expand(5, 7), teacher[:, :7]
    first = (ids == targets[:, None]).long().argsort(dim=1, descending=True, stable=True)
    ids, values = ids.gather(1, first), values.gather(1, first)
    q = logits.log_softmax(1)
    others = torch.ones(5, 12, dtype=torch.bool).scatter(1, ids, False)
    statistics = torch.cat(
        [
            logits.logsumexp(1, keepdim=True),
            logits.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True),
            logits.gather(1, targets[:, None]),
            logits.gather(1, ids),
        ],
        1,
    )
    spans = torch.arange(5)
    found = token_losses(statistics, values, 1.0, ids=ids, spans=spans)[:, 1]
    torch.testing.assert_close(found, token_losses(statistics, values, 1.0, ids=ids)[:, 1])
    left = 1 - values.exp().sum(1)
    of_rest = left * (left.log() - (1 - q.gather(1, ids).exp().sum(1)).log())
    matched = (found - of_rest).mean()
    matched.backward()
    assert matched.item() == pytest.approx(0.754294753, rel=1e-6)
    assert logits.grad.norm().item() == pytest.approx(0.152299806, rel=1e-5)


def rows_of_teacher(store, length, alignment=None, *, with_target=True):
    """A teacher whose row about a target has the target's number among all targets as its logarithm."""
    made = dataset_of(store, separate(store.offsets, length), length)
    counts = targets_of_pieces(made)
    rows = np.zeros(counts.sum(), dtype=kept_files.top_k_dtype(2))
    rows["log_probability"][:, 0] = np.arange(len(rows))
    positions = [at for a, b in itertools.pairwise(store.offsets) for at in range(a + 1, b)]
    rows["id"][:, 0] = store.ids[positions]
    return TeacherRows.of(made, counts, rows, alignment, with_target=with_target)


def test_the_first_token_of_a_document_is_not_predicted():
    """Though the document before it ends there, whose last token has no target."""
    ids = np.arange(1, 11, dtype=np.int32)
    store = TokenStore(ids, None, np.array([0, 4, 7, 10]))
    rows = rows_of_teacher(store, 8)
    assert rows._numbers(0, 10).tolist() == [-1, 0, 1, 2, -1, 3, 4, -1, 5, 6]
    found = rows.of_targets(1, 4, 7)
    assert found["id"][:, 0].tolist() == [UNKNOWN, 6, 7]


def test_a_teacher_without_a_beginning_of_text_does_not_predict_its_first_token():
    """The model has such a token, so its first target is the first token of the text."""
    texts = TokenTexts([b"<s>", b"ab", b"c", b"d"], frozenset({0}), frozenset())
    other = TokenTexts([b"ab", b"cd", b"c", b"d"], frozenset(), frozenset())
    store = TokenStore(np.array([0, 1, 2, 3] * 2, dtype=np.int32), None, np.array([0, 4, 8]))
    theirs = TokenStore(np.array([0, 1] * 2, dtype=np.int32), None, np.array([0, 2, 4]))
    ids = equal_tokens(texts, other, ends={})
    alignment = Alignment(store, theirs, np.arange(2), (texts, other), ids)
    rows = rows_of_teacher(theirs, 2, alignment)
    for document in (0, 1):
        found = rows.of_targets(document, 4 * document + 1, 4 * document + 4)
        assert found["id"][:, 0].tolist() == [UNKNOWN, 2, CONTINUES]
        assert found["log_probability"][1, 0] == document
    assert alignment.difference(np.arange(2)) == ""
    coverage = rows.coverage(np.arange(2))
    assert (coverage.targets, coverage.known, coverage.single) == (6, 4, 0)
