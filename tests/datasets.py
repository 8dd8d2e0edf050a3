"""Data sets for tests, with the objective that the data has without a model."""

from launcher.data.batching import NO_SAMPLE, joined_rows
from launcher.data.collation import RowInputs
from launcher.data.dataset import SequenceDataset
from launcher.objectives.make import make_objective
from launcher.objectives.next_token import NextToken
from launcher.recipe import schema


def objective_of(data):
    """The objective of a recipe with this data."""
    task = "sequence_classification" if data.kind == "classification" else "causal_lm"
    recipe = schema.Recipe(
        run=schema.Run(name="x", max_steps=1),
        model=schema.Model(config={}, task=task),
        data=data,
        batch=schema.Batch(global_batch_size=1, micro_batch_size=1),
    )
    return make_objective(recipe, trained=False)


def dataset_of(store, sequences, length, packed=False, *, objective=None, **inputs):
    """The sequences of a store; the next token by default."""
    inputs = RowInputs(length, packed=packed, **inputs)
    return SequenceDataset(store, sequences, objective or NextToken(), inputs)


def rows_of(dataset, indices=None):
    """These samples as rows, all by default; those that share rows in few of them."""
    indices = [*range(len(dataset))] if indices is None else [*indices]
    if dataset.joined:
        samples = [index for index in indices if index != NO_SAMPLE]
        rows = joined_rows(samples, dataset.lengths, row_length=dataset.length, ranks=1)
        indices = rows + [()] * indices.count(NO_SAMPLE)
    return [dataset[index] for index in indices]
