"""The model that `launcher chat` talks with: loads a stored model, and generates its answers.

transformers generates them, with a cache of keys and values, in one process. `cli/chat.py` is the
command: its arguments and the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launcher.checkpoint.export import (
    StoredModel,
    base_of_adapter,
    open_checkpoint_weights,
    open_exported_weights,
    prompts_of,
    recipe_of,
)
from launcher.data.attachment_inputs import MODALITIES, ModelAttachments, own_attachments
from launcher.data.chat_template import ChatTemplate, template_of
from launcher.data.collation import RowInputs
from launcher.data.encoder import make_encoder
from launcher.data.loader import to_device
from launcher.data.messages import Message, prompt_of
from launcher.data.modality import Modality
from launcher.data.run_data import set_stop_tokens
from launcher.data.template_source import today, uses_date
from launcher.data.token_store import one_document
from launcher.data.tokenizer import (
    Tokenizer,
    hugging_face_tokenizer,
    load_tokenizer,
    tokenizer_name,
)
from launcher.errors import RecipeError, RowError
from launcher.models.description import text_config
from launcher.models.hugging_face_files import end_ids
from launcher.models.safetensors_files import ADAPTER_CONFIG
from launcher.recipe import schema
from launcher.recipe.decode import shown
from launcher.recipe.load import recorded_recipe
from launcher.sources.layouts import ATTACHMENTS, KINDS, with_article

_COLDEST = 1e-4
"""At a lower temperature the most likely token is taken: logits / temperature could overflow."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int
    temperature: float
    """0: the most likely token."""
    top_p: float
    """Only the most likely tokens with this probability together."""


class ChatModel:
    """A stored model with its tokenizer and chat template, which continues conversations."""

    def __init__(
        self,
        stored: StoredModel,
        tokenizer: str,
        template: ChatTemplate | None,
        system: str | None,
        modalities: Iterable[Modality],
    ) -> None:
        """Without a template it completes texts. system: the run's system prompt. modalities: how it
        sees attachments, if it takes any."""
        self.template, self.system = template, system
        self._attachments, self._why_none = ModelAttachments(), ""
        try:
            self._attachments = own_attachments(stored.model, modalities)
        except RecipeError as error:  # such as a package that is missing; it still reads text
            self._why_none = str(error)
        self._decoder: Any = hugging_face_tokenizer(tokenizer)
        self._tokenizer: Tokenizer = load_tokenizer(tokenizer)
        self._stored, self._model = stored, stored.model

    def load(self, device: torch.device) -> None:
        """Loads the weights: in bfloat16 on a GPU, else in float32."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._model = self._stored.load(device, dtype=dtype)

    def format_text(self, system: str | None) -> str:
        """What a line becomes: the prompt of a first turn, or a text that is completed."""
        if self.template is None:
            return "no chat template; each line is completed, as texts were trained"
        turns = [{"role": "user", "content": "LINE"}]
        start = [{"role": "system", "content": system}] if system else []
        try:
            prompt = self.template.apply([*start, *turns], None, add_generation_prompt=True)
        except RowError:  # such as a template that takes no system prompt: each answer says so
            return "each line is a turn of the chat template"
        return f"each line is a turn of the chat template: {shown(repr(prompt), 400)}"

    @property
    def seen(self) -> dict[str, Modality]:
        """The attachments that messages may show, by kind."""
        shown = () if self.template is None else self._attachments.modalities
        return {modality.kind: modality for modality in shown}

    def attachment(self, kind: str, path: str) -> tuple[Message, str]:
        """The part of a message that shows a file, and a text about it. Raises RowError if it cannot be
        shown."""
        if self.template is None:
            raise RowError(f"{with_article(kind)} needs a chat template, which shows it")
        if self._why_none:
            raise RowError(self._why_none)
        if kind not in self.seen:
            raise RowError(f"the model takes no {ATTACHMENTS[kind]}")
        if not path:
            raise RowError("the path of a file must follow")
        return self.seen[kind].message_part(path)

    def _prompt(self, messages: list[Message]) -> dict[str, torch.Tensor]:
        """What the model takes of the conversation to continue. Raises RowError if the template
        refuses it, RecipeError if it is empty."""
        if self.template is None:
            text = self._tokenizer.ids([messages[-1]["content"]])[0]
            ids, attached = np.append(np.array(self._tokenizer.begin, text.dtype), text), None
        else:
            modalities = self._attachments.modalities
            rendered = self.template.render(prompt_of(messages, modalities))
            [prompt] = self.template.encode([rendered], modalities)
            ids, attached = prompt.ids, prompt.attachments
        if not len(ids):
            raise RecipeError("it is empty")
        document, piece = one_document(ids, attached), (0, 0, len(ids))
        inputs = RowInputs(length=0, attachments=self._attachments)
        return dict(inputs.of_prompts(ids[None], document, [[piece]]).micro_batch.inputs)

    def answer(
        self, messages: list[Message], sampling: Sampling, write: Callable[[str], None]
    ) -> None:
        """Calls `write` with each part of the answer. Raises RowError if the template refuses the
        conversation, RecipeError if it is too long for the model."""
        from transformers import GenerationConfig, TextStreamer

        device, dtype = self._model.device, self._model.dtype
        inputs = to_device(self._prompt(messages), device)
        length = inputs["input_ids"].shape[1]
        positions = getattr(text_config(self._model), "max_position_embeddings", None)
        room = positions - length if isinstance(positions, int) else sampling.max_new_tokens
        if room < 1:
            what = f"the conversation has {length} tokens, and the model {positions} positions"
            raise RecipeError(f"{what}; /reset begins another one")
        ends = sorted({self._decoder.eos_token_id, *end_ids(self._model)} - {None})
        chosen: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > _COLDEST:
            chosen = {"do_sample": True, "temperature": sampling.temperature}
            chosen["top_p"] = sampling.top_p
        config = GenerationConfig(
            max_new_tokens=min(sampling.max_new_tokens, room),
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            **chosen,
        )

        class Streamer(TextStreamer):  # type: ignore[misc]
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                write(text)

        self._model.generate(
            **{k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()},
            attention_mask=torch.ones_like(inputs["input_ids"]),
            generation_config=config,
            streamer=Streamer(self._decoder, skip_prompt=True, skip_special_tokens=True),
        )


def open_chat_model(
    folder: Path, *, checkpoint: bool, plain: bool | None, trust_run: bool
) -> ChatModel:
    """The model of a checkpoint of a run, or of an exported folder, without its weights.

    plain: complete texts without a chat template; None: where the run did not train with one.
    Raises RecipeError if the model cannot generate, or cannot be opened.
    """
    if checkpoint:
        recipe = recipe_of(folder)
        if recipe.model.builder is not None:
            raise RecipeError(f"chat: {folder}: model.builder: its model has no method `generate`")
        stored = open_checkpoint_weights(folder, trust_run=trust_run)
        name = tokenizer_name(recipe.data, recipe.model)
        _check(stored, folder, name)
        assert name is not None
        prompts = prompts_of(folder, recipe)
        set_stop_tokens(stored.model, prompts.ends, name)
        if plain is None:
            plain = not _with_template(recipe.data, prompts.template)
        template = None if plain else _template_of(recipe.data, name, prompts.template or None)
        sections, path = recipe.attachments, recipe.model.path or ""
        modalities = [each.of(sections.get(each.kind), path) for each in MODALITIES]
        return ChatModel(stored, name, template, recipe.data.system, modalities)
    stored, name = open_exported_weights(folder), str(folder)
    _check(stored, folder, name)
    if (folder / "generation_config.json").is_file():  # also of an adapter
        from transformers import GenerationConfig

        stored.model.generation_config = GenerationConfig.from_pretrained(folder)
    tokenizer = hugging_face_tokenizer(name)
    base = base_of_adapter(folder) if (folder / ADAPTER_CONFIG).is_file() else None
    modalities = [modality.of_export(folder, base) for modality in MODALITIES]
    data = _data_of_run(folder)
    if plain is None:
        plain = not tokenizer.chat_template or (data is not None and not _has_turns(data))
    if plain or data is None or not _has_turns(data):
        template = None if plain else ChatTemplate(tokenizer, name, None)
        return ChatModel(stored, name, template, None, modalities)
    template = _template_of(data, name, None)  # the export has the trained template
    return ChatModel(stored, name, template, data.system, modalities)


def _data_of_run(export: Path) -> schema.Data | None:
    """The section `data` of the run whose export RUN_DIR/hf is; None for other folders."""
    file = export.resolve().parent / "recipe.yaml"
    if export.resolve().name != "hf" or not file.is_file():
        return None
    return recorded_recipe(file.read_text(encoding="utf-8"), file=file).data


def _has_turns(data: schema.Data) -> bool:
    """Whether the run trained conversations, or prompts and answers."""
    kinds = [KINDS[source.kind] for source in data.sources().values()]
    return any(kind.conversation or kind.answers for kind in kinds)


def _check(stored: StoredModel, folder: Path, tokenizer: str | None) -> None:
    model = stored.model
    if not hasattr(model, "can_generate") or not model.can_generate():
        raise RecipeError(
            f"chat: {folder}: {type(model).__name__} does not generate text; use transformers' pipeline, or "
            "for embeddings and rerankers sentence-transformers"
        )
    if tokenizer is None:
        raise RecipeError(f"chat: {folder}: the run has no tokenizer (data.tokenizer)")


def _with_template(data: schema.Data, written: str | None) -> bool:
    """Whether the run trained with a chat template. written: see `TrainedPrompts.template`."""
    if written:
        return True
    kinds = [KINDS[source.kind] for source in data.sources().values()]
    prompts = written is None and any(kind.answers for kind in kinds)
    return prompts or any(kind.conversation for kind in kinds)


def _template_of(data: schema.Data, tokenizer: str, written: str | None) -> ChatTemplate:
    """written: the template that the run trained with, if it is not the tokenizer's own."""
    # Without the file of the template, which may have moved
    encoder = make_encoder("chat", replace(data, chat_template=None), tokenizer=tokenizer)
    if written is not None:
        day = (data.date or today()) if uses_date(written) else None
        encoder = replace(encoder, template=written, day=day)
    return template_of(encoder)
