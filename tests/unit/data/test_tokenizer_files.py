"""Exported tokenizers: the files of the source, with the keys that changed."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from launcher.data.run_data import tokenizer_to_keep, trained_prompts
from launcher.models.config_files import problems_of_older_readers
from launcher.recipe.schema import Data, Model

TEMPLATE = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
TEXT = "a b <call> <|turn|> <end>"


def entry(content, *, special):
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": content, **flags, "special": special}


def config_of_the_hub(**keys):
    """In the form of transformers 4, which the hub's models have."""
    config = {
        "added_tokens_decoder": {"4": entry("<end>", special=True)},
        "additional_special_tokens": ["<end>"],
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<end>",
        "model_max_length": 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    return {key: value for key, value in (config | keys).items() if value != "left out"}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_tokens(["<filler>"])
    made.add_special_tokens(["<end>"])
    made.save(str(folder / "tokenizer.json"))
    write(folder, config_of_the_hub())
    (folder / "special_tokens_map.json").write_text('{"eos_token":  "<end>"}')
    (folder / "added_tokens.json").write_text('{"<end>": 4}')
    for name in ("vocab.json", "trainer_state.json", "README.md", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def write(folder, config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def read(folder, name="tokenizer_config.json"):
    return json.loads((folder / name).read_text())


def exported(source, tmp_path, *, data=None, **section):
    data, model = data or Data(), Model(path=str(source), **section)
    kept = tokenizer_to_keep(data, model, prompts=trained_prompts(data, model, set()))
    assert kept is not None
    out = tmp_path / "out"
    out.mkdir()
    kept.save(out)
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded(TEXT)["input_ids"] == kept.tokenizer(TEXT)["input_ids"]
    assert loaded.chat_template == kept.tokenizer.chat_template
    assert loaded.all_special_tokens == kept.tokenizer.all_special_tokens
    assert problems_of_older_readers(out) == []
    return out


def test_files_of_the_source_are_copied_byte_for_byte(source, tmp_path):
    """transformers 5 would write names that transformers 4 refuses."""
    out = exported(source, tmp_path)
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"}
    assert {file.name for file in out.iterdir()} == {*names, "added_tokens.json"}
    for file in out.iterdir():
        assert file.read_bytes() == (source / file.name).read_bytes()


def test_new_tokens_change_only_the_keys_that_hold_tokens(source, tmp_path):
    out = exported(source, tmp_path, new_tokens=("<call>", "<|turn|>"))
    new = {5: entry("<call>", special=False), 6: entry("<|turn|>", special=True)}
    before, after = read(source), read(out)
    before["added_tokens_decoder"] |= {str(id): each for id, each in new.items()}
    assert after == before
    before, after = (read(folder, "tokenizer.json") for folder in (source, out))
    assert after["added_tokens"][-2:] == [{"id": id} | each for id, each in new.items()]
    del after["added_tokens"][-2:]
    assert after == before
    assert read(out, "added_tokens.json") == {"<end>": 4, "<call>": 5, "<|turn|>": 6}
    same = "special_tokens_map.json"
    assert (out / same).read_bytes() == (source / same).read_bytes()


@pytest.mark.parametrize("where", ["key", "file", "both", "nowhere"])
def test_another_chat_template_is_written_where_the_old_one_was(source, tmp_path, where):
    if where in ("file", "both"):
        (source / "chat_template.jinja").write_text("of the file")
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates/tool_use.jinja").write_text("of tools")
    if where in ("file", "nowhere"):
        write(source, config_of_the_hub(chat_template="left out"))
    (tmp_path / "mine.jinja").write_text("mine")
    out = exported(source, tmp_path, data=Data(chat_template=str(tmp_path / "mine.jinja")))
    own = {} if where == "file" else {"chat_template": "mine"}
    assert read(out) == config_of_the_hub(chat_template="left out") | own
    template = out / "chat_template.jinja"
    assert template.is_file() == (where in ("file", "both"))
    assert not template.is_file() or template.read_text() == "mine"
    assert not (out / "additional_chat_templates").exists()


def test_names_of_transformers_5_become_those_that_all_versions_read(source, tmp_path):
    """Of a source that transformers 5 wrote, and of tokenizers that have no files."""
    special = {"additional_special_tokens": "left out", "extra_special_tokens": ["<end>"]}
    written = config_of_the_hub(tokenizer_class="TokenizersBackend", is_local=True, **special)
    write(source, written | {"local_files_only": True, "backend": "tokenizers"})
    found = problems_of_older_readers(source)
    assert [problem.partition(":")[2].split()[0].rstrip(":") for problem in found] == [
        *("tokenizer_class", "extra_special_tokens", "is_local", "local_files_only")
    ]
    assert read(exported(source, tmp_path)) == config_of_the_hub()


@pytest.mark.parametrize("tokens", [None, ("<call>",)])
def test_tokenizers_without_files_are_readable_too(tmp_path, tokens):
    data = Data(tokenizer="bytes")
    out = exported("nowhere", tmp_path, data=data, new_tokens=tokens)
    assert read(out)["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "<|user|>" in read(out)["additional_special_tokens"]


@pytest.mark.parametrize(
    ("model_type", "wanted"), [("gpt2", "GPT2Tokenizer"), ("qwen2", "PreTrainedTokenizerFast")]
)
def test_a_tokenizer_whose_class_follows_from_config_json_names_it_elsewhere(
    source, tmp_path, model_type, wanted
):
    """The folder of an adapter has no config.json. A class that reads other ids is not named."""
    write(source, config_of_the_hub(tokenizer_class="left out"))
    (source / "config.json").write_text(json.dumps({"model_type": model_type}))
    if model_type == "gpt2":
        made = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3}, [("a", "b")]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(["<end>"])
        made.save(str(source / "tokenizer.json"))
    out = exported(source, tmp_path)
    assert read(out)["tokenizer_class"] == wanted


def test_a_source_that_is_gone_is_written_from_memory(source, tmp_path):
    kept = tokenizer_to_keep(Data(), Model(path=str(source)))
    source.rename(tmp_path / "moved")
    (tmp_path / "out").mkdir()
    kept.save(tmp_path / "out")
    assert problems_of_older_readers(tmp_path / "out") == []
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT)["input_ids"] == [0, 1, 2, 2, 4]
