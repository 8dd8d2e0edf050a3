"""`launcher export`, adapters, and the folders that are written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.cli.main import main
from launcher.errors import RecipeError
from launcher.models import safetensors_files
from launcher.models.build import build_model
from launcher.models.export import export_hugging_face
from launcher.models.initialization import initialize, materialize
from launcher.models.load import open_checkpoint, pretrained_weights
from launcher.models.lora import add_adapters
from launcher.models.safetensors_files import open_folder, write_tensors
from launcher.recipe.schema import Lora, Model
from tests.unit.models.test_checkpoint import CPU, logits, reference, save


def adapted(folder, *, lora=None, seed=3, dtype=torch.float32, task="causal_lm", trained=True):
    """A model with adapters that do something."""
    model = build_model(
        Model(path=str(folder), task=task),
        sequence_length=16,
        labels=["a", "b", "c"] if task != "causal_lm" else None,
    )
    found = open_checkpoint(folder, model)
    add_adapters(model, lora or Lora(rank=4, alpha=6.0), base_dtype=dtype, base=str(folder))
    pretrained_weights(model, CPU, CPU, checkpoint=found, seed=seed)
    if trained:
        torch.manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(std=0.1)
    return model.eval()


def exported(model, folder, **options):
    export_hugging_face(model, folder, rank=0, device=CPU, **options)
    return folder


def run_of(tmp_path, base, **options):
    """What a finished run leaves."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("run: {}\n")
    exported(adapted(base, **options), run / "hf")
    return run


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return save(
        tmp_path_factory.mktemp("mixtral"),
        model_type="mixtral",
        num_local_experts=3,
        num_experts_per_tok=2,
    )


def test_every_linear_layer_in_the_blocks_is_adapted_by_default(llama):
    model = adapted(llama)
    adapters = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    assert len(adapters) == 2 * 7
    assert not any("lm_head" in name for name in adapters)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if "lora_" in n
    }


def test_a_layer_of_the_same_name_outside_the_blocks_is_not_adapted(tmp_path):
    """OPT's blocks have fc1 and out_proj; here a projection outside of them is called fc1 too."""
    model = build_model(Model(config={"model_type": "opt", "vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
                                      "num_attention_heads": 4, "max_position_embeddings": 64}), sequence_length=16)  # fmt: skip
    with torch.device("meta"):
        model.model.fc1 = torch.nn.Linear(32, 32)
    add_adapters(model, Lora(rank=2), base_dtype=torch.float32)
    adapters = {
        name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name
    }
    assert "model.decoder.layers.1.fc1" in adapters
    assert "model.fc1" not in adapters


def test_target_modules_that_are_not_there(llama):
    with pytest.raises(RecipeError) as error:
        adapted(llama, lora=Lora(target_modules=("q_proj", "query", "embed_tokens")))
    assert error.value.problems == [
        f"lora.target_modules: {name} is not a linear layer of the model; available: down_proj, "
        "gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
        for name in ("query", "embed_tokens")
    ]


def test_adapters_start_at_zero_from_the_seed_on_a_base_of_fewer_bits(llama):
    first, again, other = (adapted(llama, seed=seed, trained=False) for seed in (1, 1, 2))
    assert torch.equal(logits(first), reference(llama))
    name = "model.layers.1.mlp.up_proj.lora_A.default.weight"
    drawn = [dict(model.named_parameters())[name] for model in (first, again, other)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert drawn[0].abs().max().item() == pytest.approx(32**-0.5, rel=0.1)
    half = dict(adapted(llama, dtype=torch.bfloat16).named_parameters())
    assert half[name].dtype == torch.float32
    assert {p.dtype for key, p in half.items() if "lora_" not in key} == {torch.bfloat16}


def test_experts_get_no_adapters_and_a_note(mixtral, messages):
    adapted(mixtral)
    (message,) = messages()
    assert message.startswith(
        "note: experts are not linear layers and get no adapters: 4 tensors such as"
    )
    assert message.endswith("model.layers.0.mlp.experts.gate_up_proj")


def test_gpt2s_adapted_projections_start_at_zero(tmp_path):
    """Its class draws every c_proj again in the block: an adapter in it must not be drawn with it."""
    save(tmp_path, model_type="gpt2", n_positions=64)
    model = adapted(tmp_path, trained=False)
    assert all(p.abs().max() == 0 for name, p in model.named_parameters() if ".lora_B." in name)


@pytest.mark.parametrize(
    ("options", "expected"), [({}, torch.float32), ({"dtype": torch.bfloat16}, torch.bfloat16)]
)
def test_dtype_of_an_export(llama, tmp_path, options, expected):
    model = build_model(Model(path=str(llama)), sequence_length=16)
    found = open_checkpoint(llama, model)
    pretrained_weights(model, CPU, CPU, checkpoint=found, seed=1)
    exported(model, tmp_path / "out", **options)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out/model.safetensors").values()} == {
        expected
    }
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == str(
        expected
    ).removeprefix("torch.")
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == expected


def test_tokenizer_and_generation_config_are_exported(tmp_path):
    base = save(tmp_path / "base")
    (base / "generation_config.json").write_text(
        json.dumps({"temperature": 0.3, "top_p": 0.7, "eos_token_id": [2, 5]})
    )
    model = build_model(Model(path=str(base)), sequence_length=16)
    found = open_checkpoint(base, model)
    pretrained_weights(model, CPU, CPU, checkpoint=found, seed=1)

    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    out = exported(model, tmp_path / "out", tokenizer=Tokenizer())
    assert (out / "tokenizer.json").read_text() == "{}"
    kept = json.loads((out / "generation_config.json").read_text())
    assert (kept["temperature"], kept["eos_token_id"]) == (0.3, [2, 5])


def test_an_export_replaces_an_older_one_completely(llama, tmp_path):
    model = adapted(llama)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("")
    out = exported(model, tmp_path / "out")
    assert sorted(file.name for file in out.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    config = json.loads((out / "adapter_config.json").read_text())
    assert (
        config["r"],
        config["lora_alpha"],
        config["task_type"],
        config["base_model_name_or_path"],
    ) == (4, 6, "CAUSAL_LM", str(llama))


def test_the_written_file_is_what_safetensors_reads(tmp_path):
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.float64),
        "b": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "view": torch.arange(12).view(3, 4).T,
        "flags": torch.tensor([True, False]),
    }
    write_tensors(tmp_path, ((name, tensor, tensor.dtype) for name, tensor in tensors.items()))
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    stored = open_folder(tmp_path)
    assert all(torch.equal(stored.read(name), tensor) for name, tensor in tensors.items())


def test_export_of_a_run(tmp_path, llama, capsys, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    model = build_model(Model(path=str(llama)), sequence_length=16)
    materialize(model, parameters=CPU, buffers=CPU)
    initialize(model, seed=9)
    monkeypatch.setattr(safetensors_files, "MAX_FILE_BYTES", 20_000)
    exported(model, run / "hf")
    (run / "hf" / "tokenizer.json").write_text("{}")
    assert main(["export", str(run), str(tmp_path / "out"), "dtype=bfloat16"]) == 0
    assert "for from_pretrained" in capsys.readouterr().out
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert main(["export", str(run), str(tmp_path / "same")]) == 0
    assert torch.equal(reference(tmp_path / "same"), logits(model.eval()))


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt2", "headless"])
def test_export_of_an_adapter(tmp_path, request, architecture):
    if architecture == "gpt2":
        base = save(tmp_path / "base", model_type="gpt2", n_positions=64)
    elif architecture == "headless":  # the checkpoint's names lack the model's prefix
        base = save(tmp_path / "base", auto="AutoModel", tie_word_embeddings=True)
    else:
        base = request.getfixturevalue(architecture)
    run = run_of(tmp_path, base)
    expected = logits(adapted(base))
    assert main(["export", str(run), str(tmp_path / "merged"), "merged=true"]) == 0
    assert (reference(tmp_path / "merged") - expected).abs().max() < 2e-6
    assert main(["export", str(run), str(tmp_path / "adapter"), "dtype=float16"]) == 0
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
    ).eval()
    assert (logits(model) - expected).abs().max() < 5e-3


def test_export_of_a_classifiers_adapter(tmp_path, llama):
    run = run_of(tmp_path, llama, task="sequence_classification")
    assert main(["export", str(run), str(tmp_path / "merged"), "merged=true"]) == 0
    merged = reference(tmp_path / "merged", "AutoModelForSequenceClassification")
    assert (merged - logits(adapted(llama, task="sequence_classification"))).abs().max() < 2e-6
    assert json.loads((tmp_path / "merged/config.json").read_text())["id2label"] == {
        "0": "a",
        "1": "b",
        "2": "c",
    }


def test_export_refused(tmp_path, llama, capsys):
    def error_of(*arguments):
        assert main(["export", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    run, out = tmp_path / "run", tmp_path / "out"
    assert "Missing argument 'OUT'" in error_of(run)
    assert "there is no such folder" in error_of(run, out)
    run.mkdir()
    assert "checkpoint.export: at_end" in error_of(run, out)
    (run / "hf").mkdir()
    save_file({"a": torch.zeros(1)}, run / "hf" / "model.safetensors")
    assert "has no adapter to merge" in error_of(run, out, "merged=true")
    assert "'int8' is not one of 'bfloat16', 'float16', 'float32'" in error_of(
        run, out, "dtype=int8"
    )
    wrong = "merge=true: not an option of launcher export; did you mean merged?"
    assert wrong in error_of(run, out, "merge=true")
    assert "merged=yes: must be true or false" in error_of(run, out, "merged=yes")
    assert "no folder" in error_of(run, tmp_path / "a" / "b")
    out.mkdir()
    (out / "file").write_text("")
    assert "exists and is not empty" in error_of(run, out)


def test_an_adapter_whose_base_is_gone(tmp_path, capsys):
    base = save(tmp_path / "base")
    run = run_of(tmp_path, base)
    base.rename(tmp_path / "moved")
    assert main(["export", str(run), str(tmp_path / "out"), "merged=true"]) == 2
    assert f"no such folder: {base}" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "run"]
