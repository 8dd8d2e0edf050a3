"""`launcher export`, adapters, and the exported folders."""

import dataclasses
import json
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from launcher.checkpoint import files
from launcher.cli import requests
from launcher.cli.main import main
from launcher.data.tokenizer import (
    hugging_face_byte_tokenizer,
    hugging_face_tokenizer,
    tokenizer_identity,
    tokenizer_name,
)
from launcher.errors import RecipeError
from launcher.files import remove_leftovers, replace_folder, write_file
from launcher.models import safetensors_files
from launcher.models.build import build_model
from launcher.models.hugging_face_files import (
    WRITTEN,
    add_ends,
    end_ids,
    export_hugging_face,
)
from launcher.models.initialization import random_weights
from launcher.models.load import open_checkpoint, pretrained_weights
from launcher.models.lora import add_adapters
from launcher.models.safetensors_files import open_folder, write_tensors
from launcher.models.towers import use_towers
from launcher.objectives.next_token import NextToken
from launcher.recipe.load import load_recipe, to_yaml
from launcher.recipe.schema import Lora, Model
from launcher.reliability.run_directory import RunFolder
from launcher.sources.hub import NAMED_TEMPLATES, refuse_links
from tests.unit.models.test_load import CLASSIFIER, CPU, load, logits, reference, save

GPT2 = {"model_type": "gpt2", "n_positions": 64}


def load_with_adapters(
    folder,
    *,
    lora=None,
    seed=3,
    dtype=torch.float32,
    task="causal_lm",
    trained=True,
    images=False,
):
    """A model with adapters. If `trained`, they change the logits. images: rows have images."""
    labels = ["a", "b", "c"] if task != "causal_lm" else None
    model = build_model(Model(path=str(folder), task=task), sequence_length=16, labels=labels)
    if images:
        use_towers(model, {"image": "none"})
    found = open_checkpoint(folder, model)
    add_adapters(model, lora or Lora(rank=4, alpha=6.0), base_dtype=dtype, base=str(folder))
    pretrained_weights(model, CPU, CPU, checkpoint=found, seed=seed)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if trained and ".lora_B." in name:
            parameter.data.normal_(std=0.1)
    return model.eval()


def export_model(model, folder, **options):
    export_hugging_face(model, folder, rank=0, device=CPU, **options)
    return folder


def export(run, out, *options):
    return main(["export", str(run), f"out={out}", *options])


def create_run(tmp_path, model):
    """Creates the folder of a finished run."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("run: {}\n")
    export_model(model, run / "hf")
    return run


def parameters_with(model, part):
    return {name: p for name, p in model.named_parameters() if part in name}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    return save(tmp_path_factory.mktemp("mixtral"), model_type="mixtral", **experts)


def test_verify_without_a_checkpoint_is_refused_before_the_export(llama, tmp_path, capsys):
    """Also where all checkpoints are damaged, of which an export of hf needs none."""
    run, out = create_run(tmp_path, load_with_adapters(llama)), tmp_path / "new" / "out"
    assert export(run, out, "--verify") == 2
    refused = f"{run} has no checkpoint to compare {out} with; leave --verify out"
    assert refused in capsys.readouterr().err
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    assert export(run, out, "--verify") == 2
    assert "checkpoint" in capsys.readouterr().err
    assert not out.parent.exists()


def test_all_linear_layers_of_blocks_are_adapted_by_default(llama):
    model = load_with_adapters(llama)
    adapters = parameters_with(model, ".lora_A.")
    assert len(adapters) == 2 * 7
    assert not any("lm_head" in name for name in adapters)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == parameters_with(model, "lora_").keys()


def test_layers_outside_the_blocks_are_not_adapted():
    """OPT's blocks have a layer fc1. This model also has a layer fc1 outside its blocks."""
    config = {"model_type": "opt", "vocab_size": 64, "hidden_size": 32, "ffn_dim": 48}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    model = build_model(Model(config=config), sequence_length=16)
    with torch.device("meta"):
        model.model.fc1 = torch.nn.Linear(32, 32)
    add_adapters(model, Lora(rank=2), base_dtype=torch.float32)
    layers = {name.split(".lora_A")[0] for name in parameters_with(model, ".lora_A.")}
    assert "model.decoder.layers.1.fc1" in layers
    assert "model.fc1" not in layers


def test_unknown_target_modules_are_refused(llama):
    with pytest.raises(RecipeError) as error:
        load_with_adapters(llama, lora=Lora(target_modules=("q_proj", "query", "embed_tokens")))
    assert error.value.problems == [
        f"lora.target_modules: {name} is not a linear layer of the model; available: down_proj, "
        "gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
        for name in ("query", "embed_tokens")
    ]


def test_new_adapters_are_seeded_float32_and_without_effect(llama):
    models = [load_with_adapters(llama, seed=seed, trained=False) for seed in (1, 1, 2)]
    assert torch.equal(logits(models[0]), reference(llama))
    name = "model.layers.1.mlp.up_proj.lora_A.default.weight"
    first, again, other = (model.get_parameter(name) for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.abs().max().item() == pytest.approx(32**-0.5, rel=0.1)
    half = dict(load_with_adapters(llama, dtype=torch.bfloat16).named_parameters())
    assert half[name].dtype == torch.float32
    assert {p.dtype for key, p in half.items() if "lora_" not in key} == {torch.bfloat16}


def test_gpt2_adapters_start_at_zero(tmp_path):
    """GPT-2 initializes every c_proj again in the block. The adapter in it must not change."""
    model = load_with_adapters(save(tmp_path, **GPT2), trained=False)
    assert all(p.abs().max() == 0 for p in parameters_with(model, ".lora_B.").values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_writes_dtype_tokenizer_and_generation_config(tmp_path, dtype):
    base = save(tmp_path / "base")
    generation = {"temperature": 0.3, "top_p": 0.7, "eos_token_id": [2, 5]}
    (base / "generation_config.json").write_text(json.dumps(generation))

    class Tokenizer:
        def save(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    out = export_model(load(base), tmp_path / "out", tokenizer=Tokenizer(), dtype=dtype)
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {dtype}
    assert f"torch.{json.loads((out / 'config.json').read_text())['dtype']}" == str(dtype)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == dtype
    assert (out / "tokenizer.json").read_text() == "{}"
    assert json.loads((out / "generation_config.json").read_text()).items() >= generation.items()


@pytest.mark.parametrize(
    ("known", "expected"), [(None, 7), (2, [2, 7]), ([2, 5], [2, 5, 7]), ([7, 2], [7, 2]), (7, 7)]
)
def test_ends_that_training_teaches_are_added(tmp_path, caplog, known, expected):
    """A base model ends a text with eos_token_id, and a chat with another token."""
    base = save(tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": known}))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    model = load_with_adapters(base)
    with caplog.at_level("INFO"):
        add_ends(model, [7], lambda ids: [f"<{token}>" for token in ids])
    logged = [record.getMessage() for record in caplog.records]
    assert logged == (
        []
        if expected == known
        else [
            "generation_config.json, eos_token_id: the model also stops at <7> (7), which training "
            f"teaches; before: {'none' if known is None else end_ids(load(base))}"
        ]
    )
    run = tmp_path / "run"
    export_model(model, run / "hf")
    assert export(run, tmp_path / "merged", "--merged") == 0
    for folder in (export_model(model, tmp_path / "out", merged=True), tmp_path / "merged"):
        found = AutoModelForCausalLM.from_pretrained(folder).generation_config
        assert found.eos_token_id == expected


def test_export_replaces_an_older_export_completely(llama, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.safetensors").write_text("")
    out = export_model(load_with_adapters(llama), tmp_path / "out")
    names = ["adapter_config.json", "adapter_model.safetensors", "generation_config.json"]
    assert sorted(file.name for file in out.iterdir()) == names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    config = json.loads((out / "adapter_config.json").read_text())
    keys = ("r", "lora_alpha", "task_type", "base_model_name_or_path")
    assert [config[key] for key in keys] == [4, 6, "CAUSAL_LM", str(llama)]
    known = {  # by peft 0.13, which refuses other keys
        *("peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "r"),
        *("lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "bias", "use_dora"),
        *("use_rslora", "fan_in_fan_out", "init_lora_weights"),
    }
    assert config.keys() <= known
    from peft import LoraConfig

    written = vars(load_with_adapters(llama).peft_config["default"])
    assert vars(LoraConfig.from_pretrained(out)) == written | {
        "inference_mode": config["inference_mode"]
    }


def test_interrupted_export_keeps_a_complete_folder(tmp_path, monkeypatch):
    """At any moment, the old or the new folder is complete."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "model").write_text("old")
    found = []

    def record_folders():
        found.append({name.parent.name: name.read_text() for name in tmp_path.glob("*/model")})

    for owner, name in ((Path, "rename"), (shutil, "rmtree")):
        original = getattr(owner, name)

        def observed(*arguments, original=original, **options):
            record_folders()
            original(*arguments, **options)
            record_folders()

        monkeypatch.setattr(owner, name, observed)
    with replace_folder(folder, written=WRITTEN) as scratch:
        (scratch / "model").write_text("new")
    names = [{name.partition("-")[0]: text for name, text in state.items()} for state in found]
    assert {"hf.old": "old", "hf.writing": "new"} in names  # between the two renames
    assert all({"old", "new"} & set(state.values()) for state in found)
    assert found[-1] == {"hf": "new"}


def test_leftovers_of_killed_exports_are_removed(tmp_path, caplog):
    """Those of this machine. Those of another one only with the lock of the run folder, and those
    that a process writes never."""
    folder = tmp_path / "hf"
    with replace_folder(folder, written=WRITTEN) as scratch:
        (scratch / "model").write_text("complete")
        machine = scratch.name.split("-")[1]
        dead = [f"hf.{what}-{machine}-{2**22 + 1}-7-abcd" for what in ("writing", "old")]
        reused = f"hf.writing-{machine}-{os.getpid()}-7-abcd"
        other = "hf.writing-01234567-1-7-abcd"
        user = ["hf.writing-1", "hf.old", "hf2.writing-01234567-1-7-abcd"]
        for name in (*dead, reused, other, *user):
            (tmp_path / name).mkdir()
    with replace_folder(folder, written=WRITTEN) as scratch:
        (scratch / "model").write_text("new")
        assert {path.name for path in tmp_path.iterdir()} == {"hf", scratch.name, other, *user}
        assert f"{other} was left by an export on another machine" in caplog.text
        remove_leftovers(folder, owned=True)
        assert {path.name for path in tmp_path.iterdir()} == {"hf", scratch.name, *user}
    # Killed between its two renames: the old folder has files of the user that no export writes
    folder.rename(tmp_path / dead[1])
    remove_leftovers(folder)
    assert (folder / "model").read_text() == "new"


def test_export_removes_no_folder_of_the_user(tmp_path, llama):
    own = [tmp_path / name for name in ("out.old", "out.writing", "out.old-1", "link.old")]
    for folder in own:
        folder.mkdir()
        (folder / "notes").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("out", "out", "link"):
        export_model(load_with_adapters(llama), tmp_path / name)
    assert [(folder / "notes").read_text() for folder in own] == ["mine"] * 4
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere/adapter_config.json").is_file()
    there = {path.name for path in tmp_path.iterdir()} - {folder.name for folder in own}
    assert there == {"out", "link", "elsewhere"}


def test_export_keeps_files_that_no_export_writes(tmp_path, llama):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("README.md", "model-00001-of-00002.safetensors", "quantized/model.gguf"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    (out / "latest").symlink_to("nowhere")
    export_model(load(llama), out)
    assert (out / "README.md").read_text() == (out / "quantized/model.gguf").read_text() == "mine"
    assert (out / "latest").is_symlink()
    assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_exported_files_have_the_mode_of_the_umask(tmp_path, llama, umask):
    before = os.umask(umask)
    try:
        out = export_model(load(llama), tmp_path / "out")
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o666 & ~umask}


def create_checkpoint(run, model, step, recipe):
    """Writes a checkpoint of a run with one rank."""
    scratch = files.scratch_folder(run / "checkpoints", step)
    tensors = {f"model.{name}": p.detach().clone() for name, p in model.named_parameters()}
    save_file(tensors, scratch / files.rank_file(0))
    index = {
        name: {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "parts": [[files.rank_file(0), 0, len(tensor)]],
        }
        for name, tensor in tensors.items()
    }
    text = {files.INDEX: json.dumps(index), files.STATE: json.dumps({"recipe": to_yaml(recipe)})}
    for name, content in text.items():
        (scratch / name).write_text(content)
    written = {file.name: write_file(file, file.read_bytes()) for file in scratch.iterdir()}
    return files.commit(scratch, step=step, ranks=1, files=written)


def recipe_of(*overrides):
    words = ["recipe=quickstart", "model.config=null", "data.validation=null", *overrides]
    return load_recipe(words, ranks=None, files=False).recipe


def model_with_seed(folder, seed):
    model = build_model(Model(path=str(folder)), sequence_length=16)
    random_weights(model, CPU, CPU, seed=seed)
    return model.eval()


def test_an_ended_export_leaves_nothing(tmp_path, llama, monkeypatch, capsys):
    """A request to stop left the folder that was being written."""
    run = create_run(tmp_path, model_with_seed(llama, 1))
    copy = shutil.copy2

    def ended(source, target):
        copy(source, target)
        raise requests.Terminated(signal.SIGTERM)

    monkeypatch.setattr(shutil, "copy2", ended)
    assert main(["export", str(run), f"out={tmp_path}/out"]) == 143
    expected = f"stopped by SIGTERM; {tmp_path / 'out'} was not written"
    assert capsys.readouterr().err.splitlines()[-1] == expected
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_export_takes_the_newest_weights(tmp_path, llama, capsys):
    """hf/ is of step 20. It is taken until there is a newer checkpoint."""
    old, new = model_with_seed(llama, 1), model_with_seed(llama, 2)
    run = create_run(tmp_path, old)
    recipe = recipe_of(f"model.path={llama}")

    def exported(*expected):
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        assert export(run, out) == 0
        printed = capsys.readouterr().out
        assert all(text in printed for text in expected), printed
        return reference(out)

    assert torch.equal(exported("run/hf, of an unknown step"), logits(old))
    create_checkpoint(run, new, 20, recipe)
    assert torch.equal(exported("step_00000020, step 20"), logits(new)), "the step of hf is unknown"
    folder = RunFolder(run)
    folder.note("finished", step=20, exported=True)
    assert torch.equal(exported("run/hf, step 20"), logits(old))
    newest = create_checkpoint(run, new, 30, recipe)
    assert torch.equal(exported("step_00000030, step 30"), logits(new))
    folder.note("finished", step=30, exported=False)
    assert torch.equal(exported("step_00000030, step 30"), logits(new)), "hf is of step 20"
    (newest / "index.json").unlink()
    assert torch.equal(exported("run/hf, step 20"), logits(old)), "the newer one is damaged"
    folder.note("resumed", step=10)
    assert torch.equal(exported("step_00000020, step 20"), logits(new)), "the run went back"


@pytest.mark.slow
def test_metrics_beside_the_loss_are_no_losses_of_rows(tmp_path, llama, capsys, monkeypatch):
    """`launcher rows --loss` took the sums of a loss with metrics for one number."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3, 1, 2, 3]}\n' * 64)
    words = ["data.kind=tokens", "data.train=rows.jsonl", "run.device=cpu"]
    recipe = recipe_of(f"model.path={llama}", *words)
    run = create_run(tmp_path, model_with_seed(llama, 1))
    (run / "recipe.yaml").write_text(to_yaml(recipe))

    def printed():
        assert main(["rows", str(run), "step=1", "--loss"]) == 0
        return capsys.readouterr().out

    expected, loss = printed(), NextToken.loss
    assert "rows.jsonl:1 " in expected
    more = torch.tensor([7.0, 8.0])
    vector = lambda *inputs: torch.cat([loss(*inputs).view(1), more])  # noqa: E731
    monkeypatch.setattr(NextToken, "loss", vector)
    assert printed() == expected


@pytest.mark.slow
def test_reading_a_run_executes_nothing(tmp_path, llama, capsys, monkeypatch):
    """The recipe of the run calls a function that creates a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text(
        "from pathlib import Path\nPath('executed').touch()\ndef build(): Path('executed').touch()\n"
    )
    run = create_run(tmp_path, model_with_seed(llama, 1))
    shutil.rmtree(run / "hf")
    built = recipe_of("model.builder=theirs:build", "data.builder=theirs:build", "data.train=null")
    with_code = recipe_of(f"model.path={llama}", "model.trust_remote_code=true")
    own = {"device": "cpu", "device_memory": None, "ranks": 1, "ranks_per_node": 1}
    RunFolder(run).note("built", **own)
    RunFolder(run).write_status("finished", step=10)
    for recipe, code in (
        (built, "model.builder: theirs:build, data.builder: theirs:build"),
        (with_code, f"model.trust_remote_code: true (the code in {llama})"),
    ):
        create_checkpoint(run, model_with_seed(llama, 1), 10, recipe)
        (run / "recipe.yaml").write_text(to_yaml(recipe) + "# ${oc.env:HOME}")
        for command in (
            ["rows", run, "step=1", "--loss"],
            ["export", run, "out=out"],
            ["export", run, f"out={run}", "--verify"],
            ["report", run],
            ["status", run],
        ):
            status = main([str(word) for word in command])
            printed = capsys.readouterr()
            text = printed.out + printed.err
            if command[0] in ("status", "report"):  # they run no code of a recipe
                assert status == 0
            elif command == ["export", run, "out=out"] and recipe is built:
                assert status == 2
                assert "is not a transformers model" in text
            else:
                assert status == 2
                assert f"its recipe would run code: {code}. If you have read that" in text
                assert "trust it, add --trust-run" in text
            assert not (tmp_path / "executed").exists(), command
        shutil.rmtree(run / "checkpoints")
    create_checkpoint(run, model_with_seed(llama, 1), 10, with_code)
    assert main(["export", str(run), "out=out", "--trust-run"]) == 0
    (run / "recipe.yaml").write_text(to_yaml(built))
    assert main(["rows", str(run), "step=1", "--trust-run"]) == 2  # it does not return data
    assert (tmp_path / "executed").exists()


def test_environment_is_not_shown_and_links_are_not_followed(tmp_path, llama, capsys, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_READER", "hidden-value")
    monkeypatch.chdir(tmp_path)
    run = create_run(tmp_path, model_with_seed(llama, 1))
    text = to_yaml(recipe_of(f"model.path={llama}"))
    (run / "recipe.yaml").write_text(
        text.replace("name: quickstart", "name: ${oc.env:SECRET_OF_THE_READER}")
    )
    RunFolder(run).write_status("finished", step=1)
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "oc.env:SECRET_OF_THE_READER" in page
    assert "hidden-value" not in page
    (tmp_path / "private").write_text("hidden-value")
    (run / "hf/notes.txt").symlink_to(tmp_path / "private")
    assert export(run, tmp_path / "out") == 2
    assert "notes.txt is a link to a file outside of" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def add_tokenizer_with_code(folder):
    """Its class writes the file `executed` into the current folder when it is imported."""
    hugging_face_byte_tokenizer().save_pretrained(folder)
    (folder / "theirs.py").write_text(
        "from pathlib import Path\nfrom transformers import PreTrainedTokenizerFast\n"
        "Path('executed').touch()\nclass Theirs(PreTrainedTokenizerFast): pass\n"
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": [None, "theirs.Theirs"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.long
def test_no_answer_in_a_terminal_runs_the_code_of_a_tokenizer(
    tmp_path, llama, monkeypatch, capsys, caplog
):
    """transformers asks in a terminal where trust_remote_code is not given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *text: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    theirs = Path(shutil.copytree(llama, tmp_path / "theirs"))
    add_tokenizer_with_code(theirs)
    (tmp_path / "data.txt").write_text("some text")
    words = [f"model.path={theirs}", "data.train=data.txt", "data.sequence_length=16"]
    run = create_run(tmp_path, model_with_seed(llama, 1))
    shutil.rmtree(run / "hf")
    token_rows = recipe_of(*words, "data.tokenizer=null", "data.kind=tokens")
    create_checkpoint(run, model_with_seed(llama, 1), 10, token_rows)
    quickstart = ["recipe=quickstart", "model.config=null", "data.tokenizer=null", *words]
    assert main(["inspect", *quickstart]) == 2
    assert "it needs its own Python code, which is not run by default" in capsys.readouterr().err
    assert export(run, tmp_path / "out") == 0
    assert "exported without its tokenizer: data.tokenizer:" in caplog.text
    assert export(run, tmp_path / "out", "--verify") == 0
    assert not (tmp_path / "executed").exists()
    section, data = Model(path=str(theirs), trust_remote_code=True), recipe_of(*words).data
    other = tokenizer_name(dataclasses.replace(data, tokenizer=str(llama)), section)
    assert other == str(llama)  # the code of model.path is trusted, and no other
    trusted = tokenizer_name(dataclasses.replace(data, tokenizer=None), section)
    assert pickle.loads(pickle.dumps(trusted)) == trusted
    assert type(hugging_face_tokenizer(trusted)).__name__ == "Theirs"
    assert (tmp_path / "executed").exists()
    before = tokenizer_identity(trusted)
    (theirs / "theirs.py").write_text("# changed")
    assert tokenizer_identity(trusted) != before


@pytest.mark.parametrize(
    "name",
    ["LICENSE", "preprocessor_config.json", "chat_template.jinja", "vocab.txt", "theirs.py", None],
)
def test_links_that_leave_a_model_are_not_followed(tmp_path, llama, capsys, name):
    """A stranger's model would publish a file of the reader. The weights may be links."""
    theirs = Path(shutil.copytree(llama, tmp_path / "theirs"))
    hugging_face_byte_tokenizer().save_pretrained(theirs)
    (theirs / "model.safetensors").rename(tmp_path / "weights")
    (theirs / "model.safetensors").symlink_to(tmp_path / "weights")
    (theirs / "LICENSE.txt").symlink_to("config.json")  # inside
    run = create_run(tmp_path, model_with_seed(llama, 1))
    shutil.rmtree(run / "hf")
    recipe = recipe_of(f"model.path={theirs}", "data.tokenizer=null")
    create_checkpoint(run, model_with_seed(llama, 1), 10, recipe)
    (tmp_path / "private").write_text("hidden-value")
    if name is None:  # a link to a folder
        (tmp_path / "templates").mkdir()
        (tmp_path / "private").rename(tmp_path / "templates/tool_use.jinja")
        (theirs / "additional_chat_templates").symlink_to(tmp_path / "templates")
        name = "additional_chat_templates/tool_use.jinja"
    else:
        (theirs / name).unlink(missing_ok=True)
        (theirs / name).symlink_to(os.path.relpath(tmp_path / "private", theirs))
    assert export(run, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert f"model.path: {theirs / name} is a link to a file outside of the folder" in error
    assert not (tmp_path / "out").exists()
    with pytest.raises(RecipeError, match="which an export would publish"):
        hugging_face_tokenizer(str(theirs))
    (theirs / name.partition("/")[0]).unlink()
    assert export(run, tmp_path / "out") == 0
    assert (tmp_path / "out/LICENSE.txt").is_file()


def test_a_link_that_is_made_during_the_run_is_not_exported(tmp_path, llama, caplog):
    """The run ends with its export, without the file."""
    theirs = Path(shutil.copytree(llama, tmp_path / "theirs"))
    model = model_with_seed(theirs, 1)
    (tmp_path / "private").write_text("hidden-value")
    (theirs / "LICENSE").symlink_to(tmp_path / "private")
    (theirs / "NOTICE").write_text("theirs")
    out = export_model(model, tmp_path / "out")
    assert (out / "NOTICE").is_file()
    assert not (out / "LICENSE").exists()
    assert f"LICENSE is not exported: it is a link to {tmp_path / 'private'}" in caplog.text


def test_the_files_of_the_hubs_cache_are_links(tmp_path, llama):
    snapshot = tmp_path / "models--owner--name/snapshots/0123"
    snapshot.mkdir(parents=True)
    blobs = Path(shutil.copytree(llama, tmp_path / "models--owner--name/blobs"))
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    refuse_links(snapshot, key="")
    shutil.move(blobs, tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecipeError, match="outside of the folder"):
        refuse_links(snapshot, key="")


@pytest.mark.parametrize("adapter", [False, True])
def test_written_files_are_readable_by_safetensors(tmp_path, adapter, monkeypatch):
    monkeypatch.setattr(safetensors_files, "MAX_FILE_BYTES", 150)
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.float64),
        "b": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "view": torch.arange(12).view(3, 4).T,
        "flags": torch.tensor([True, False]),
    }
    written = ((name, tensor, tensor.dtype) for name, tensor in tensors.items())
    write_tensors(tmp_path, written, adapter=adapter)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert files == (["adapter_model.safetensors"] if adapter else parts)
    found = {key: value for file in files for key, value in load_file(tmp_path / file).items()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    if not adapter:
        stored = open_folder(tmp_path)
        assert all(torch.equal(stored.read(name), tensor) for name, tensor in tensors.items())


@pytest.mark.long
def test_export_of_a_run_that_trains(tmp_path, llama, capsys, monkeypatch):
    """--verify compared with a newer checkpoint than the one that was exported; and an export
    failed because the run had deleted its checkpoint."""
    model, run = model_with_seed(llama, 1), tmp_path / "run"
    recipe = recipe_of(f"model.path={llama}")
    step, verify, verified = 10, files.verify, []
    create_checkpoint(run, model, step, recipe)

    def train(path, deep=True):
        """When the export verifies a checkpoint, the run saves the next one and prunes. The first
        one is gone before it is locked."""
        nonlocal step
        if deep:
            verified.append(path)
            if len(verified) == 1:
                shutil.rmtree(path)
            step += 10
            create_checkpoint(run, model_with_seed(llama, step), step, recipe)
            files.prune(run / "checkpoints", keep_last=1)
        return verify(path, deep)

    monkeypatch.setattr(files, "verify", train)
    assert export(run, tmp_path / "out", "--verify") == 0
    assert "out matches " in capsys.readouterr().out
    assert [path.name for path in verified] == ["step_00000010", "step_00000020"]
    assert [path.name for path in files.list_checkpoints(run / "checkpoints")] == [
        "step_00000020",
        "step_00000030",
    ]


def test_export_of_a_run(tmp_path, llama, capsys, monkeypatch):
    model = build_model(Model(path=str(llama)), sequence_length=16)
    random_weights(model, CPU, CPU, seed=9)
    monkeypatch.setattr(safetensors_files, "MAX_FILE_BYTES", 20_000)
    run = create_run(tmp_path, model)
    (run / "hf" / "tokenizer.json").write_text("{}")
    (run / "hf" / NAMED_TEMPLATES).mkdir()
    (run / "hf" / NAMED_TEMPLATES / "tool_use.jinja").write_text("of tools")
    assert export(run, tmp_path / "out", "dtype=bfloat16") == 0
    assert (tmp_path / "out" / NAMED_TEMPLATES / "tool_use.jinja").read_text() == "of tools"
    assert "for from_pretrained" in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    for name, tensor in loaded.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name])
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert export(run, tmp_path / "same") == 0
    assert torch.equal(reference(tmp_path / "same"), logits(model.eval()))


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt2", "headless"])
def test_export_of_an_adapter(tmp_path, request, architecture):
    from peft import PeftModel

    if architecture == "gpt2":
        base = save(tmp_path / "base", **GPT2)
    elif architecture == "headless":  # the checkpoint's names lack the model's prefix
        base = save(tmp_path / "base", auto="AutoModel", tie_word_embeddings=True)
    else:
        base = request.getfixturevalue(architecture)
    run, expected = create_run(tmp_path, load_with_adapters(base)), logits(load_with_adapters(base))
    assert export(run, tmp_path / "merged", "--merged") == 0
    assert (reference(tmp_path / "merged") - expected).abs().max() < 2e-6
    assert export(run, tmp_path / "adapter", "dtype=float16") == 0
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    assert (logits(model) - expected).abs().max() < 5e-3


@pytest.mark.parametrize("stored", ["in the run", "as an adapter"])
def test_merged_adapter_of_a_tied_head_is_exported_untied(tmp_path, stored):
    """The adapter changes the head and not the embedding, as without merging."""
    base = save(tmp_path / "base", tie_word_embeddings=True)
    lora = Lora(rank=4, alpha=6.0, target_modules=("q_proj", "lm_head"))
    model, out = load_with_adapters(base, lora=lora), tmp_path / "out"
    if stored == "in the run":
        export_model(model, out, merged=True)
    else:
        assert export(create_run(tmp_path, model), out, "--merged") == 0
    assert (reference(out) - logits(model)).abs().max() < 2e-6
    assert (reference(base) - logits(model)).abs().max() > 0.01
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    exported, original = (load_file(folder / "model.safetensors") for folder in (out, base))
    name = "model.embed_tokens.weight"
    assert torch.equal(exported[name], original[name])
    # Adapters elsewhere leave the head tied
    elsewhere = load_with_adapters(base, lora=Lora(rank=4, target_modules=("q_proj",)))
    export_model(elsewhere, tmp_path / "tied", merged=True)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")


def test_export_of_a_classifier_adapter(tmp_path, llama):
    model, out = load_with_adapters(llama, task="sequence_classification"), tmp_path / "merged"
    assert export(create_run(tmp_path, model), out, "--merged") == 0
    assert (reference(out, CLASSIFIER) - logits(model)).abs().max() < 2e-6
    labels = json.loads((out / "config.json").read_text())["id2label"]
    assert labels == {"0": "a", "1": "b", "2": "c"}


def test_invalid_exports_are_refused(tmp_path, capsys):
    def error_of(*arguments):
        assert export(*arguments) == 2
        return capsys.readouterr().err

    run, out = tmp_path / "run", tmp_path / "out"
    assert "no such folder: " in error_of(run, out)
    run.mkdir()
    assert "checkpoint.export=at_end" in error_of(run, out)
    (run / "hf").mkdir()
    save_file({"a": torch.zeros(1)}, run / "hf" / "model.safetensors")
    assert "has no adapter to merge" in error_of(run, out, "--merged")
    for damaged, problem in {"{": "Expecting property", "[]": "it must hold an object"}.items():
        for name, words in (("config.json", ()), ("adapter_config.json", ("--merged",))):
            (run / "hf" / name).write_text(damaged)
            message = f"{run}/hf/{name} is damaged: {problem}"
            assert message in error_of(run, out, *words)
            (run / "hf" / name).unlink()
    assert "hf/config.json cannot be read: No such file" in error_of(run, out, "dtype=bfloat16")
    dtypes = "'int8' is not one of 'bfloat16', 'float16', 'float32'"
    assert dtypes in error_of(run, out, "dtype=int8")
    unknown = "merge=true: not an argument of launcher export; did you mean --merged?"
    assert unknown in error_of(run, out, "merge=true")
    assert "merged=yes: write --merged" in error_of(run, out, "merged=yes")
    assert "not a directory" in error_of(run, run / "hf" / "model.safetensors" / "b")
    assert "step=3: " in error_of(run, out, "step=3")
    out.mkdir()
    (out / "file").write_text("")
    assert "exists and is not empty" in error_of(run, out)


def test_merge_with_a_missing_or_wrong_base_is_refused(tmp_path, capsys):
    base = save(tmp_path / "base")
    run = create_run(tmp_path, load_with_adapters(base))
    base.rename(tmp_path / "moved")
    assert export(run, tmp_path / "out", "--merged") == 2
    assert f"no such folder: {base}" in capsys.readouterr().err
    save(base, num_hidden_layers=1)
    assert export(run, tmp_path / "out", "--merged") == 2
    assert f"{base} has no model.layers.1." in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "moved", "run"]
