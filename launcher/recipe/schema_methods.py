"""Methods of training: adapters, losses on pairs of answers, and distillation."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from launcher.recipe.section import (
    Folder,
    Fraction,
    Function,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
    StrictFloat,
    Text,
    TextList,
)


class Lora(Section):
    """Low-rank adapters (Hu et al., 2021), by peft. All else is frozen, in param_dtype."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by alpha / rank."""
    rank_stabilized: StrictBool = False
    """true: scaled by alpha / sqrt(rank) (Kalajdzievski, 2023)."""
    dora: StrictBool = False
    """true: also train the norm of each row of the adapted weights (DoRA: Liu et al., 2024)."""
    b_ratio: PositiveFloat = 1.0
    """Learning rate of an adapter's B over that of all else (LoRA+: Hayou et al., 2024)."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input."""
    target_modules: TextList | None = None
    """Linear layers that get an adapter: ends of names, such as q_proj, or patterns of whole names,
    such as `model.layers.1?.*`. all-linear: all but the output layer. null: all those of the
    blocks."""
    modules_to_save: TextList | None = None
    """Modules that are trained whole, such as embed_tokens and lm_head: names as above."""
    path: Folder | None = None
    """Folder of a trained adapter (of peft) to continue from. rank, alpha, rank_stabilized, dora,
    target_modules and modules_to_save are its own. null: new adapters."""
    quantize: Literal["nf4"] | None = None
    """nf4: hold the frozen linear layers and experts of the blocks in 4 bits (QLoRA: Dettmers et
    al., 2023). null: in param_dtype."""


class Preference(Section):
    """Training on pairs of answers (data.kind: preference). Each pair counts the same."""

    loss: Literal["dpo", "ipo", "hinge", "robust", "apo_zero", "simpo", "orpo"] = "dpo"
    """dpo: Rafailov et al., 2023. ipo: Azar et al., 2023. hinge: Zhao et al., 2023. robust:
    Chowdhury et al., 2024. apo_zero: D'Oosterlinck et al., 2024. Without a reference: simpo: Meng
    et al., 2024; orpo: Hong et al., 2024."""
    beta: PositiveFloat = 0.1
    """Scale of the rewards: larger values stay closer to the initial weights. orpo: weight of the
    odds ratio. simpo is usually trained with 2 and more."""
    label_smoothing: Annotated[Fraction, Field(lt=0.5)] = 0.0
    """robust: share of the pairs whose answers are assumed to be swapped."""
    margin: NonNegativeFloat = 0.5
    """simpo: the least margin of the rewards (gamma)."""


class Objective(Section):
    """A loss of yours on the targets of text data (see launcher/objectives/target_loss.py)."""

    loss: Function
    """`package.module:function`: gets the log-probabilities of the targets, (targets,), and returns
    the loss of each; with the attribute needs = "logits": gets logits and targets."""
    arguments: dict[str, Any] | None = None
    """Further keyword arguments of the function; `${oc.env:NAME}` as in data.arguments."""


class Distillation(Section):
    """Training on what a teacher predicts: the loss of a token is (1 - weight) * cross-entropy +
    weight * temperature^2 * KL(teacher, model) (Hinton et al., 2015)."""

    teacher: Text
    """Hugging Face checkpoint with the tokenizer of the model: a folder or a hub id."""
    top_k: PositiveInt = 64
    """Most probable tokens that are kept of each prediction, at 8 bytes. All others count as one
    token, whose probability is the sum of theirs."""
    temperature: Annotated[StrictFloat, Field(ge=0.01, le=100)] = 1.0
    """Divides the logits of both models in the KL divergence. Below 0.01, nearly all probability is
    that of the largest logit, and rounding errors, which are divided by it too, grow until the loss
    is not finite. With much more than 100, rounding would exceed the divergence."""
    weight: Share = 0.5
    """Weight of the KL divergence."""
