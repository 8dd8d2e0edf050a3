"""What a recipe may contain: a frozen dataclass per section, with a docstring per key.

The sections stand in the order of a recipe. A section inside another stands before it.

pydantic checks values against these classes (`decode.py`) and makes the JSON Schema of them
(`launcher schema`). A key without a default must be given.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt

from launcher.recipe.section import (
    LABEL_SMOOTHING,
    ByteSize,
    Day,
    Dtype,
    Float8,
    Folder,
    FolderName,
    Fraction,
    Function,
    ListOfOne,
    MaybeEmpty,
    Metric,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Processes,
    Seconds,
    Section,
    Share,
    Size,
    StrictFloat,
    TargetLoss,
    Text,
    TextList,
    auto,
    form,
    size_in_bytes,
)
from launcher.sources.layouts import ATTACHMENTS, KINDS, DataKind

DEFAULT_RUN_DIR = "runs/${run.name}"
_NullIsText = BeforeValidator(
    lambda kind: "text" if kind is None else kind, json_schema_input_type=DataKind | None
)


MessagePart = Literal["reasoning", "calls", "answer"]
_PartWeight = Annotated[StrictFloat, Field(ge=0, le=1e6)]
TokenDtype = Literal["uint8", "uint16", "int32", "uint32", "int64", "uint64"]
_ZeroIsNull = BeforeValidator(
    lambda share: None if share == 0 and share is not False else share,
    json_schema_input_type=float | None,
)


class Run(Section):
    """Name, folder, length and safeguards of the run."""

    name: FolderName
    """Name of the run and of its folder."""
    dir: Folder = DEFAULT_RUN_DIR
    """Folder for everything that the run writes; relative to the current folder."""
    seed: Annotated[StrictInt, Field(ge=0, le=2**32 - 1)] = 1234
    """Seed of the initial weights, the order of samples and dropout."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda: a GPU (of ROCm, too) per rank. auto: the same, or CPUs if torch is built without GPU
    support and no rank sees a GPU."""
    deterministic: StrictBool = False
    """true: the same bits on CUDA too, at some cost in speed."""
    timeout: Seconds = 600
    """Seconds that a collective may take after the first step. NCCL's take at least hang_timeout:
    the report of a hang names the rank that is behind."""
    init_timeout: Seconds = 1800
    """Seconds without progress of any rank until the first step is done, while ranks load and
    compile, and in a checkpoint or an export; then the run ends, to be restarted."""
    float32_matmul: Literal["highest", "high", "medium"] = "high"
    """Precision of float32 matrix products on CUDA: highest is float32, high is TF32."""
    max_steps: PositiveInt | None = None
    """Length of the run in optimizer steps; or give epochs."""
    epochs: Annotated[PositiveInt, auto(2)] | None = None
    """Length of the run in passes over the training data; or give max_steps. auto: more of them for
    fewer rows."""
    max_skipped_steps: PositiveInt = 20
    """Consecutive steps, at most all of the run, with gradients that are not finite before
    on_divergence applies; a float16 loss scale causes up to 16."""
    max_loss_ratio: Annotated[PositiveFloat, Field(gt=1)] | None = None
    """A loss above this multiple of the median of the last 10 to 50 logged ones counts as divergence,
    unless one of these is zero or negative; null: only gradients that are not finite."""
    on_divergence: Literal["stop", "rewind"] = "stop"
    """stop: end the run. rewind: resume from the checkpoint before it, without the samples of the
    steps that diverged."""
    hang_timeout: Seconds = 480
    """Seconds without a heartbeat of a rank in a step after which the run logs the ranks that are
    behind and ends, to be restarted."""


class MultiToken(Section):
    """Layers of multi-token prediction (MTP), by which a server guesses further tokens."""

    train: StrictBool = True
    """Train them. false: they stay as they are, and evaluations measure how often they guess right."""
    weight: PositiveFloat = 0.1
    """What their loss counts beside that of the next token: the mean over their depths of the summed
    cross-entropies, divided by the number of targets of the next token (DeepSeek-V3, section 2.2)."""
    detach: StrictBool = True
    """true: hidden states, embedding and output layer get no gradient from this loss, so that the
    gradients of the other weights are those without it. false: it trains the whole model."""
    only: StrictBool = False
    """Train nothing else."""


class Model(Section):
    """Which model, and how it is built."""

    path: Text | None = None
    """Hugging Face checkpoint: a folder or a hub id."""
    config: dict[str, Any] | None = None
    """Or a transformers config: model_type and the fields of its config class. With path, changes
    to the config of the checkpoint, such as {attention_dropout: 0.1}."""
    builder: Function | None = None
    """Or a function of yours, `package.module:function`, that returns a torch.nn.Module."""
    arguments: dict[str, Any] | None = None
    """Keyword arguments of the builder; `${oc.env:NAME}` for a secret, as in data.arguments."""
    task: Literal[
        "causal_lm", "sequence_classification", "reward", "masked_lm", "embedding", "reranker"
    ] = "causal_lm"
    """Class in transformers: AutoModelForCausalLM, AutoModelForSequenceClassification or
    AutoModelForMaskedLM, for data.kind text or tokens; reward: a classifier with one label, which
    scores answers, for data.kind preference. embedding: AutoModel, whose hidden states become a
    vector for each text, for data.kind retrieval; reranker: a classifier with one label, which
    scores a document for a query."""
    bidirectional: StrictBool = False
    """For task embedding: tokens of a decoder also see those after them (BehnamGhader et al., LLM2Vec,
    2024). The export has it as is_causal: false in its config."""
    num_labels: Annotated[PositiveInt, Field(ge=2)] | None = None
    """Classes, for task sequence_classification; null: those of data.labels, else of the config."""
    trust_remote_code: StrictBool = False
    """Run the Python code in model.path, of the model and its tokenizer. It can do whatever you
    can."""
    init: Literal["pretrained", "random"] | None = None
    """Initial weights; null: pretrained with a path, random with a config."""
    attention: Text = "auto"
    """auto: sdpa if transformers has it for the model, else eager. Or any attention name of
    transformers: sdpa, eager, flash_attention_2, ..."""
    compile: StrictBool | Literal["auto"] = False
    """torch.compile each block and the loss; compiled code is kept in data.cache. auto: true on a
    GPU where Triton can compile."""
    chunked_loss: StrictBool = True
    """Compute the loss for a chunk of the vocabulary at a time, without full logits; only if the
    logits are the output of a linear layer."""
    keep_logits: StrictBool | Literal["auto"] = "auto"
    """With the loss in chunks: true keeps the logits of a micro-batch, in the dtype of its products,
    until the backward pass, which otherwise computes them again: 2 bytes x tokens x vocabulary in
    bfloat16, for a quarter of the head's products. The bits are the same. auto: true if by estimate
    15 % of the memory stay free. A loss of distillation computes them again."""
    mlp_tile: PositiveInt | None = None
    """Tokens that the MLP of a block computes at a time; its backward pass computes them again. For
    rows of many tokens: an MLP then keeps its input only, with or without activation checkpointing.
    null: all at once."""
    neftune_noise_alpha: PositiveFloat | None = None
    """NEFTune (Jain et al., 2023): in training, uniform noise of at most this / sqrt(tokens of a row x
    hidden size) on the embeddings. 5 to 15 in the paper. null: none."""
    qat: Literal["int8", "int4"] | None = None
    """Quantization-aware training: the linear layers of the blocks multiply with the numbers that their
    weights have in 8 or 4 bits, and exports have these, for torchao. int8: a scale for each row. int4: for
    each 32 numbers of a row. null: none."""
    router_balance: Literal["global_batch", "micro_batch"] = "global_batch"
    """With output_router_logits: true in the config of a mixture of experts, what its balance loss is
    of. global_batch: of the step's tokens on all ranks, with the shares of the experts in the step
    before. micro_batch: transformers' loss of each micro-batch on a rank, which depends on their size."""
    router_bias_update_rate: NonNegativeFloat = 0.0
    """Of models whose routers add a bias to choose experts (DeepSeek-V3, GLM-4.5, Nemotron-H, ...):
    what the bias of an expert changes by in each step, up if the step's tokens chose it less often than
    the mean, else down. DeepSeek-V3 used 0.001. 0: the biases stay as they are."""
    new_tokens: TextList | None = None
    """Tokens that the tokenizer and the model gain, such as `<tool_call>`; special ones are written
    `<|...|>`. Their rows of the embeddings start as the mean of the others; with lora, they are the
    only rows that are trained."""
    mtp: MultiToken | None = None
    """Train the model's layers of multi-token prediction, which transformers leaves out. null: they
    are copied to exports as they are."""
    freeze: TextList | None = None
    """Parameters that are not trained: patterns of names, such as `model.embed_tokens.*`."""

    @property
    def classifies(self) -> bool:
        """Whether the class in transformers is AutoModelForSequenceClassification."""
        return self.task in ("sequence_classification", "reward", "reranker")

    @property
    def compiles(self) -> bool:
        """`compile`. In a recipe that is not resolved, as a plan's candidates, auto is false."""
        return self.compile is True

    @property
    def keeps_logits(self) -> bool:
        """`keep_logits`. In a recipe that is not resolved, as a plan's candidates, auto is false."""
        return self.keep_logits is True


class Source(Section):
    """One part of a mixture. Its keys that are null have the values of the same keys of data."""

    files: TextList
    """Files, globs, folders, or a hub data set id."""
    weight: PositiveFloat | Literal["size"] = "size"
    """Share in the run: weight / sum of all weights, of what data.mixture_unit says. size, for all
    sources or for none: each epoch has each sequence once."""
    max_epochs: PositiveFloat | None = None
    """How many times the source is used at most. Then the others have its share. null: no limit."""
    loss_weight: PositiveFloat | None = None
    """Weight of the losses of its targets, times that of data.weights_column. null: 1."""
    kind: DataKind | None = None
    """null: data.kind."""
    limit: PositiveInt | None = None
    """Rows that are used at most, the first ones; null: data.limit."""
    text_column: Text | None = None
    """null: data.text_column."""
    messages_column: Text | None = None
    """null: data.messages_column."""
    prompt_column: Text | None = None
    """null: data.prompt_column."""
    response_column: Text | None = None
    """null: data.response_column."""
    chosen_column: Text | None = None
    """null: data.chosen_column."""
    rejected_column: Text | None = None
    """null: data.rejected_column."""
    label_column: Text | None = None
    """null: data.label_column."""
    weights_column: Text | None = None
    """null: data.weights_column."""
    system_column: Text | None = None
    """null: data.system_column."""
    columns: Annotated[dict[Text, Text], Field(min_length=1)] | None = None
    """null: data.columns."""
    ignore_columns: TextList | None = None
    """null: data.ignore_columns."""
    token_dtype: TokenDtype | None = None
    """null: data.token_dtype."""
    end_token: NonNegativeInt | None = None
    """null: data.end_token."""
    prompt_format: Literal["auto", "chat", "text"] | None = None
    """null: data.prompt_format."""
    overlong: Literal["cut", "drop", "error"] | None = None
    """null: data.overlong."""
    query_prompt: str | None = None
    """null: data.query_prompt."""
    document_prompt: str | None = None
    """null: data.document_prompt."""

    def given(self) -> dict[str, Any]:
        """The keys that replace those of data."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        for name in ("files", "weight", "max_epochs", "loss_weight"):
            given.pop(name, None)
        return given


class MixtureStage(Section):
    """Other shares of the sources of a mixture at the beginning of a run."""

    until_step: PositiveInt
    """The last step with these shares."""
    weights: Annotated[dict[Name, NonNegativeFloat], Field(min_length=1)]
    """The weight of each source; 0: it is not used."""


class Data(Section):
    """Training and validation data."""

    kind: Annotated[DataKind, _NullIsText] = "text"
    """If it is null or not given, it follows from the columns of the first row of data.train; where a
    plan has no data, from the other keys. text: documents, for next-token training. tokens: rows of
    input_ids (and labels). chat: messages, loss on the assistant's turns. instruct: prompt and
    response, loss on the response. classification: text and label. preference: prompt, chosen and
    rejected. unpaired: prompt, response, and whether the response is good. retrieval: a query, its
    document and perhaps others, each a text; reranking: the same, with the query in front of each."""
    train: TextList | Annotated[dict[Name, Source], Field(min_length=1)] | None = None
    """Files, globs, folders, also in stores (s3://, gs://, az://, https://, hf://), or a hub data set id
    `owner/name` (`owner/name:split`, `owner/name/config:split[:1000]`). Or a mixture:
    {NAME: {files: [...]}, ...}."""
    mixture_unit: Literal["sequences", "rows", "tokens"] = "sequences"
    """What the weights of a mixture are shares of. Sequences may hold several rows (data.packing)."""
    mixture_stages: Annotated[tuple[MixtureStage, ...], Field(min_length=1)] | None = None
    """Stages in order before the weights of the sources hold, such as [{until_step: 1000, weights: {web:
    1, math: 0}}]; null: none."""
    limit: PositiveInt | None = None
    """Rows of the training data that are used at most, the first ones, of each source of a mixture;
    null: all."""
    validation: TextList | Annotated[dict[Name, TextList], Field(min_length=1)] | None = None
    """Like data.train, for evaluation. Or several sets: {NAME: [...], ...}."""
    validation_split: Annotated[
        Annotated[PositiveFloat, Field(lt=1), auto(0.02)] | None, _ZeroIsNull
    ] = None
    """Without validation: the share of the training documents that is held out for it, the same on
    any number of ranks and after a resume. null or 0: none. Not used if validation is given. auto: a
    tenth of few rows, a fiftieth of many."""
    builder: Function | None = None
    """Instead of train and validation: a function of yours (see launcher/data/custom.py)."""
    arguments: dict[str, Any] | None = None
    """Keyword arguments of the builder. A secret is given as `${oc.env:NAME}`: the run records this
    text, and not the value."""
    tokenizer: Text | None = None
    """`bytes`, a folder with a Hugging Face tokenizer, or a hub id; null: the model's own."""
    sequence_length: Annotated[PositiveInt, Field(ge=2), auto(2048)] = 2048
    """Tokens of a sequence. For kinds preference and unpaired, of a prompt with one answer. For kind
    retrieval, of one text, which is cut to them. auto: as many as the longest row needs, and at most
    4,096."""
    packing: Annotated[StrictBool, auto(True)] = True
    """Fill sequences with several documents, which are kept apart: in attention, positions and
    recurrent layers. For kinds preference and unpaired, the pairs or answers of a step share
    sequences, and for kind retrieval the texts. auto, the same as not given: true, but false if the model cannot keep documents
    apart, or, with batch.global_batch_size or sequence_length: auto, if a step of so few rows has
    fewer tokens than full sequences; the start then gives the reason. true: an error for such a model."""
    token_dtype: TokenDtype | None = None
    """Kind tokens: type of the ids in files that do not say it, such as OLMo's .npy. null: uint16 if the
    vocabulary of the model has at most 65,536 tokens, else uint32."""
    end_token: NonNegativeInt | None = None
    """Kind tokens: the id that ends documents in files that do not say where these end, such as OLMo's
    .npy without .csv.gz; null: the tokenizer's end of text."""
    repeat_in_step: StrictBool = False
    """true: a step may see a row twice, where the batch is larger than the data. false: an error."""
    shuffle: StrictBool = True
    """false: keep the order of the files."""
    similar_lengths: StrictBool = False
    """With packing: false: rows of similar length come together, so that they need little padding: in
    groups of 64, which are shuffled."""
    workers: Processes = 2
    """Loader processes per rank; 0: the rank itself loads."""
    prefetch_factor: PositiveInt = 2
    """Batches that each worker keeps ready."""
    persistent_workers: StrictBool = True
    """Keep the workers of an evaluation running until the next one."""
    pin_memory: StrictBool | None = None
    """Page-locked host memory for the copy to the device; null: if the device is a GPU."""
    columns: Annotated[dict[Text, Text], Field(min_length=1)] | None = None
    """Columns of your data by what they are for, such as {prompt: question, completion: answer}, for
    all kinds; null: by their usual names (docs/reference/data.md). The keys below name single ones."""
    ignore_columns: TextList | None = None
    """Columns that are not used on purpose: they are neither named at the start nor refused."""
    text_column: Text = "text"
    """Column with the document, for kinds text and classification."""
    messages_column: Text | None = None
    """Column of kinds chat, preference and unpaired with a conversation; null: messages,
    conversations, ..."""
    prompt_column: Text | None = None
    """Column of kinds instruct, preference and unpaired; null: prompt, or instruction and input, or
    question, ... Without it, the prompt of kind preference is what both answers begin with."""
    response_column: Text | None = None
    """Column of kinds instruct and unpaired; null: response, completion, output, answer, ..."""
    chosen_column: Text = "chosen"
    """Column of kind preference with the better answer."""
    rejected_column: Text = "rejected"
    """Column of kind preference with the worse answer."""
    prompt_format: Literal["auto", "chat", "text"] = "auto"
    """How a prompt and an answer that are texts are trained. chat: a user's
    and an assistant's turn. text: one text, under Alpaca's headings if the prompt is an instruction.
    auto: chat if the tokenizer has a chat template, or data.chat_template is given."""
    overlong: Literal["cut", "drop", "error"] | None = None
    """What becomes of a row with more than sequence_length tokens. cut: it loses its end; of kinds
    text and tokens, it continues in another sequence. null: drop for kinds chat, instruct,
    preference and unpaired, else cut."""
    margin_column: Text | None = None
    """Column of kind preference with a number, for model.task reward: how much larger the score of
    the better answer should be; null: 0 for all pairs."""
    label_column: Text = "label"
    """Column of kind classification with the class, or of kind unpaired: is the answer good?"""
    labels: TextList | None = None
    """Names of the classes, for kind classification; null: the column holds integers from 0."""
    mask_probability: Annotated[StrictFloat, Field(gt=0, lt=1)] = 0.15
    """For model.task masked_lm: share of the tokens that are predicted. Of these, 80 % are replaced
    by the mask token, 10 % by random tokens, and 10 % stay."""
    weights_column: Text | None = None
    """Column of kinds tokens and chat with the weight of a row, or for kind tokens of each token;
    null: each token with loss counts the same."""
    message_weights: StrictBool = False
    """Kind chat: a message of the assistant may have a weight, such as `weight: 0.5`, which is that of its
    tokens in the loss. false: a weight is 0 or 1."""
    documents: Annotated[PositiveInt, Field(le=1000)] = 8
    """Kinds retrieval and reranking: documents of a row that are used at most, its positive ones first. If it is not given
    and the data is here, as many as one of the first 100 rows has, also of data.validation, up to 8. With packing, a sequence has room
    for a query with so many documents, of sequence_length tokens each."""
    query_prompt: str | None = None
    """Kind retrieval: text in front of each query, such as `query: `; the column `prompt` of a row
    replaces it. null: that which the model has (config_sentence_transformers.json), or none. Kind
    reranking: the {instruction} of pair_template."""
    document_prompt: str | None = None
    """Kind retrieval: text in front of each document. null: as query_prompt."""
    pair_template: Text | None = None
    """Kind reranking: a text with {query}, {document} and perhaps {instruction}, which is computed for each
    document; qwen3: that of Qwen3-Reranker. null: the tokenizer's own form of two texts, such as BERT's,
    or else `Query: {query}\\nDocument: {document}`."""
    loss_weights: Annotated[dict[MessagePart, _PartWeight], Field(min_length=1)] | None = None
    """Kind chat: weights in the loss of the parts of an assistant's message, such as {reasoning: 0.2,
    calls: 1, answer: 1}: of its reasoning, its calls of tools and its content. 0: no loss. A part that is
    not named has 1. They multiply data.message_weights and data.weights_column. null: all have 1."""
    system_column: Text | None = None
    """Column with the system prompt, for kinds with a conversation or a prompt; null: system,
    system_prompt, ..."""
    system: Text | None = None
    """System prompt of rows that have none, for kinds with a conversation or a prompt; null: none."""
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """For kinds chat and instruct. assistant: loss on all answers. last: on the last answer of a
    row. all: on every token, also of prompts."""
    chat_template: Text | None = None
    """Name of a chat template, such as chatml, llama3 or qwen3, or a file with one in Jinja, for kinds
    with a conversation or a prompt; null: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Values for the chat template, such as {enable_thinking: false}. Serve the model with the same ones."""
    date: Day | None = None
    """What a chat template prints as today's date (YYYY-MM-DD); null: the day (UTC) of the run's first start."""
    on_error: Literal["fail", "skip"] = "fail"
    """For rows that cannot be used; skip: list them in RUN_DIR/skipped_rows.jsonl."""
    max_document: ByteSize = "64MiB"
    """The largest document, line or row, without compression; larger ones cannot be used (on_error).
    Tokenizing a document takes many times its size as memory, in each process."""
    processes: Annotated[Processes, Field(ge=1)] | None = None
    """Processes that tokenize on each node; null: one per core."""
    streaming: StrictBool = False
    """Tokenize while training, shard by shard, for sets larger than the disk."""
    shard_size: ByteSize = "256MiB"
    """With streaming: about how much of the files a shard holds. At most three shards are tokenized on
    the disk of a node, each in about as many bytes: that which is read, the next, and the one before."""
    cache: Folder | None = None
    """Folder of tokenized data, measurements and compiled code; null: $XDG_CACHE_HOME/launcher or
    ~/.cache/launcher."""

    @property
    def batch_unit(self) -> Literal["pairs", "answers", "queries", "sequences"]:
        """What a batch counts."""
        kind = KINDS[self.kind]
        if kind.learned == "texts":
            return "queries"
        if kind.learned != "whole answers":
            return "sequences"
        return "pairs" if len(kind.answers) == 2 else "answers"

    @property
    def joins_rows(self) -> bool:
        """Whether pairs, answers or the texts of queries of a step share the rows of the model. A batch
        counts them, and not the rows."""
        return self.packing and self.batch_unit != "sequences"

    @property
    def row_length(self) -> int:
        """Most tokens of a row of the model: `sequence_length`, or of kind preference twice as many,
        for both answers of a pair, each with its prompt; of kind retrieval, with packing, as many as
        a query and its documents have."""
        texts = {"pairs": 2, "queries": 1 + self.documents if self.packing else 1}
        return self.sequence_length * texts.get(self.batch_unit, 1)

    @property
    def drops_overlong(self) -> bool:
        """Whether rows that are too long are skipped."""
        if self.overlong is None:
            return KINDS[self.kind].templated
        return self.overlong == "drop"

    @property
    def max_document_bytes(self) -> int:
        """`max_document` in bytes."""
        size = size_in_bytes(self.max_document)
        assert size is not None
        return size

    @property
    def shard_bytes(self) -> int:
        """`shard_size` in bytes."""
        size = size_in_bytes(self.shard_size)
        assert size is not None
        return max(1, size)

    def sources(self) -> "dict[str, Data]":
        """The settings of each source of a mixture, each with its files in `train`; without a
        mixture these settings, under no name."""
        if not isinstance(self.train, dict):
            return {"": self}
        return {
            name: replace(self, train=source.files, **source.given())
            for name, source in self.train.items()
        }


class Batch(Section):
    """Sequences of a step. Accumulation follows from the sizes and the number of ranks."""

    global_batch_size: Annotated[PositiveInt, auto(32)]
    """Sequences per optimizer step, over all ranks. Kind preference: pairs; kind unpaired: answers.
    auto: so many that a pass over the data has enough steps to learn from."""
    micro_batch_size: PositiveInt | Literal["auto"] | None = None
    """Sequences per rank and forward pass; auto: the fastest size that fits by the memory plan. For
    kinds preference and unpaired with packing: pairs or answers of data.sequence_length; of shorter
    ones there are more, in as many tokens."""
    micro_batch_tokens: PositiveInt | None = None
    """Instead of micro_batch_size, with packing: false, or kinds preference and unpaired: tokens per
    rank and forward pass, padding included. Sequences of similar length are put together."""


class MixedPrecision(Section):
    """Lower precision of compute and reduction. Master weights stay float32; for the optimizer
    state see optimizer.state_dtype."""

    param_dtype: Dtype = "bfloat16"
    """ddp: the autocast dtype; fsdp: unsharded weights and compute."""
    reduce_dtype: Dtype = "float32"
    """fsdp: gradient reduction; ddp reduces in float32."""
    float8: Float8 | None = None
    """Products of the blocks' linear layers in float8, by torchao's recipe of this name: all three
    (rowwise), or all but the weights' gradients (rowwise_with_gw_hp). null: off."""


class CpuOffload(Section):
    """Parameters, gradients and optimizer state, or only the last, are not in GPU memory."""

    what: Literal["all", "optimizer"] = "all"
    """all: parameters, gradients, optimizer state. optimizer: its state, streamed by each step."""
    pin_memory: StrictBool = True
    """Page-locked, for copies that overlap with compute; used if the device is a GPU."""
    optimizer_path: Folder | None = None
    """Folder on a local disk for the optimizer state, in place of host memory; a file per rank."""


class Strategy(Section):
    """How model and gradients are distributed over the ranks."""

    kind: Literal["ddp", "fsdp", "auto"] = "fsdp"
    """ddp: every rank holds the model. fsdp: parameters, gradients and optimizer state are sharded.
    auto: the fastest that fits by the memory plan, together with activation_checkpointing."""
    mixed_precision: MixedPrecision | None = MixedPrecision()
    """null: float32 throughout."""
    shard_optimizer: StrictBool = False
    """ddp: each rank holds the optimizer state of its share of the parameters, and updates them
    (ZeRO-1). fsdp does so anyway."""
    reshard_after_forward: StrictBool | Literal["auto"] = "auto"
    """fsdp; true: free a block's unsharded weights after its forward pass (ZeRO-3). false: keep
    them until its backward pass (ZeRO-2). auto: false if that leaves 15 % of the memory free, by
    estimate."""
    reshard_after_backward: StrictBool = True
    """fsdp; false: weights stay unsharded from the first to the last micro-batch of a step: faster,
    more memory."""
    cpu_offload: CpuOffload | None = None
    """fsdp: {what: all} keeps the shards in host memory, {what: optimizer} the optimizer state."""
    replicate: PositiveInt = 1
    """fsdp: copies of the sharded model (hybrid sharding); 1: shard over all ranks."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages that hold neighbouring blocks. Each stage is trained by this part of the ranks, and passes
    activations on to the next one (`docs/strategies.md`)."""
    pipeline_schedule: Literal["1f1b", "interleaved_1f1b"] = "1f1b"
    """1f1b: a rank has one stage. interleaved_1f1b: a rank has two, of half the blocks; ranks wait half
    as long for each other, and exchange twice as much."""
    pipeline_blocks: tuple[PositiveInt, ...] | None = None
    """The number of blocks of each stage, in order. null: the stages compute about equally long. The
    first stages need most memory for activations: `launcher plan` says where fewer blocks let them
    fit."""
    context_parallel_size: PositiveInt = 1
    """Context parallel ranks: each computes a part of the tokens of the same sequences and, in
    attention, a part of the heads (Ulysses). fsdp shards parameters over them too. 1: off."""
    context_parallel_ring: PositiveInt | None = None
    """Groups of context parallel ranks that have different tokens also in attention, and exchange keys
    and values (ring attention). Only the ranks of a group divide the heads. null: as few groups as
    the model's heads allow."""
    expert_parallel_size: PositiveInt = 1
    """fsdp: expert parallel ranks, which hold different experts of each layer; tokens are sent to
    their experts. The other parameters are sharded over them. 1: off."""
    tensor_parallel_size: PositiveInt = 1
    """fsdp: tensor parallel ranks: neighbours, each of which holds a part of each layer, and which
    compute the same tokens. The sizes that work depend on the model's heads. 1: off."""
    sync_every_micro_batch: StrictBool | Literal["auto"] = "auto"
    """true: reduce gradients after each micro-batch (less memory). false: after the last (less
    traffic). auto: false with ddp, and with fsdp if that leaves 15 % of the memory free."""

    @property
    def reshards_after_forward(self) -> bool:
        """`reshard_after_forward`. In a recipe that is not resolved, as a plan's candidates, auto is
        true: it needs less memory."""
        return self.reshard_after_forward is not False

    @property
    def stages_of_rank(self) -> int:
        """The number of stages of a pipeline that each rank has."""
        return 2 if self.pipeline_schedule == "interleaved_1f1b" else 1

    @property
    def syncs_every_micro_batch(self) -> bool:
        """`sync_every_micro_batch`. In a recipe that is not resolved, as a plan's candidates, auto is
        true with fsdp, whose gradients would be whole until the last micro-batch, and false with
        ddp, where they always are."""
        if self.sync_every_micro_batch == "auto":
            return self.kind != "ddp"
        return self.sync_every_micro_batch


class ActivationCheckpointing(Section):
    """Activations that are recomputed in the backward pass instead of kept."""

    mode: Literal["full", "all_but_attention", "selective"] = "full"
    """full: keep only the input of a block. all_but_attention: also the outputs of attention, which are
    most of the work for rows of 100,000 tokens and more. selective: these and the outputs of every other
    matrix product, or those within the budget."""
    budget: Size | Share | None = None
    """selective: memory that blocks may keep for the backward pass of a micro-batch: a size, such
    as 40GiB, or a share of what they keep without checkpointing. The most expensive operators that
    fit are kept. null: see mode."""
    every_n_blocks: PositiveInt = 1
    """Checkpoint every n-th block."""
    offload_to_cpu: StrictBool = False
    """Keep the inputs of these blocks in host memory, with copies beside compute."""


class Images(Section):
    """Images in the rows, for a model of images and text."""

    train: Literal["none", "projector", "all"] = "none"
    """What is trained beside the text model: nothing, the projector from images to its embeddings,
    or also the image tower. With lora, which freezes all else, lora.modules_to_save names modules to
    train whole."""
    learning_rate_ratio: PositiveFloat = 1.0
    """Learning rate of these parts over that of the text model."""
    max_pixels: PositiveInt | None = None
    """Larger images are scaled down to this number of pixels, for processors with such a limit
    (Qwen); null: their own."""
    folder: Folder | None = None
    """Where relative paths of images start; null: at the folder of the row's file."""
    coordinates: Literal["pixels", "thousandths", "fractions"] | None = None
    """What the coordinates in the texts of rows are, such as bbox_2d: pixels of the image's file,
    thousandths of its width and height, or parts of them from 0 to 1. They become what the model was
    trained with. null: they stay as they are."""


class Videos(Section):
    """Videos in the rows, for a model of images and text that also takes videos."""

    train: Literal["none", "projector", "all"] = "none"
    """What is trained beside the text model, as in the section images. Images and videos have one
    tower: with both sections the values agree."""
    learning_rate_ratio: PositiveFloat = 1.0
    """Learning rate of these parts over that of the text model."""
    fps: PositiveFloat | None = None
    """Frames that are taken of a second of a video; null: as the model's processor says, and 2 where
    it takes all of them (Qwen2-VL, Qwen2.5-VL)."""
    max_frames: PositiveInt | None = None
    """Frames that are taken of a video, at most; null: as the model's processor says."""
    max_pixels: PositiveInt | None = None
    """Larger videos are scaled down to this number of pixels, as the model's processor counts them: of
    a frame (Qwen2-VL, Qwen2.5-VL), or of all frames together (Qwen3-VL, Qwen3.5); null: its own."""
    folder: Folder | None = None
    """Where relative paths of videos start; null: at the folder of the row's file."""


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
    init: Literal["default", "pissa", "olora"] = "default"
    """First values of new adapters. default: A is random, B is zero. pissa: the part of a weight with
    the largest singular values (Meng et al., 2024); olora: the first columns of its QR decomposition
    (Büyükakyüz, 2024). These parts are taken from the frozen weights, so exports are merged."""
    b_ratio: PositiveFloat = 1.0
    """Learning rate of an adapter's B over that of all else (LoRA+: Hayou et al., 2024)."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input."""
    target_modules: MaybeEmpty | None = None
    """Linear layers that get an adapter: ends of names, such as q_proj, or patterns of whole names,
    such as `model.layers.1?.*`. all-linear: all but the output layer, and all experts. null: all
    those of the blocks. []: none, with target_parameters."""
    target_parameters: MaybeEmpty | None = None
    """Weights of experts that get an adapter for each expert: names as above, such as
    experts.down_proj. null: all of them where they hold more than half of the parameters and
    target_modules is null, else none. []: none."""
    modules_to_save: TextList | None = None
    """Modules that are trained whole, such as embed_tokens and lm_head: names as above."""
    path: Folder | None = None
    """Folder of a trained adapter (of peft) to continue from. rank, alpha, rank_stabilized, dora,
    target_modules, target_parameters and modules_to_save are its own. null: new adapters."""
    quantize: Literal["nf4"] | None = None
    """nf4: hold the frozen linear layers and experts of the blocks in 4 bits (QLoRA: Dettmers et
    al., 2023). null: in param_dtype."""


WITHOUT_REFERENCE = ("simpo", "orpo")
"""Values of preference.loss that do not compare with the initial weights."""


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


class Distillation(Section):
    """Training on what a teacher predicts: the loss of a token is (1 - weight) * cross-entropy +
    weight * temperature^2 * KL(teacher, model) (Hinton et al., 2015)."""

    teacher: Text | None = None
    """Hugging Face checkpoint: a folder or a hub id. If its tokenizer is another one than the model's,
    predictions are compared where both tokenizers end a token."""
    teachers: Annotated[dict[Name, Text], Field(min_length=1)] | None = None
    """Several of them by name, in place of teacher. Each row has one: that with the name of its source
    in the mixture data.train, or in the column teacher_column."""
    teacher_column: Text | None = None
    """Column of the rows with the name of the teacher; null: of the source. Not `sample`, `answer`,
    `input_ids` or `labels`, which are columns of rounds."""
    top_k: PositiveInt = 64
    """Most probable tokens that are kept of each prediction, at 8 bytes. All others count as one
    token, whose probability is the sum of theirs."""
    temperature: Annotated[StrictFloat, Field(ge=0.01, le=100)] = 1.0
    """Divides the logits of both models in the KL divergence. Below 0.01, nearly all probability is
    that of the largest logit, and rounding errors, which are divided by it too, grow until the loss
    is not finite. With much more than 100, rounding would exceed the divergence."""
    weight: Share = 0.5
    """Weight of the KL divergence."""
    rounds: PositiveInt = 1
    """Parts of the run with about as many steps each. Before a round, its rows get answers, and the
    teacher predicts their tokens. With answers: data there is one round, before the first step."""
    answers: Literal["data", "student", "endpoint", "folder"] = "data"
    """What is trained: the answers in the rows, or others to their prompts. student: of the model as it
    is before the round. endpoint: of a server that speaks OpenAI's API, such as vLLM. folder: of
    files that you write, one for each round."""
    answer_temperature: Annotated[StrictFloat, Field(ge=0, le=10)] = 1.0
    """Temperature at which answers of student and endpoint are drawn; 0: the most likely tokens."""
    max_new_tokens: PositiveInt = 256
    """Tokens of the longest answer of student and endpoint. With its prompt, an answer has at most
    data.sequence_length tokens."""
    endpoint: Text | None = None
    """URL of the server up to the version, such as http://localhost:8000/v1. A key is read from the
    environment variable OPENAI_API_KEY, and recorded nowhere."""
    endpoint_model: Text | None = None
    """Name of the model at the server; null: the first one that it lists."""
    folder: Text | None = None
    """Folder with round_0001.jsonl and so on: a line {"sample": number, "answer": text} for each
    prompt in RUN_DIR/rounds/round_0001_prompts.jsonl."""

    def paths(self) -> dict[str, str]:
        """The teachers by name; that of the key teacher has none."""
        return {"": self.teacher} if self.teacher is not None else dict(self.teachers or {})

    @staticmethod
    def key_of(name: str) -> str:
        """The key of the recipe with the teacher of this name."""
        return f"distillation.teachers.{name}" if name else "distillation.teacher"


class Kto(Section):
    """Training on answers that are good or not, without pairs (data.kind: unpaired): KTO
    (Ethayarajh et al., 2024) with a reference point of 0. Each answer counts the same."""

    beta: PositiveFloat = 0.1
    """Scale of the rewards: larger values stay closer to the initial weights."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of the losses of good answers."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of the losses of other answers. The authors advise weights that, times the numbers of
    such answers, have a ratio of 1 to 4/3."""


class Embedding(Section):
    """Training of vectors of texts (model.task: embedding). Losses and gradients are those of the
    global batch, whatever the micro-batches and ranks."""

    loss: Literal["infonce", "cosine", "cosent", "triplet", "margin_mse", "kl"] = "infonce"
    """infonce: cross-entropy of the similarities of a query with all documents of the global batch. For
    rows with scores: cosine: squared difference of similarity and score; cosent: pairs in the order of
    their scores. triplet: each negative is to be farther than the positive by triplet_margin. For rows
    with scores by a teacher: margin_mse: differences of the scores; kl: their distribution."""
    pooling: Literal["auto", "last", "mean", "first"] = "auto"
    """What the vector of a text is made of: the hidden state of its last token, of its first, or the
    mean over its tokens. auto: as the model in model.path says (1_Pooling/config.json), else last, or
    mean if tokens see those after them."""
    normalize: StrictBool = True
    """Divide vectors by their norms, so that similarities are cosines."""
    temperature: PositiveFloat = 0.05
    """Divides the similarities, in infonce, cosent and kl."""
    triplet_margin: PositiveFloat = 0.3
    """For loss: triplet, with the distance 1 - similarity."""
    false_negative_margin: Annotated[StrictFloat, Field(ge=0)] | None = None
    """For loss: infonce: a document that is nearer to the query than its positive one by more than this
    is not counted as a negative (0.1 in Qwen3-Embedding). null: all others count."""
    matryoshka: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """Sizes of vectors: the loss is the mean of those of the first so many numbers of each vector, so
    that a vector can be cut to them. null: of whole vectors only."""


class Reranker(Section):
    """Training of scores of documents for a query (data.kind: reranking): by a classifier with one label
    (model.task: reranker), or by the next token of a language model (model.task: causal_lm)."""

    loss: Literal["binary", "list"] = "binary"
    """binary: the cross-entropy of each document being a positive one, or of its score in the data, from 0
    to 1. list: the cross-entropy of the documents of a query, by the softmax of their scores."""
    positive_answer: Text = "yes"
    """For task causal_lm: the token that a positive document is answered with."""
    negative_answer: Text = "no"
    """For task causal_lm: the token that another document is answered with. A document's score is the
    difference of their logits."""


class Objective(Section):
    """A loss on the targets of text data in place of the cross-entropy (see
    launcher/objectives/target_loss.py)."""

    loss: TargetLoss
    """label_smoothing: a part of the probability of a target goes to all tokens alike (Szegedy et al.,
    2016), {amount: 0.1} in arguments. Or a function of yours, `package.module:function`: gets the
    log-probabilities of the targets, (targets,), and returns the loss of each; with the attribute
    needs = "logits": gets logits and targets."""
    arguments: dict[str, Any] | None = None
    """Further keyword arguments of the function; `${oc.env:NAME}` as in data.arguments."""

    @property
    def own(self) -> bool:
        """Whether the loss is a function of the user's."""
        return self.loss != LABEL_SMOOTHING


class ParameterGroup(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    patterns: TextList
    """Names of parameters, such as `model.embed_tokens.*`. The first group that matches a parameter
    counts."""
    learning_rate_ratio: PositiveFloat = 1.0
    """Learning rate of these parameters over that of all else."""
    weight_decay: NonNegativeFloat | None = None
    """Of the matrices among them; null: optimizer.weight_decay."""


class Optimizer(Section):
    """The optimizer; weight decay on matrices and embeddings, not on norms, biases and rates."""

    name: Literal["adamw", "sgd", "adafactor", "muon", "lion", "schedule_free_adamw"] = "adamw"
    """adamw: Loshchilov and Hutter, 2019. sgd: with momentum. adafactor: Shazeer and Stern, 2018;
    its learning rate is relative to the root mean square of a parameter. muon: Jordan et al., 2024,
    for the matrices of the blocks; adamw for the rest, with the same learning rate. lion: Chen et al.,
    2023; its learning rate is a third to a tenth of adamw's, its betas usually [0.9, 0.99].
    schedule_free_adamw: Defazio et al., 2024; with schedule.kind: constant, and a larger learning rate.
    Evaluations and exports have the averaged weights."""
    learning_rate: Annotated[NonNegativeFloat, auto(1.0e-5)] = 2.0e-5
    """Peak learning rate. auto, which is the default with a section lora: by the width of the model;
    for adapters more."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """adamw, muon: decay rates of adamw's two moments. lion: of the momentum in the update, and of the
    momentum. schedule_free_adamw: the share of the average in the trained weights, and the decay rate
    of the second moment."""
    eps: PositiveFloat = 1.0e-8
    """adamw, muon, schedule_free_adamw: added to adamw's denominator."""
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """adamw, muon: dtype of adamw's moments, for parameters with two dimensions or more. bfloat16:
    rounded stochastically. int8: with a scale for each block of 256 numbers."""
    momentum: Fraction = 0.9
    """sgd, muon: decay rate of the momentum. sgd, 0: no momentum, and no state."""
    weight_decay: NonNegativeFloat = 0.1
    """For parameters with two dimensions or more; decoupled, but with sgd added to the gradient."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(min_length=1)] | None = None
    """Parameters with other values: [{patterns: [model.embed_tokens.*], learning_rate_ratio: 0.1,
    weight_decay: 0}, ...]; null: none."""
    layer_decay: Annotated[StrictFloat, Field(gt=0, le=1)] | None = None
    """Each block's learning rate over that of the block after it, such as 0.9. What follows the blocks
    has the whole rate, and the embeddings the smallest. It multiplies the ratios of groups. null: none."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip gradients to this global 2-norm; null: never."""
    ema: Annotated[StrictFloat, Field(gt=0, lt=1)] | None = None
    """Decay rate, such as 0.999, of a moving average of the trained weights, in float32, for
    evaluation.ema and `launcher export weights=ema`; null: none."""

    @property
    def schedule_free(self) -> bool:
        """Whether evaluations and exports have the averages of the optimizer itself."""
        return self.name == "schedule_free_adamw"

    @property
    def averages(self) -> bool:
        """Whether the optimizer's state has averages of the weights."""
        return self.schedule_free or self.ema is not None


class Schedule(Section):
    """The learning rate over the run."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up; wsd: constant, then linear decay over decay_steps."""
    warmup_steps: Annotated[NonNegativeInt, auto(100)] = 100
    """Steps of linear warm-up; the first step has learning_rate / warmup_steps. auto: a twentieth of
    the run, and at most 100."""
    warmup_ratio: Annotated[StrictFloat, Field(gt=0, le=1)] | None = None
    """In place of warmup_steps: this share of the run's steps, rounded up; null: warmup_steps."""
    min_ratio: Share = 0.1
    """Learning rate of the last step, as a part of the peak."""
    decay_steps: PositiveInt | None = None
    """wsd: steps of decay at the end; null: a tenth of the run."""


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

    every_steps: Annotated[PositiveInt, auto(100)] | None = 200
    """Optimizer steps between evaluations; the last step is always evaluated. null: only that. auto:
    those of an epoch, and at most 100."""
    every_epochs: PositiveFloat | None = None
    """Instead of every_steps: epochs between evaluations, such as 0.25 for four in each epoch."""
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

    every_steps: Annotated[PositiveInt, auto(200)] | None = 500
    """Optimizer steps between checkpoints. One is also written when the run is stopped or ends.
    null: no checkpoints, unless every_epochs is given. auto: those of an epoch, and at most 200."""
    every_epochs: PositiveFloat | None = None
    """Instead of every_steps: epochs between checkpoints, such as 0.5 for two in each epoch."""
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
    copy_to: Text | None = None
    """A folder of an object store, such as s3://BUCKET/runs/${run.name} (gs://, az://), or of another
    file system. Checkpoints are copied there while training continues, and a start whose run.dir does
    not have the newest one resumes from it: on another machine, too."""
    copy_bandwidth: ByteSize | None = None
    """Bytes a second that copies may send, such as 200MB. null: no limit."""
    export: Literal["at_end", "best"] | None = None
    """Write weights as a Hugging Face folder to RUN_DIR/hf when the run ends. at_end: those of the
    last step. best: those of the best checkpoint (keep_best)."""
    export_dtype: Dtype | None = None
    """Dtype of the exported weights; null: that of the initial checkpoint, else float32."""
    export_merged: StrictBool = False
    """lora: true: export the model with the adapters merged. false: the adapters, for peft."""
    export_base: Literal["original", "quantized"] = "original"
    """lora.quantize: what adapters are merged into. original: the weights of model.path. quantized:
    the rounded weights that they were trained on."""

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints."""
        return self.every_steps is not None or self.every_epochs is not None

    @property
    def copy_bytes(self) -> int | None:
        """`copy_bandwidth` in bytes."""
        return None if self.copy_bandwidth is None else size_in_bytes(self.copy_bandwidth)


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
    tracker: Function | None = None
    """A function of yours, `package.module:function`, for other trackers such as MLflow: it returns
    an object with the methods write and close (docs/metrics.md)."""


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


# Types of the keys of section slurm
_Line = Annotated[
    str, form(r"[^\x00-\x1f\x7f]+", "holds a character that cannot be written in a job script")
]
_Option = Annotated[
    str, form(r"--?[a-zA-Z][\w-]*(=[^\x00-\x1f\x7f]*)?", "must be options, --name or --name=value")
]
_Options = Annotated[tuple[_Option, ...], Field(min_length=1), ListOfOne]
_MOST_NODES = 99_999
_Nodes = Annotated[
    str,
    form(r"[1-9][0-9]{0,4}(-[1-9][0-9]{0,4})?", "must be a number, or a range such as 2-4"),
]
_Memory = Annotated[
    str, form(r"[0-9]{1,15}[KMGTkmgt]?", "must be a number with K, M, G or T, such as 500G")
]
_TIME = r"(?i)N+(:N+){0,2}|N+-N+(:N+){0,2}|UNLIMITED|INFINITE".replace("N+", "[0-9]{1,9}")
_Time = Annotated[str, form(_TIME, "must be minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS")]
_Variable = Annotated[
    str, form(r"[A-Za-z_][A-Za-z0-9_]*", "must be the name of an environment variable")
]


class Slurm(Section):
    """What `launcher submit` requests from Slurm. Its arguments win: `submit time=1:30:00`."""

    nodes: Annotated[PositiveInt, Field(le=_MOST_NODES)] | _Nodes = 1
    """Nodes; "2-4": as many of them as are free, another number after each requeue."""
    train_nodes: PositiveInt | None = None
    """Of the nodes, how many train. The others are spare: one takes the place of a node that is unfit
    or lost, in the same allocation. null: all."""
    gpus_per_node: PositiveInt | None = None
    """GPUs per node; null: the ranks compute on the CPU."""
    ranks_per_node: PositiveInt | None = None
    """Ranks per node; null: one per GPU, or one."""
    cpus: PositiveInt | None = None
    """CPUs per node (sbatch --cpus-per-task); null: the partition's default."""
    host_memory: _Memory | None = None
    """Host memory per node (sbatch --mem): 500G; "0": all; null: the partition's default."""
    time: _Time | None = None
    """Time limit of one allocation, in quotes: "12:00:00"; null: the partition's. The job continues
    in another allocation."""
    partition: _Line | None = None
    """sbatch --partition."""
    account: _Line | None = None
    """sbatch --account."""
    qos: _Line | None = None
    """sbatch --qos."""
    constraint: _Line | None = None
    """sbatch --constraint."""
    exclude: _Line | None = None
    """Nodes to exclude (sbatch --exclude)."""
    reservation: _Line | None = None
    """sbatch --reservation."""
    mail: _Line | None = None
    """Address for mail when the job ends, fails or is requeued."""
    sbatch_extra: _Options | None = None
    """Other options of sbatch, such as --exclusive."""
    srun_extra: _Options | None = None
    """Other options of the srun that starts the ranks, such as --container-image=IMAGE."""
    setup: TextList | None = None
    """Lines of bash that prepare the environment of all nodes: module load, source .../activate.
    They run on the first node."""
    environment: Annotated[dict[_Variable, Text], Field(min_length=1)] | None = None
    """Environment variables, set after setup: {NCCL_IB_HCA: mlx5}."""
    interface: _Line | None = None
    """Network interface of NCCL, gloo and the rendezvous, such as ib0; null: chosen by them."""
    python: _Line | None = None
    """Python of the ranks; null: the one that runs `launcher submit`."""
    max_restarts: NonNegativeInt = 3
    """Restarts within an allocation (torchrun --max-restarts)."""
    max_failures: PositiveInt = 3
    """Consecutive failures without a new checkpoint after which the job is not requeued."""
    lead: Seconds | None = None
    """Seconds before the time limit when the run is asked to save; null: at least twice the
    measured time of a step and a save."""
    preflight: StrictBool = False
    """Check every node before training (launcher doctor --node), then all together; a spare node takes
    the place of a bad one, else it is excluded and the job requeued."""


class Recipe(Section):
    """One run. Each key is described at its section's class."""

    run: Run
    model: Model
    data: Data
    batch: Batch
    strategy: Strategy = Strategy()
    activation_checkpointing: ActivationCheckpointing | None = None
    """Activations that are recomputed in the backward pass; null: none."""
    images: Images | None = None
    """Rows may have images; null: rows are text, also for a model of images and text."""
    videos: Videos | None = None
    """Rows may have videos; null: they have none."""
    lora: Lora | None = None
    """Train low-rank adapters and freeze all else; null: train everything."""
    preference: Preference | None = None
    """The loss on pairs of answers; null: data.kind is not preference, or model.task is reward."""
    kto: Kto | None = None
    """The loss on answers that are good or not; null: data.kind is not unpaired."""
    embedding: Embedding | None = None
    """The loss on vectors of texts, for model.task: embedding; null: its defaults."""
    reranker: Reranker | None = None
    """The loss on scores of documents, for data.kind: reranking; null: its defaults."""
    distillation: Distillation | None = None
    """Train on the predictions of a teacher; null: on the tokens of the data only."""
    objective: Objective | None = None
    """Label smoothing, or a loss of yours; null: the cross-entropy."""
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    profile: Profile | None = None
    """torch.profiler over a few steps; null: off."""
    slurm: Slurm | None = None
    """What `launcher submit` requests from Slurm; null: its arguments and the defaults."""

    @property
    def attachments(self) -> dict[str, Images | Videos]:
        """The sections about what rows have beside text that are not null, by kind."""
        sections = ((kind, getattr(self, name)) for kind, name in ATTACHMENTS.items())
        return {kind: section for kind, section in sections if section is not None}

    def own_functions(self) -> dict[str, str]:
        """The functions of the user that build what the recipe trains, by their keys."""
        named = {"model.builder": self.model.builder, "data.builder": self.data.builder}
        if self.objective is not None and self.objective.own:
            named["objective.loss"] = self.objective.loss
        return {key: name for key, name in named.items() if name is not None}

    def uses_one_rank(self, ranks: int) -> bool:
        """Whether the strategy for one rank (`strategies/one_rank.py`) takes the place of DDP or
        FSDP on this number of ranks.

        With fsdp, its copies of all weights need as much memory as weights that stay unsharded
        between the forward and the backward pass. So `reshard_after_forward: true` keeps FSDP,
        which copies one block at a time, unless there is nothing to copy: in float32, and with
        adapters, whose frozen weights are in the compute dtype. With ddp, a model of the user's own
        may need autocast, because it may create tensors in float32.
        """
        strategy = self.strategy
        mixed, offload = strategy.mixed_precision, strategy.cpu_offload
        if ranks > 1 or (offload is not None and offload.what == "all"):
            return False
        if mixed is None or mixed.param_dtype == "float32":
            return True
        if strategy.kind == "ddp":
            return self.model.builder is None
        return self.lora is not None or strategy.reshard_after_forward is False
