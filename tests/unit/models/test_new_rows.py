"""New tokens (model.new_tokens): tokenizer, rows of the embeddings, adapters; compared with transformers and peft."""

import pickle

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel

from launcher.data.encoder import make_encoder
from launcher.data.ends import taught_ends
from launcher.data.tokenizer import (
    ExtendedName,
    hugging_face_tokenizer,
    load_tokenizer,
    new_token_ids,
    tokenizer_identity,
    tokenizer_name,
)
from launcher.errors import RecipeError
from launcher.models.adapter_files import adapter_loader
from launcher.models.build import build_model
from launcher.models.hugging_face_files import export_hugging_face
from launcher.models.load import open_checkpoint, pretrained_weights
from launcher.models.lora import add_adapters
from launcher.models.new_rows import grow_vocabulary
from launcher.recipe.schema import Data, Lora, Model
from launcher.sources.rows import Row, SourcePart
from tests.multimodal import SHARED_KEYS
from tests.unit.models.test_load import CPU, save

TOKENS = ("<tool_call>", "</tool_call>", "<|end_of_turn|>")
NAME = ExtendedName("bytes", TOKENS)


# Tokenizer


def test_each_new_token_is_one_id_also_after_a_reload(tmp_path):
    hugging_face_tokenizer(NAME).save_pretrained(tmp_path)
    reloaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "a<tool_call>b</tool_call><|end_of_turn|>"
    assert new_token_ids(NAME) == range(260, 263)
    for tokenizer in (hugging_face_tokenizer(NAME), reloaded):
        assert tokenizer(text)["input_ids"] == [97, 260, 98, 261, 262]
        assert tokenizer.decode([260, 97, 262], skip_special_tokens=True) == "<tool_call>a"
    assert load_tokenizer(NAME).ids([text])[0].tolist() == [97, 260, 98, 261, 262]
    assert len(hugging_face_tokenizer("bytes")) == 260


def test_names_with_other_tokens_are_other_tokenizers():
    other = ExtendedName("bytes", TOKENS[:1])
    names = {NAME, other, "bytes"}
    assert len({tokenizer_identity(name) for name in names}) == len(names) == 3
    assert pickle.loads(pickle.dumps(NAME)) == NAME == ExtendedName("bytes", TOKENS)
    assert tokenizer_name(Data(tokenizer="bytes"), Model(path="x", new_tokens=TOKENS)) == NAME
    assert tokenizer_name(Data(), Model(path="x")) == "x"


def test_a_new_token_ends_turns_and_generation(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end_of_turn|>{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    data = Data(kind="chat", chat_template=str(tmp_path / "template.jinja"))
    assert taught_ends(data, tokenizer=NAME) == [262]
    answer = {"role": "assistant", "content": "<tool_call>x</tool_call>"}
    row = Row(SourcePart("a", "jsonl"), 0, {"messages": [{"role": "user", "content": "q"}, answer]})
    (encoded,) = make_encoder("chat", data, tokenizer=NAME).encode_rows([row])
    assert [token for token in encoded.labels.tolist() if token >= 0] == [260, ord("x"), 261, 262]


def test_tokens_that_the_tokenizer_has_are_refused():
    problems = [
        "model.new_tokens: <|end|> is token 256 of the tokenizer bytes already; leave it out"
    ]
    with pytest.raises(RecipeError) as refused:
        hugging_face_tokenizer(ExtendedName("bytes", ("<|end|>", "<new>")))
    assert refused.value.problems == problems


# Rows. The tokenizer has 60 tokens, and the new ones are 60 to 62; the checkpoint has 60 or 64 rows


NEW = range(60, 63)
CASES = {
    "added": {"vocab_size": 60},
    "spare": {"vocab_size": 64},
    "tied": {"vocab_size": 60, "model_type": "qwen2", "tie_word_embeddings": True},
    "bias": {"vocab_size": 60, "model_type": "phi"},
    "scaled": {"vocab_size": 64, "model_type": "gemma3_text", "tie_word_embeddings": True},
}
CASES["of layers"] = {"vocab_size": 60, "model_type": "gemma4_text", "num_hidden_layers": 4}
CASES["of layers"] |= SHARED_KEYS | {"vocab_size_per_layer_input": 60, "head_dim": 8}
IDS = torch.tensor([[3, 60, 7, 61, 62, 5, 60, 9], [1, 2, 62, 4, 5, 61, 60, 8]])


@pytest.fixture(params=CASES)
def folder(request, tmp_path):
    return save(tmp_path / "base", **CASES[request.param])


def load(folder, lora=None):
    model = build_model(Model(path=str(folder)), sequence_length=16)
    grow_vocabulary(model, NEW)
    found = open_checkpoint(folder, model, new_ids=NEW)
    if lora is not None:
        options = {"base_dtype": torch.float32, "base": str(folder), "new_ids": NEW}
        add_adapters(model, lora, **options)

    def fill(*arguments):
        pretrained_weights(*arguments, checkpoint=found, seed=3)

    adapter_loader(fill, model, None)(model, CPU, CPU)
    return model.train(), found


def reference(folder):
    """transformers' own model, with the same rows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if model.config.vocab_size < NEW.stop:
        model.resize_token_embeddings(NEW.stop, mean_resizing=False)
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    if hasattr(model, "get_per_layer_input_embeddings"):
        modules.append(model.get_per_layer_input_embeddings())
    weights = {id(p): p for module in modules for p in module.parameters()}
    with torch.no_grad():
        for weight in weights.values():
            weight[NEW.start : NEW.stop] = weight[: NEW.start].double().mean(0)
    return model.train()


def losses(model, steps=4):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    values = []
    for _ in range(steps):
        logits = model(input_ids=IDS).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, IDS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def test_losses_are_those_of_transformers(folder):
    ours, found = load(folder)
    theirs = reference(folder)
    assert ours.config.vocab_size == theirs.config.vocab_size
    read, state = found.reader(), theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-7)
        assert (
            name not in found.loaded or name == "lm_head.weight" or torch.equal(read(name), tensor)
        )
    assert losses(ours) == pytest.approx(losses(theirs), abs=4e-6)


@pytest.mark.parametrize("folder", ["added", "spare", "tied", "scaled", "of layers"], indirect=True)
def test_adapters_train_only_the_new_rows_and_peft_loads_them(folder, tmp_path):
    ours, _ = load(folder, Lora(rank=4, alpha=8.0))
    trained = {
        name for name, p in ours.named_parameters() if p.requires_grad and "lora" not in name
    }
    assert trained
    assert all(name.endswith(".new_rows") for name in trained)
    frozen = {name: p.clone() for name, p in ours.named_parameters() if not p.requires_grad}
    export_hugging_face(ours, tmp_path / "before", rank=0, device=CPU)
    config = LoraConfig.from_pretrained(tmp_path / "before")
    theirs = PeftModel.from_pretrained(reference(folder), tmp_path / "before", is_trainable=True)
    assert losses(ours) == pytest.approx(losses(theirs.train()), abs=4e-6)
    assert sorted({id for ids in config.trainable_token_indices.values() for id in ids}) == [*NEW]
    assert all(torch.equal(p, frozen[n]) for n, p in ours.named_parameters() if n in frozen)

    for merged in (False, True):  # what is exported computes what was trained
        export_hugging_face(ours, tmp_path / "after", rank=0, device=CPU, merged=merged)
        if merged:
            auto = transformers.AutoModelForCausalLM
            loaded = auto.from_pretrained(tmp_path / "after", dtype=torch.float32)
        else:
            loaded = PeftModel.from_pretrained(reference(folder), tmp_path / "after")
        with torch.no_grad():
            wanted = ours.eval()(input_ids=IDS).logits
            torch.testing.assert_close(loaded.eval()(input_ids=IDS).logits, wanted)


def test_modules_to_save_train_all_rows(tmp_path):
    folder = save(tmp_path / "base", vocab_size=60)
    saved = ("embed_tokens", "lm_head")
    model, _ = load(folder, Lora(rank=4, alpha=8.0, modules_to_save=saved))
    assert not [name for name, _ in model.named_parameters() if "new_rows" in name]
    assert model.get_parameter("lm_head.weight").requires_grad
    with pytest.raises(RecipeError, match=r"lora for lm_head, which has an adapter; leave it out"):
        load(folder, Lora(rank=4, alpha=8.0, target_modules=("q_proj", "lm_head")))
    with pytest.raises(
        RecipeError, match=r"lora for lm_head, which has a bias, .*modules_to_save$"
    ):
        load(save(tmp_path / "phi", **CASES["bias"]), Lora(rank=4, alpha=8.0))
