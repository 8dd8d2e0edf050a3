"""The sections of a recipe about what a run measures and writes."""

from typing import Annotated, Literal

from pydantic import Field, StrictBool

from launcher.recipe.section import (
    Dtype,
    ListOfOne,
    Metric,
    NonNegativeInt,
    PositiveInt,
    Section,
    Text,
    TextList,
)


class Generate(Section):
    """Greedy answers to the prompts of data.validation, for kinds chat and instruct."""

    prompts: PositiveInt = 32
    """Prompts of each validation set: its first ones that leave room for an answer."""
    max_new_tokens: PositiveInt = 64
    """Tokens of the longest answer; each takes a forward pass over the whole sequence."""
    metrics: Annotated[tuple[Metric, ...], Field(min_length=1), ListOfOne] = ("exact_match",)
    """exact_match, f1 and rouge_l (of words), or functions of yours, `package.module:function`,
    which get answer and reference as text and return a number (larger is better)."""


class Evaluation(Section):
    """Loss and other metrics on data.validation."""

    every_steps: PositiveInt | None = 200
    """Optimizer steps between evaluations; the last step is always evaluated. null: only that."""
    max_batches: PositiveInt | None = None
    """Micro-batches per rank of one evaluation; null: all."""
    at_start: StrictBool = False
    """Evaluate before the first step, too."""
    generate: Generate | None = None
    """{prompts: 32, max_new_tokens: 64, metrics: [exact_match]}: score generated answers."""
    ema: StrictBool = False
    """Evaluate the averages of optimizer.ema in place of the trained weights."""
    stop_after: PositiveInt | None = None
    """End the run after this many evaluations in a row without a better value of
    checkpoint.keep_best (null: eval_loss); null: never."""


class Checkpoint(Section):
    """Checkpoints to resume from, and the weights at the end."""

    every_steps: PositiveInt | None = 500
    """Optimizer steps between checkpoints. One is also written when the run is stopped or ends.
    null: no checkpoints."""
    keep_last: PositiveInt = 2
    """Checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Also keep checkpoints whose step is a multiple of this."""
    keep_best: Text | None = None
    """Also keep the checkpoint with the lowest eval_loss, or with the highest value of another
    metric: eval_accuracy, eval_f1 (kind classification), eval_rewards/accuracies,
    eval_rewards/margins (kind preference), eval_NAME (evaluation.generate)."""
    resume: Text = "auto"
    """auto: resume from the newest valid checkpoint of run.dir, if there is one. never: start from
    scratch. Or the path of a checkpoint to start a new run.dir from; later starts resume from
    run.dir's own checkpoints."""
    allow_changes: StrictBool = False
    """Resume even if data, model, global batch or seed differ from the checkpoint's."""
    asynchronous: StrictBool = True
    """Write checkpoints while training continues."""
    max_failures: PositiveInt = 3
    """Consecutive failed saves (a full disk) that end the run; fewer are logged."""
    export: Literal["at_end"] | None = None
    """at_end: write the final weights as a Hugging Face folder to RUN_DIR/hf."""
    export_dtype: Dtype | None = None
    """Dtype of the exported weights; null: that of the initial checkpoint, else float32."""
    export_merged: StrictBool = False
    """lora: true: export the model with the adapters merged. false: the adapters, for peft."""
    export_base: Literal["original", "quantized"] = "original"
    """lora.quantize: what adapters are merged into. original: the weights of model.path. quantized:
    the rounded weights that they were trained on."""


class Wandb(Section):
    """Weights & Biases."""

    project: Text
    """Project that the run is shown under."""
    mode: Literal["online", "offline"] = "online"
    """offline: written to RUN_DIR/wandb, for `wandb sync`."""
    entity: Text | None = None
    """User or team; null: wandb's default."""
    tags: TextList | None = None
    """Labels of the run."""
    group: Text | None = None
    """Name that related runs share."""


class Logging(Section):
    """Where metrics are written, besides metrics.jsonl and the console."""

    every_steps: PositiveInt = 1
    """Optimizer steps between lines. 1 delays no GPU: a step is logged once the next has begun."""
    wandb: Wandb | None = None
    """{project: NAME, mode: online | offline}."""
    tensorboard: StrictBool = False
    """Write RUN_DIR/tensorboard."""


class Profile(Section):
    """torch.profiler over a few steps: traces and tables of operators in RUN_DIR/profile."""

    start_step: PositiveInt
    """First step to profile, counted over the whole run."""
    steps: PositiveInt
    """Number of steps."""
    ranks: tuple[NonNegativeInt, ...] | None = None
    """Ranks to profile, such as [0, 8]; null: all."""
    warmup: NonNegativeInt = 1
    """Steps before start_step in which the profiler runs and records nothing."""
    memory_snapshot: StrictBool = False
    """CUDA: also RUN_DIR/profile/memory_rank_N.pickle, for pytorch.org/memory_viz."""
