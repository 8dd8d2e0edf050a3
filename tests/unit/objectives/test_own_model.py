"""A model of model.builder that is trained on the launcher's data."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from launcher.data.packing import separate
from launcher.data.token_store import TokenStore
from launcher.errors import RecipeError
from launcher.models.hugging_face_files import export_hugging_face
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.objectives.loss import summed_loss
from tests.datasets import dataset_of

LENGTH, VOCABULARY = 8, 11


class Model(nn.Module):
    """A recurrent model, which is causal without a mask."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.layer = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, ids):
        return self.head(self.layer(self.embedding(ids))[0])


def test_the_loss_is_the_cross_entropy_of_its_logits():
    torch.manual_seed(1)
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 18, dtype=np.int32)
    dataset = dataset_of(
        TokenStore(ids, None, np.array([0, 8, 13, 18])),
        separate(np.array([0, 8, 13, 18]), LENGTH),
        LENGTH,
    )
    collated = dataset.collate([dataset[index] for index in range(3)])
    model = Model()
    found = dataset.objective.loss(model, collated.micro_batch)
    alone = sum(
        cross_entropy(
            model(torch.tensor(part[None])[:, :-1].long())[0],
            torch.tensor(part[1:]).long(),
            reduction="sum",
        )
        for part in np.split(ids, [8, 13])
    )
    torch.testing.assert_close(found, alone)
    assert (collated.micro_batch.targets != IGNORED).sum() == collated.loss_tokens == 15


def test_the_export_holds_the_weights_by_their_names(tmp_path):
    model = Model()
    export_hugging_face(
        model,
        tmp_path / "hf",
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        rank=0,
        tokenizer=None,
        merged=False,
        source=None,
        export_base="original",
    )
    stored = load_file(tmp_path / "hf/model.safetensors")
    expected = {name: value.bfloat16() for name, value in model.state_dict().items()}
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(stored[name], value), name


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda logits: (logits, None), "got tuple"),
        (lambda logits: {"logits": logits}, "got dict"),
        (lambda logits: None, "got NoneType"),
        (lambda logits: logits.flatten(0, 1), r"got logits of the shape \(4, 11\) for ids of the"),
        (
            lambda logits: logits[:, 1:],
            r"got logits of the shape \(1, 3, 11\) for ids of the shape",
        ),
    ],
)
def test_other_outputs_are_refused(change, problem):
    model = Model()
    own = model.forward
    model.forward = lambda ids: change(own(ids))
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(
        RecipeError, match=r"^model.builder: forward\(input_ids\) must .*" + problem
    ):
        summed_loss(model, MicroBatch({"input_ids": ids}, ids))
