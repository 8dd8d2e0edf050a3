"""`launcher export --verify`: compares an exported folder with the checkpoint of the run.

A fresh process loads the folder with transformers and peft alone.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from launcher.checkpoint.export import (
    StoredModel,
    open_checkpoint_weights,
    prompts_of,
    recipe_of,
)
from launcher.data.attachment_inputs import MODALITIES, attachments_of
from launcher.data.modality import Arrays, Modality
from launcher.data.run_data import set_stop_tokens, tokenizer_to_keep
from launcher.data.tokenizer import tokenizer_name
from launcher.distributed.separate_process import run_in_process
from launcher.errors import RecipeError, TrainingError
from launcher.models.adapted import ids_of_adapter
from launcher.models.build import auto_class
from launcher.models.config_files import problems_of_older_readers
from launcher.models.description import describe, is_classifier, text_config
from launcher.models.hugging_face_files import PROCESSOR, exported_tensors
from launcher.models.new_rows import grow_vocabulary
from launcher.models.predictions import logits_of
from launcher.models.quantization_aware import header_of
from launcher.models.safetensors_files import ADAPTER, ADAPTER_CONFIG, open_files, open_folder
from launcher.models.towers import features_of
from launcher.reliability.json_files import Json
from launcher.sources.hub import CHAT_TEMPLATE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SHAPE = (2, 32)
"""Sequences, and tokens in each, for which logits are computed."""
_TOLERANCE, _TOLERANCE_16_BITS = 1e-3, 5e-2
"""Largest relative 2-norm of the logits' difference, for a float32 and for a 16-bit export. Weights
are compared exactly."""
_TEXTS = (
    "The quick brown fox.",
    "  two  spaces,\n\ttabs",
    "naïve 漢字 🙂 12",
    "def f(x):\n    {x}",
)


def verify_export(
    checkpoint: Path, out: Path, *, base: str | None = None, ema: bool = False, trust_run: bool
) -> list[str]:
    """Returns how an exported folder differs from a checkpoint, one line per difference. base, ema,
    trust_run: see `open_checkpoint_weights`."""
    recipe = recipe_of(checkpoint)
    stored = open_checkpoint_weights(checkpoint, base=base, ema=ema, trust_run=trust_run)
    if (out / ADAPTER_CONFIG).is_file() and recipe.lora is None:
        raise RecipeError(f"export: {out} has an adapter, and the run trains none")
    prompts = prompts_of(checkpoint, recipe)
    set_stop_tokens(stored.model, prompts.ends, tokenizer_name(recipe.data, recipe.model))
    differences, dtype = _compare_tensors(stored, out)
    differences += problems_of_older_readers(out)
    kept = tokenizer_to_keep(recipe.data, recipe.model, recipe.attachments, prompts)
    tokenizer = None if kept is None else kept.tokenizer
    model = stored.load()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(describe(model).vocabulary or 1, _SHAPE, generator=generator)
    modalities = attachments_of(recipe.attachments, recipe.model).modalities
    adapter = (out / ADAPTER_CONFIG).is_file()
    seen = {modality.kind: modality.example_arrays() for modality in modalities}
    wanted, facts = _logits(model, ids, seen), _facts(model, tokenizer)
    config: Any = model.config
    path = config.name_or_path
    if path:
        facts |= _processor(Path(path), () if kept is None else kept.modalities)
        if adapter:  # whose folder has no config, from which AutoProcessor may take its class
            facts.pop("AutoProcessor", None)
    options: dict[str, Any] = {}
    if is_classifier(model) and adapter:
        options["num_labels"] = describe(model).classes
    auto = auto_class(config, recipe.model.task)
    del model, stored  # the fresh process needs as much memory
    trusted = recipe.model.trust_remote_code
    try:
        logits, exported_facts = run_in_process(
            None,
            _load_exported,
            out.resolve(),
            ids,
            auto,
            options,
            tokenizer is not None,
            trusted,
            seen,
        )
    except TrainingError as error:
        why = str(error).rpartition("\n")[2]
        return [*differences, f"it cannot be loaded with transformers: {why}"]
    gap = torch.inf if logits.shape != wanted.shape else float((logits - wanted).norm())
    tolerance = _TOLERANCE if dtype == torch.float32 else _TOLERANCE_16_BITS
    if not gap <= tolerance * float(wanted.norm()):
        differences.append(f"logits: their distance is {gap:.3g}; their norm {wanted.norm():.3g}")
    for name, value in facts.items():
        if exported_facts.get(name) != value:
            texts = (json.dumps(v, ensure_ascii=False) for v in (exported_facts.get(name), value))
            there, here = (text if len(text) < 100 else f"{text[:100]}..." for text in texts)
            differences.append(f"{name}: {there} instead of {here}")
    return differences


def _compare_tensors(stored: StoredModel, out: Path) -> tuple[list[str], torch.dtype]:
    """One line for each tensor that differs, and the dtype of the export."""
    adapter = (out / ADAPTER_CONFIG).is_file()
    exported = open_files([out / ADAPTER], key="export") if adapter else open_folder(out)
    differences, seen = [], set()
    source = None if adapter else stored.source
    odd = {} if source is None else source.odd_dtypes
    trained = exported_tensors(stored.model, stored.read, merged=not adapter)
    copied = () if source is None else source.read_copied()
    for name, tensor in itertools.chain(trained, copied):
        seen.add(name)
        if name not in exported.tensors:
            differences.append(f"{name}: missing")
            continue
        actual = exported.read(name)
        wanted = tensor.to(actual.dtype)
        if actual.shape != wanted.shape:
            differences.append(f"{name}: {list(actual.shape)} instead of {list(wanted.shape)}")
        elif actual.dtype != odd.get(name, actual.dtype):
            differences.append(f"{name}: {actual.dtype} instead of {odd[name]}")
        elif not torch.equal(actual, wanted):
            gap = (actual.double() - wanted.double()).abs().max()
            differences.append(f"{name}: other values, by up to {gap:.3g}")
    differences += [f"{name}: unexpected" for name in sorted(exported.tensors.keys() - seen)]
    return differences, exported.dtype()


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor, seen: Mapping[str, Arrays]) -> torch.Tensor:
    """Computes the logits, or hidden states of a model without a head, row by row, so that a classifier
    needs no padding; after them the features of attachments, by their kinds."""
    parts = [logits_of(model(input_ids=row[None])) for row in ids]
    for kind, arrays in seen.items():
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        parts += features_of(model, kind, tensors)
    return torch.cat([part.float().flatten() for part in parts])


def _facts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Json:
    """The settings that determine tokenization and the end of generation."""
    generation = getattr(model, "generation_config", None)
    facts: Json = {
        "config.json: eos_token_id": getattr(text_config(model), "eos_token_id", None),
        "generation_config.json: eos_token_id": generation and generation.eos_token_id,
    }
    if tokenizer is not None:
        special = sorted(tokenizer.all_special_tokens)
        facts |= {
            "tokenizer: eos_token": tokenizer.eos_token,
            "tokenizer: pad_token": tokenizer.pad_token,
            "tokenizer: special tokens": special,
            "tokenizer: number of tokens": len(tokenizer),
            "chat template": tokenizer.chat_template,
        }
        for text in (*_TEXTS, "".join(special)):
            facts[f"tokenizer: ids of {text[:40]!r}"] = tokenizer(text)["input_ids"]
    return facts


def _load_exported(
    out: Path,
    ids: torch.Tensor,
    auto: Any,
    options: dict[str, Any],
    has_tokenizer: bool,
    trust_remote_code: bool,
    seen: Mapping[str, Arrays],
) -> tuple[torch.Tensor, Json]:
    """The logits and the facts of an exported folder, which a class of transformers loads. seen: what
    a model of the run takes of an attachment of each kind."""
    import transformers

    adapter = (out / ADAPTER_CONFIG).is_file()
    # Weights that torchao reads give numbers of the dtype in the files only
    options["dtype"] = "auto" if not adapter and header_of(out) else torch.float32
    if adapter:
        import peft

        config = peft.PeftConfig.from_pretrained(out)
        base = auto.from_pretrained(
            config.base_model_name_or_path,
            revision=config.revision or "main",
            trust_remote_code=trust_remote_code,
            **options,
        )
        grow_vocabulary(base, ids_of_adapter(config.to_dict()))
        adapted = peft.PeftModel.from_pretrained(base, out)
        model = adapted.base_model.model.eval()
        if (out / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(out)
    else:
        model = auto.from_pretrained(out, trust_remote_code=trust_remote_code, **options).eval()
    tokenizer = None
    if has_tokenizer:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            out, local_files_only=True, trust_remote_code=trust_remote_code
        )
    if seen and not adapter:  # an adapter's folder has no config, which it needs
        exported = [each.of_export(out, None) for each in MODALITIES if each.kind in seen]
        seen = {modality.kind: modality.example_arrays() for modality in exported}
    return _logits(model, ids, seen), _facts(model, tokenizer) | _processor(out)


def _processor(folder: Path, modalities: Iterable[Modality] = ()) -> Json:
    """The processor of a model of more than text: its files, as these modalities change them, and
    the class that loads them."""
    from transformers import AutoProcessor

    files = sorted(file for pattern in PROCESSOR for file in folder.glob(pattern))
    # The chat template is that of the run, which is compared as the tokenizer's
    files = [file for file in files if file.name != CHAT_TEMPLATE]
    facts: Json = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    for modality in modalities:
        modality.limit_files(facts)
    if files:
        try:
            loaded: object = AutoProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # such as a package that is not installed
            loaded = error
        facts["AutoProcessor"] = type(loaded).__name__
    return facts
