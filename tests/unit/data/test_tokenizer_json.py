"""tokenizer.json decides about ids, whatever class transformers takes."""

import json

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from launcher.data.run_data import tokenizer_to_keep
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.recipe.schema import Data, Model

TEXT = "In 1999 it was 12345 and 2026,  the quick fox\n    return x + 100"
DIGITS_BY_THREE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's pattern; Qwen's splits each digit."""
TYPES = ("llama", "qwen2", "qwen3", "qwen3_5", "gemma3_text", "gpt2", "gpt_neox", "mistral", "bert")


@pytest.fixture(scope="module")
def by_three():
    """Makes 27 tokens of TEXT."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(DIGITS_BY_THREE), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    text = "In 1999 it was 12345 and 2026, the quick fox. return x + 100\n"
    made.train_from_iterator([text] * 50, trainer)
    return made


def write(folder, made, model_type, **config):
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def ids(tokenizer, text=TEXT):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", None])
@pytest.mark.parametrize("model_type", TYPES)
def test_ids_are_those_of_the_file(tmp_path, by_three, model_type, named):
    config = {"tokenizer_class": named} if named else {}
    folder = write(
        tmp_path / "source", by_three, model_type, bos_token="<s>", eos_token="</s>", **config
    )
    tokenizer = hugging_face_tokenizer(str(folder))
    assert len(ids(tokenizer)) == 27
    assert ids(tokenizer) == by_three.encode(TEXT).ids
    assert tokenizer.decode(ids(tokenizer)) == TEXT
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mistral", "qwen2"])
@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_an_export_is_read_as_in_the_run(tmp_path, by_three, model_type, named, caplog):
    """By a class that reads tokenizer.json as it is. For qwen2 transformers 5 takes its own."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    folder = write(tmp_path / "source", by_three, model_type, tokenizer_class=named, **tokens)
    kept = tokenizer_to_keep(Data(), Model(path=str(folder), new_tokens=("<|call|>",)))
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text((folder / "config.json").read_text())
    kept.save(out)
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["eos_token"] == "</s>"
    text = f"{TEXT}<|call|></s>"
    wanted = ids(kept.tokenizer, text)
    assert len(wanted) == 29
    assert ids(PreTrainedTokenizerFast.from_pretrained(out), text) == wanted
    if model_type == "qwen2":
        assert "PreTrainedTokenizerFast.from_pretrained makes those of the run" in caplog.text
    else:
        assert "PreTrainedTokenizerFast.from_pretrained" not in caplog.text
        assert ids(AutoTokenizer.from_pretrained(out), text) == wanted


def test_a_line_says_where_transformers_reads_text_otherwise(tmp_path, by_three, caplog):
    caplog.set_level("INFO")
    folder = write(tmp_path / "other", by_three, "qwen2", tokenizer_class="Qwen2Tokenizer")
    hugging_face_tokenizer(str(folder))
    line = f"{folder}/tokenizer.json: transformers' Qwen2Tokenizer reads text otherwise"
    assert caplog.text.count(line) == 1
    caplog.clear()
    same = write(tmp_path / "same", by_three, "qwen2", tokenizer_class="PreTrainedTokenizerFast")
    hugging_face_tokenizer(str(same))
    assert "otherwise" not in caplog.text


@pytest.mark.parametrize("space", [None, False, True])
def test_add_prefix_space_of_the_config_counts_where_it_is_given(tmp_path, by_three, space):
    made = Tokenizer.from_str(by_three.to_str())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    config = {} if space is None else {"add_prefix_space": space}
    for named in ("GPT2Tokenizer", "PreTrainedTokenizerFast"):
        folder = tmp_path / named
        write(folder, made, "gpt2", tokenizer_class=named, eos_token="</s>", **config)
        tokenizer = hugging_face_tokenizer(str(folder))
        assert tokenizer.decode(ids(tokenizer, "fox")) == (" fox" if space else "fox")


@pytest.mark.parametrize(("lower", "wanted"), [(None, [2]), (False, [2]), (True, [3])])
def test_case_of_bert_is_that_of_the_config_where_it_is_given(tmp_path, lower, wanted):
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "Fox": 2, "fox": 3, "[SEP]": 4, "[PAD]": 5, "[MASK]": 6}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    config = {} if lower is None else {"do_lower_case": lower}
    folder = write(tmp_path / "bert", made, "bert", tokenizer_class="BertTokenizer", **config)
    assert ids(hugging_face_tokenizer(str(folder)), "Fox") == wanted


@pytest.mark.parametrize("add", [None, False, True])
def test_add_bos_token_of_llama_counts_where_it_is_given(tmp_path, by_three, add):
    """As in transformers 4; DeepSeek V3's file has no begin token, and its config asks for one."""
    begun = Tokenizer.from_str(by_three.to_str())
    begun.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    config = {} if add is None else {"add_bos_token": add}
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizerFast"}
    for made, own in ((by_three, False), (begun, True)):
        folder = write(tmp_path / f"{own}", made, "llama", **tokens, **config)
        first = hugging_face_tokenizer(str(folder))("fox")["input_ids"][0]
        assert (first == 0) == (own if add is None else add)


def test_flags_of_tokens_and_tokens_of_the_config(tmp_path, by_three):
    """Those of the file hold, and tokens of the config are added to them."""
    made = Tokenizer.from_str(by_three.to_str())
    flags = {"single_word": False, "lstrip": False, "normalized": False, "special": True}
    state = json.loads(made.to_str())
    (end,) = (token for token in state["added_tokens"] if token["content"] == "</s>")
    end["rstrip"] = True
    made = Tokenizer.from_str(json.dumps(state))
    folder = write(
        tmp_path / "tokens",
        made,
        "gpt2",
        tokenizer_class="GPT2Tokenizer",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<s>",
        added_tokens_decoder={
            "1": {"content": "</s>", "rstrip": False, **flags},
            str(made.get_vocab_size()): {"content": "<|more|>", "rstrip": False, **flags},
        },
    )
    tokenizer = hugging_face_tokenizer(str(folder))
    assert ids(tokenizer, "</s>  fox") == made.encode("</s>  fox").ids
    assert ids(tokenizer, "<|more|>") == [made.get_vocab_size()]


def test_a_class_that_is_not_known_adds_nothing_to_the_file(tmp_path, by_three):
    folder = write(tmp_path / "other", by_three, "qwen2", tokenizer_class="OwnTokenizer")
    tokenizer = hugging_face_tokenizer(str(folder))
    assert len(tokenizer) == by_three.get_vocab_size()
    assert ids(tokenizer) == by_three.encode(TEXT).ids
