"""What a model is and what has been done to it: one record on it, which all changes share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from launcher.models.documents import DocumentsOfCall
from launcher.models.micro_batch import DocumentMasking

if TYPE_CHECKING:
    from launcher.models.description import ModelDescription
    from launcher.models.expert_load import ExpertLoad
    from launcher.models.head import Head
    from launcher.models.multi_token import MultiToken
    from launcher.models.pipeline import StagedModel
    from launcher.models.router_balance import RouterBalance
    from launcher.models.sample_dropout import SampleDropout
    from launcher.models.towers import Towers


@dataclass
class ModelRecord:
    """What a model consists of, and its changes in the order of `changes.py`. A copy of the model has a
    copy of its record."""

    description: ModelDescription | None = field(default=None, compare=False, repr=False)
    """What the model consists of; None: it has not been asked for."""
    conversions: list[Any] = field(default_factory=list)
    """transformers' conversions from the tensors of its checkpoint to its own (`tensor_names.py`)."""
    draws: dict[str, list[Any]] = field(default_factory=dict)
    """By the names of parameters of a user's model: what its constructors drew in place
    (`constructors.py`)."""
    new_tokens: range = range(0)
    """The ids that the embeddings have got rows for."""
    float8: bool = False
    """Whether linear layers of the blocks multiply in float8."""
    adapters: bool = False
    """Whether it has adapters of peft."""
    nf4: bool = False
    """Whether weights of its blocks are in 4 bits."""
    document_masking: DocumentMasking = "mask"
    """How attention keeps the documents of a packed row apart."""
    documents: DocumentsOfCall | None = None
    """What layers share that need to know where documents are: recurrent ones that compute each document
    of a packed row by itself, and those of divided rows. The model takes the arguments `documents` and
    `divided_rows` then."""
    towers: Towers | None = None
    """What computes attachments, if rows have some."""
    multi_token: MultiToken | None = None
    """Its layers of multi-token prediction; None: it has none that are computed."""
    head: Head | None = None
    """It computes losses without full logits, or of a reward model the scores of all tokens."""
    router_balance: RouterBalance | None = None
    """The balance loss of its experts over global batches; None: it has none, or that of micro-batches."""
    expert_load: ExpertLoad | None = None
    """How often its experts are chosen; None: it has none that transformers' interface computes."""
    sample_dropout: SampleDropout | None = None
    """Dropout that does not depend on the micro-batch of a text; None: it is torch's."""
    stages: StagedModel | None = None
    """This rank's stages of a pipeline."""

    @property
    def whole(self) -> nn.Module | None:
        """A copy on the meta device of the model before a pipeline divided it; None: it has not been
        divided so."""
        return None if self.stages is None else self.stages.whole

    @property
    def recurrent(self) -> bool:
        """Whether recurrent layers compute each document of a packed row by itself."""
        return self.documents is not None and self.documents.by_document


def whole_model(model: Any) -> Any:
    """The model with all of its blocks, for names, shapes and its config: of a stage of a pipeline, the
    copy on the meta device."""
    return record_of(model).whole or model


def record_of(model: nn.Module) -> ModelRecord:
    """The record of a model. It can be written to."""
    record: ModelRecord = vars(model).setdefault("launcher_changes", ModelRecord())
    return record
