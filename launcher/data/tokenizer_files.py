"""Writes the tokenizer of an export.

The files of the source are copied as they are, so that other programs, and older versions of
transformers, read what they read from the source. New tokens and another chat template change the
keys that hold them, and no others.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.data.tokenizer import ExtendedName
from launcher.data.tokenizer_json import (
    CONFIG,
    PARTS,
    TOKENIZER,
    Json,
    entry_of,
    read_json,
    transformers_reads_alike,
)
from launcher.sources.hub import CHAT_TEMPLATE, NAMED_TEMPLATES, copy_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from launcher.data.modality import Modality

logger = logging.getLogger(__name__)

_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template.jinja",
)
"""Files of tokenizers. A class may name others."""
IMAGE_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
PROCESSOR_FILES = (IMAGE_FILE, PROCESSOR_FILE, VIDEO_FILE)
"""Files of a processor."""
_OF_THIS_MACHINE = ("is_local", "local_files_only", "backend")
"""Keys that transformers 5 writes and does not read."""


def read_processor(folder: Path) -> dict[str, Json]:
    """The contents of a processor's files in a folder, by their names."""
    return {name: content for name in PROCESSOR_FILES if (content := read_json(folder / name))}


@dataclass(frozen=True)
class KeptTokenizer:
    """The tokenizer of an exported model."""

    name: str
    """As of `tokenizer_name`."""
    tokenizer: PreTrainedTokenizerBase
    """With new tokens, and with the chat template below."""
    source: Path | None
    """The folder that it comes from; None: it has none."""
    chat_template: str | None = None
    """Takes the place of the tokenizer's own; empty: there is none; None: its own stays."""
    end: str | None = None
    """A token that takes the place of the eos_token: one that ends the answers of training, and that
    other programs do not know as an end. `tokenizer` has it, too."""
    modalities: tuple[Modality, ...] = ()
    """Of the attachments whose processors are beside it."""
    pads_right: bool = False
    """Whether other programs must add padding on the right, as the run did: positions that are learned
    count from the left end of a row."""

    def save(self, folder: Path) -> None:
        """Writes the tokenizer's files into an existing folder, which has the model's files.
        Raises OSError if they cannot be written."""
        source = self.source
        tokens = self.name.tokens if isinstance(self.name, ExtendedName) else ()
        needed = TOKENIZER if tokens else "."
        corrected = getattr(self.tokenizer, "corrected", False)  # by `hugging_face_tokenizer`
        if source is None or corrected or not (source / needed).exists():
            self.tokenizer.save_pretrained(folder)
        else:
            self._copy(source, folder)
            if tokens:
                self._add_tokens(folder)
            if self.chat_template is not None:
                _set_template(folder, self.chat_template)
        for name in (CONFIG, "special_tokens_map.json"):
            _edit(folder / name, self._set_end)
        if self.pads_right:
            _edit(folder / CONFIG, lambda config: config.update(padding_side="right"))
        _edit(folder / CONFIG, lambda config: self._make_readable(config, folder, source))
        self._keep_ids(folder)
        files = read_processor(folder)
        before = copy.deepcopy(files)
        for modality in self.modalities:
            modality.limit_files(files)
        for name, content in files.items():
            if content != before.get(name):
                _write(folder / name, content)

    def _set_end(self, config: Json) -> None:
        if self.end is not None and "eos_token" in config:
            config["eos_token"] = self.end

    def _keep_ids(self, folder: Path) -> None:
        """Changes files that transformers reads otherwise than the run did."""
        config = read_json(folder / CONFIG)
        if not (folder / TOKENIZER).is_file() or "auto_map" in config:
            return
        if transformers_reads_alike(folder, self.tokenizer):
            return
        backend: Any = self.tokenizer
        state = json.loads(backend.backend_tokenizer.to_str())
        _edit(folder / TOKENIZER, lambda content: content.update({p: state[p] for p in PARTS}))
        self._add_tokens(folder)
        _edit(folder / CONFIG, self._name_no_class)
        if not transformers_reads_alike(folder, self.tokenizer):
            kind = read_json(folder / "config.json").get("model_type")
            logger.warning(
                "the exported tokenizer: transformers.AutoTokenizer makes other ids of a text than the "
                f"run, for models of type {kind} in this version; "
                "PreTrainedTokenizerFast.from_pretrained makes those of the run"
            )

    def _name_no_class(self, config: Json) -> None:
        """Replaces a class that does not read tokenizer.json as it is. What the class has by default
        is written beside it."""
        own = self.tokenizer
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        defaults = {
            "clean_up_tokenization_spaces": own.clean_up_tokenization_spaces,
            "model_input_names": own.model_input_names,
            "padding_side": own.padding_side,
            **own.special_tokens_map,
        }
        for key, value in defaults.items():
            if config.get(key) is None:
                config[key] = value

    def _copy(self, source: Path, folder: Path) -> None:
        own = getattr(self.tokenizer, "vocab_files_names", {})
        code = ("*.py",) if "auto_map" in read_json(source / CONFIG) else ()
        copy_files(source, (*_FILES, *own.values(), *code), folder)
        if (source / NAMED_TEMPLATES).is_dir():
            (folder / NAMED_TEMPLATES).mkdir()
            copy_files(source / NAMED_TEMPLATES, ("*.jinja",), folder / NAMED_TEMPLATES)

    def _add_tokens(self, folder: Path) -> None:
        """Adds the tokens that copied files lack: new ones, and those that a class adds by itself,
        which would move their ids."""
        known = {
            token["content"] for token in read_json(folder / TOKENIZER).get("added_tokens") or ()
        }
        added = self.tokenizer.added_tokens_decoder
        entries = [
            entry_of(id, token) for id, token in sorted(added.items()) if token.content not in known
        ]

        def extend(vocabulary: Json) -> None:
            vocabulary["added_tokens"] = [*(vocabulary.get("added_tokens") or ()), *entries]

        def extend_config(config: Json) -> None:
            if "added_tokens_decoder" in config:  # else the tokens are in tokenizer.json alone
                config["added_tokens_decoder"] |= {
                    str(entry["id"]): {key: entry[key] for key in entry if key != "id"}
                    for entry in entries
                }

        _edit(folder / TOKENIZER, extend)
        _edit(folder / CONFIG, extend_config)
        if (folder / "added_tokens.json").is_file():
            ids = {entry["content"]: entry["id"] for entry in entries}
            _edit(folder / "added_tokens.json", lambda known: known.update(ids))

    def _make_readable(self, config: Json, folder: Path, source: Path | None) -> None:
        """Changes what transformers 4 refuses: names that transformers 5 writes."""
        for key in _OF_THIS_MACHINE:
            config.pop(key, None)
        if "tokenizer_class" not in config and source is not None:
            # transformers then takes the class of the model that config.json names
            model_types = {read_json(f / "config.json").get("model_type") for f in (folder, source)}
            if len(model_types) > 1:
                config["tokenizer_class"] = type(self.tokenizer).__name__
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(config.get("extra_special_tokens"), list):
            config["additional_special_tokens"] = config.pop("extra_special_tokens")


def _set_template(folder: Path, template: str) -> None:
    """Replaces the chat templates in copied files; removes them if the new one is empty."""
    for file in folder.glob(f"{NAMED_TEMPLATES}/*"):
        file.unlink()
    if (folder / NAMED_TEMPLATES).is_dir():
        (folder / NAMED_TEMPLATES).rmdir()
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        separate.write_text(template, encoding="utf-8") if template else separate.unlink()

    of_processor = folder / CHAT_TEMPLATE
    if of_processor.is_file():
        text = json.dumps({"chat_template": template}, indent=2, ensure_ascii=False)
        of_processor.write_text(
            text + "\n", encoding="utf-8"
        ) if template else of_processor.unlink()

    def replace(config: Json) -> None:
        if not template:
            config.pop("chat_template", None)
        elif "chat_template" in config or not separate.is_file():
            config["chat_template"] = template

    _edit(folder / CONFIG, replace)


def _edit(file: Path, change: Callable[[Json], None]) -> None:
    """Changes the content of a JSON file. A file with nothing to change stays as it is."""
    before, content = read_json(file), read_json(file)
    change(content)
    if content != before:
        _write(file, content)


def _write(file: Path, content: Json) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
