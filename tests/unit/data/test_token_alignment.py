"""Two tokenizations of one text, and what they have in common."""

import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from launcher.data.token_alignment import (
    TokenTexts,
    equal_ends,
    equal_tokens,
    spans_of_parts,
    spans_of_texts,
    token_texts,
    trained_parts,
)
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.errors import RecipeError

TEXTS = [
    "Good morning, said the cat.\n",
    "def f(x):\n\treturn x + 1\n",
    "na\u00efve caf\u00e9 \u2014 \u4f60\u597d \U0001f600",
]


def byte_level(words=400):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(TEXTS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


def with_byte_fallback(words=90):
    """As SentencePiece writes tokens: a space is \u2581, and what is unknown is bytes."""
    made = Tokenizer(models.BPE(byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=256 + words, special_tokens=special)
    made.train_from_iterator([text for text in TEXTS if text.isascii()] * 4, trainer)
    # The bytes are tokens of the vocabulary, which the trainer has no other way to add
    state = json.loads(made.to_str())
    state["added_tokens"] = state["added_tokens"][:1]
    made = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


@pytest.mark.parametrize("make", [byte_level, with_byte_fallback])
def test_the_texts_of_tokens_are_the_text(make):
    tokenizer = make()
    found = token_texts(tokenizer)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = b"".join(found.texts[id] for id in ids).decode()
        assert whole.removeprefix(" ") == text
    assert {found.texts[id] for id in found.special} == {tokenizer.eos_token.encode()}


def test_the_texts_of_the_byte_tokenizer():
    found = token_texts(hugging_face_tokenizer("bytes"))
    assert found.texts[:256] == [bytes([byte]) for byte in range(256)]
    assert found.special == {256, 257, 258, 259}


def test_tokens_of_words_are_refused():
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(RecipeError, match="not known how its tokens are written as text"):
        token_texts(PreTrainedTokenizerFast(tokenizer_object=made))


def bounds(spans):
    return spans.own.tolist(), spans.other.tolist()


def test_spans_end_where_both_end_a_token():
    """The groups of `_align_by_byte_offsets` of TRL 1.16.0's GOLD trainer, for tokens that end at the
    bytes 3, 4, 9 and 1, 4, 6, 9."""
    spans, equal = spans_of_texts([b"abc", b"d", b"efghi"], [b"a", b"bcd", b"ef", b"ghi"])
    assert equal
    assert bounds(spans) == ([[0, 2], [2, 3]], [[0, 2], [2, 4]])


def cut(text, rng):
    ends = sorted({*rng.sample(range(1, len(text)), len(text) // 3), len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def groups(own, other):
    """Advances the side whose token ends earlier, until both end at the same byte."""
    found, first, at = [], [0, 0], [0, 0]
    read = [0, 0]
    sides = own, other
    while True:
        behind = 0 if read[0] <= read[1] else 1
        if at[behind] == len(sides[behind]):
            return found
        read[behind] += len(sides[behind][at[behind]])
        at[behind] += 1
        if read[0] == read[1]:
            found.append([[first[0], at[0]], [first[1], at[1]]])
            first = [*at]


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_the_shortest(seed):
    rng = random.Random(seed)
    text = bytes(rng.choices(b"abcd ", k=60)).strip() + b"x"
    own, other = cut(text, rng), cut(text, rng)
    spans, equal = spans_of_texts(own, other)
    expected = groups(own, other)
    assert equal
    assert bounds(spans) == ([one[0] for one in expected], [one[1] for one in expected])
    assert spans.own[-1, 1] == len(own)
    for (a, b), (c, d) in zip(*bounds(spans), strict=True):
        assert b"".join(own[a:b]) == b"".join(other[c:d])


def test_white_space_at_the_beginning_may_differ_and_other_text_ends_the_spans():
    spans, equal = spans_of_texts([b"\n", b" Hi", b" you"], [b"Hi", b" you"])
    assert equal
    assert bounds(spans) == ([[0, 2], [2, 3]], [[0, 1], [1, 2]])
    spans, equal = spans_of_texts([b"ab", b"cd", b"ef"], [b"ab", b"c", b"d", b"xf"])
    assert not equal
    assert bounds(spans) == ([[0, 1], [1, 2]], [[0, 1], [1, 3]])
    for nothing in ([], [b"x"]):
        assert bounds(spans_of_texts(nothing, [b"yz"])[0]) == ([], [])


TWO = (
    TokenTexts([b"ab", b"c", b"<end>", b"\n", b"<a>"], frozenset({2, 4}), frozenset()),
    TokenTexts([b"a", b"bc", b"</s>", b"b", b"c"], frozenset({2}), frozenset()),
)


def test_the_tokens_that_end_a_part_are_a_span():
    own = trained_parts([9, 4, 0, 1, 2, 3, 9, 0, 2], [-1, 4, 0, 1, 2, 3, -1, 0, 2], -1)
    assert own == [(1, [4, 0, 1, 2, 3]), (7, [0, 2])]
    other = [(3, [0, 1, 2]), (8, [0, 3, 2])]
    spans = spans_of_parts(own, other, TWO)
    assert bounds(spans) == (
        [[2, 4], [4, 5], [7, 8], [8, 9]],
        [[3, 5], [5, 6], [8, 10], [10, 11]],
    )
    # Of other text the end is none, and of another number of parts nothing is known
    assert bounds(spans_of_parts(own[1:], [(8, [0, 4, 2])], TWO)) == ([], [])
    assert bounds(spans_of_parts(own, other[:1], TWO)) == ([], [])


def test_tokens_with_the_same_text():
    ends = equal_ends([2], [2], TWO)
    assert ends == {2: 2}
    assert equal_tokens(*TWO, ends=ends).tolist() == [-1, -1, 2, -1, 1]
    # A byte that another token has, too, is one token
    fallback = TokenTexts([b"c", b"c", b"\xff"], frozenset(), frozenset({0, 2}))
    assert equal_tokens(TWO[0], fallback, ends={}).tolist() == [-1, 1, -1]
    assert equal_tokens(fallback, TWO[0], ends={}).tolist() == [-1, 1, -1, -1, -1]
    real = [token_texts(make()) for make in (byte_level, with_byte_fallback)]
    found = equal_tokens(*real, ends={})
    known = found[found >= 0]
    assert len(known) == len(np.unique(known)) > 50
    for id, own in enumerate(found.tolist()):
        assert own < 0 or real[0].texts[own] == real[1].texts[id]
