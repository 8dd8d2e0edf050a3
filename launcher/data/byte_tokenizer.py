"""The tokenizer `bytes` for transformers, with a chat template.

Stores are named after its ids and template: change `_BYTES_IDENTITY` in tokenizer.py with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|end|>"
"""Ends a document and a turn: id 256, where generation stops."""
ROLES = ("system", "user", "assistant")
"""`<|system|>` 257, `<|user|>` 258, `<|assistant|>` 259 start a turn."""

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message.role not in ["system", "user", "assistant"] -%}
        {{- raise_exception("a role must be system, user or assistant; got " ~ message.role) -}}
    {%- endif -%}
    {{- "<|" ~ message.role ~ "|>" -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}{{- message.content ~ "<|end|>" -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content ~ "<|end|>" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""


def hugging_face_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are the bytes of UTF-8, as in ByteTokenizer; 256 to 259 are special tokens.

    The chat template marks the assistant's text and the end of its turn as generated.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # A byte-level vocabulary writes each byte as a character: a printable byte as itself, the
    # others as U+0100 onwards. There are no merges, so nothing else is in it.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    roles = [f"<|{role}|>" for role in ROLES]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in (END, *roles)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=roles,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
