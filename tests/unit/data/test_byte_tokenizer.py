"""The tokenizer `bytes` for transformers: ids, lossless decoding, and its chat template."""

import hashlib
import json
import random

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LogitsProcessor

from launcher.data.tokenizer import (
    ByteTokenizer,
    hugging_face_byte_tokenizer,
    load_tokenizer,
    tokenizer_identity,
)
from launcher.errors import RecipeError

# fmt: off
TEXTS = [
    "", " ", "  a", "a  ", "\n", "\r\n\t a\n\n", "é", "日本語", "🙂", "👩‍👩‍👧‍👦 e\u0301", "\x00\x01\x7f\x80\xad\u0100\u0120Ġ",
    "\ufeff\ufffd", "don't , n't ' s .", "don 't do that ! ?", "\U0010ffff", "<|en d|>", "x" * 3000,
]  # without "<|end|>", which is a special token
# fmt: on
CHAT = [
    {"role": "system", "content": " be  kind\n"},
    {"role": "user", "content": "Hi é🙂"},
    {"role": "assistant", "content": " yo"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b\n"},
]


@pytest.fixture(scope="module", params=["made", "saved and loaded"])
def tokenizer(request, tmp_path_factory):
    made = hugging_face_byte_tokenizer()
    if request.param == "made":
        return made
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_ids_are_bytes_and_decode_to_the_text(tokenizer):
    rng = random.Random(3)
    planes = [range(0x80), range(0x80, 0x800), range(0x800, 0xD800), range(0x10000, 0x110000)]
    sizes = [rng.randrange(40) for _ in range(300)]
    odd = ["".join(chr(rng.choice(rng.choice(planes))) for _ in range(n)) for n in sizes]
    for text in TEXTS + odd:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == list(text.encode())
        assert ids == ByteTokenizer().ids([text])[0].tolist()
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, 256, 258], skip_special_tokens=True) == text
    assert tokenizer("a")["input_ids"] == [97]  # no special tokens are added


def test_special_tokens(tokenizer):
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (260, 256, 256)
    names = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    assert tokenizer.convert_ids_to_tokens([256, 257, 258, 259]) == names
    assert tokenizer("a<|end|><|user|> ")["input_ids"] == [97, 256, 258, 32]
    assert tokenizer.decode([97, 256, 259, 98]) == "a<|end|><|assistant|>b"


def test_chat_template_marks_assistant_text(tokenizer):
    rendered = tokenizer.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    expected = [
        *[257, *b" be  kind\n", 256, 258, *"Hi é🙂".encode(), 256],
        *[259, *b" yo", 256, 258, *b"a", 256, 259, *b"b\n", 256],
    ]
    assert rendered["input_ids"] == expected
    ids, masks = rendered["input_ids"], rendered["assistant_masks"]
    marked = [token for token, mark in zip(ids, masks, strict=True) if mark]
    assert marked == [*b" yo", 256, *b"b\n", 256]
    prompt = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=True)
    assert prompt["input_ids"] == expected[: expected.index(259) + 1]
    with pytest.raises(Exception, match="a role must be system, user or assistant; got tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]
    """Forces the model to generate the given tokens."""

    def __init__(self, tokens):
        self.tokens = list(tokens)

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -float("inf"))
        forced[:, self.tokens.pop(0)] = 0.0
        return forced


def test_generation_stops_at_the_end_of_the_turn(tokenizer):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=260, num_hidden_layers=1, **sizes))
    prompt = tokenizer.apply_chat_template(
        CHAT[:2], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    generated = model.generate(
        **prompt,
        max_new_tokens=20,
        do_sample=False,
        logits_processor=[ForcedTokens([*b"42", 256, *b"more"])],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    assert generated[0, prompt["input_ids"].shape[1] :].tolist() == [*b"42", 256]


def test_store_identity_matches_the_tokenizer():
    """If the ids or the template change, update `_BYTES_IDENTITY` and this digest."""
    tokenizer = hugging_face_byte_tokenizer()
    content = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])
    assert hashlib.sha256(content.encode()).hexdigest().startswith("852a5c324591")
    assert tokenizer_identity("bytes").startswith("bytes 66c40772")


@pytest.mark.parametrize("there", [True, False])
def test_a_name_is_another_folder_in_the_next_test(tmp_path, monkeypatch, there):
    """A check of `forget_files` (tests/conftest.py): without it the second case finds the tokenizer of the
    first."""
    monkeypatch.chdir(tmp_path)
    if there:
        hugging_face_byte_tokenizer().save_pretrained("model")
        assert load_tokenizer("model").ids(["a"])[0].tolist() == [97]
    else:
        with pytest.raises(RecipeError, match="no such folder: model"):
            load_tokenizer("model")
