"""`launcher new from=FILE`: configs of other tools become recipes."""

import contextlib
import json
import re
import runpy
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.convert.convert import convert_files
from launcher.errors import RecipeError
from launcher.recipe.load import load_recipe
from launcher.recipe.yaml_text import parse_yaml

REPOSITORY = Path(__file__).parents[3]
AXOLOTL = """
base_model: Qwen/Qwen3-0.6B
datasets:
  - {path: chats.jsonl, type: chat_template, field_messages: dialog}
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
learning_rate: 2e-4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
warmup_ratio: 0.1
bf16: auto
val_set_size: 0.05
wandb_project:
output_dir: ./outputs/chats
"""
LAYERS = r"lora_target_modules: 'model.language_model.layers.[\d]+.self_attn.(q|k|v|o)_proj'"
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-0.6B
stage: sft
finetuning_type: lora
dataset: questions
dataset_dir: data
template: qwen3
cutoff_len: 1024
per_device_train_batch_size: 1
num_train_epochs: 2.0
max_samples: 100
bf16: true
"""
TORCHTUNE = """
# tune download owner/small --output-dir /tmp/small-model
output_dir: /tmp/out
model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_attn_modules: [q_proj,
        output_proj], apply_lora_to_mlp: false, lora_rank: 4, lora_alpha: 8}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 512}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer,
               checkpoint_dir: /tmp/small-model/}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, split: "train[:95%]",
          packed: true}
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4, weight_decay: 0.05}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup,
               num_warmup_steps: 7}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
batch_size_val: ${batch_size}
epochs: 1
"""
TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: owner/rows
dataset_config: small
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
warmup_steps: 0.03
"""


def converted(folder, text, *, ranks=4, **options):
    file = folder / "other.yaml"
    file.write_text(text)
    return convert_files([file], ranks=ranks, **options)


def values(folder, text, **options):
    """The values of the recipe by dotted keys, and what is lost."""
    result = converted(folder, text, **options)
    found = {}

    def walk(value, path):
        for key, inner in value.items():
            if isinstance(inner, dict) and (*path, key) != ("data", "train"):
                walk(inner, (*path, key))
            else:
                found[".".join((*path, key))] = inner

    walk(parse_yaml(result.text)[0], ())
    return found, result.lost


def test_a_recipe_says_where_each_key_comes_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text('{"dialog": [{"role": "user", "content": "Hi"}]}\n')
    result = converted(tmp_path, AXOLOTL)
    assert result.lost == {}
    assert result.tool == "axolotl"
    recipe = tmp_path / "new.yaml"
    recipe.write_text(result.text)
    loaded = load_recipe([f"recipe={recipe}"], ranks=4).recipe
    assert loaded.batch.global_batch_size == 32
    assert loaded.schedule.warmup_ratio == 0.1
    assert loaded.optimizer.state_dtype == "int8"
    assert loaded.optimizer.betas == (0.9, 0.999)
    assert loaded.data.messages_column == "dialog"
    assert loaded.run.seed == 42
    for line in (
        r"  epochs: 3 +# axolotl: num_epochs",
        r"  seed: 42 +# axolotl's default",
        r"  # 2 \(sequences of a GPU\) x 4 \(accumulation\) x 4 \(GPUs\); here .*",
        r"  warmup_ratio: 0.1 +# axolotl: warmup_ratio",
    ):
        assert re.search(f"^{line}$", result.text, re.MULTILINE), line
    own = [line for line in result.text.splitlines() if line.startswith("  ") and "# " not in line]
    assert all(line.endswith(":") for line in own), "a key without its origin"


def test_the_command_writes_the_recipe_and_says_what_is_lost(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(AXOLOTL.replace("chats.jsonl", "owner/chats"))
    assert main(["new", "from=a.yaml", "out=new.yaml", "--force", "gpus=2", "run.epochs=1"]) == 0
    assert "epochs: 1" in (tmp_path / "new.yaml").read_text()
    assert main(["show", "recipe=new.yaml", "gpus=2"]) == 0
    capsys.readouterr()
    (tmp_path / "b.yaml").write_text(
        (tmp_path / "a.yaml").read_text() + "optim_target_modules: [a]\n"
    )
    assert main(["new", "from=b.yaml"]) == 3
    printed = capsys.readouterr()
    assert "  optim_target_modules: the optimizers are those of optimizer.name" in printed.err
    assert "# - optim_target_modules: the optimizers are those of optimizer.name" in printed.out
    for words, problem in {
        "from=none.yaml": "none.yaml: cannot be read: No such file or directory",
        "from=new.yaml": "a recipe of the launcher has the section run; give it as recipe=new.yaml",
        "from=a.yaml run.epoch=1": "run.epoch=1: not a key of a recipe",
        "data=rows.jsonl": "missing; give model=MODEL, or from=FILE",
    }.items():
        assert main(["new", *words.split()]) == 2
        assert problem in capsys.readouterr().err


AXOLOTL_KEYS = [
    ("neftune_noise_alpha: 5", {"model.neftune_noise_alpha": 5}),
    (
        "adapter: lora\npeft_init_lora_weights: pissa_niter_16",
        {"lora.init": "pissa", "checkpoint.export_merged": True},
    ),
    (
        "label_smoothing_factor: 0.1",
        {"objective.loss": "label_smoothing", "objective.arguments.amount": 0.1},
    ),
    ("adapter: lora\nlora_r: 8\nlora_alpha: 16", {"lora.rank": 8, "lora.alpha": 16}),
    ("adapter: qlora\nload_in_4bit: true\nlora_target_linear: true", {"lora.quantize": "nf4"}),
    ("adapter: lora\nlora_target_modules: 'layers.\\d+.mlp.(up|down)_proj'",
     {"lora.target_modules": ["up_proj", "down_proj"]}),
    ("adapter: lora\nload_in_8bit: true\nlora_r: 8", {"lora.rank": 8}),
    ("deepspeed: configs/zero2.json",
     {"strategy.kind": "fsdp", "strategy.reshard_after_forward": False}),
    ("deepspeed: zero3_cpuoffload.json", {"strategy.cpu_offload.what": "all"}),
    ("deepspeed: zero1.json", {"strategy.kind": "ddp", "strategy.shard_optimizer": True}),
    ("fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true}",
     {"strategy.kind": "fsdp", "strategy.cpu_offload.what": "all"}),
    ("fsdp_version: 2\nfsdp_config: {activation_checkpointing: true}",
     {"strategy.kind": "fsdp", "activation_checkpointing.mode": "full"}),
    ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: false}",
     {"strategy.kind": "fsdp", "strategy.reshard_after_forward": False}),
    ("gradient_checkpointing: offload", {"activation_checkpointing.offload_to_cpu": True}),
    ("context_parallel_size: 2",
     {"strategy.context_parallel_size": 2, "batch.global_batch_size": 16}),
    ("max_steps: 10", {"run.max_steps": 10}),
    ("warmup_steps: 10", {"schedule.warmup_steps": 10}),
    ("cosine_min_lr_ratio: 0.2", {"schedule.min_ratio": 0.2}),
    ("train_on_inputs: true", {"data.loss_on": "all"}),
    ("excess_length_strategy: truncate", {"data.overlong": "cut"}),
    ("save_total_limit: 3\nsave_steps: 50",
     {"checkpoint.keep_last": 3, "checkpoint.every_steps": 50}),
    ("early_stopping_patience: 2", {"evaluation.stop_after": 2}),
    ("wandb_project: p\nwandb_name: n", {"logging.wandb.project": "p", "run.name": "n"}),
    ("tokens: ['<tool>']", {"model.new_tokens": ["<tool>"]}),
    ("fp16: true\nbf16: false", {"strategy.mixed_precision.param_dtype": "float16"}),
    ("tf32: false", {"run.float32_matmul": "highest"}),
    ("optimizer: lion_8bit", {"optimizer.name": "lion"}),
    ("qat: {weight_dtype: int4, group_size: 32}", {"model.qat": "int4"}),
    ("optimizer: schedule_free_adamw",
     {"optimizer.name": "schedule_free_adamw", "schedule.kind": "constant"}),
    ("chat_template: qwen3", {"data.kind": "chat", "data.chat_template": "qwen3"}),
    ("chat_template: chatml", {"data.chat_template": "chatml"}),
    ("chat_template: qwen_25", {"data.chat_template": "qwen2_5"}),
    ("chat_template: qwen3_5", {"data.chat_template": None}),  # the tokenizer's own
    ("chat_template: qwen3\nprocessor_type: AutoProcessor", {"data.chat_template": None}),
    ("chat_template: tokenizer_default", {"data.kind": "chat"}),
    ("plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: true", {}),
]  # fmt: skip


@pytest.mark.parametrize(("more", "expected"), AXOLOTL_KEYS)
def test_keys_of_axolotl(tmp_path, more, expected):
    names = re.findall(r"^(\w+):", more, re.MULTILINE)
    text = "\n".join(line for line in AXOLOTL.splitlines() if line.split(":")[0] not in names)
    text = text.replace("warmup_ratio: 0.1\n", "") if "warmup_steps" in names else text
    found, lost = values(tmp_path, f"{text}\n{more}\n")
    assert {key: found.get(key) for key in expected} == expected
    assert lost == {}


LOST = [
    ("optimizer: ademamix", "optimizer"),
    ("lr_scheduler: rex", "lr_scheduler"),
    ("qat: {weight_dtype: int4, activation_dtype: int8}", "qat.activation_dtype"),
    ("qat: {weight_dtype: int8, group_size: 64}", "qat.group_size"),
    ("rl: grpo", "rl"),
    ("num_epochs: 1.5", "num_epochs"),
    ("plugins: [axolotl.integrations.diffusion.DiffusionPlugin]", "plugins"),
    ("a_key_of_nobody: 1", "a_key_of_nobody"),
    ("datasets: [{path: owner/rows, type: mine.transform}]", "datasets.type"),
    ("adapter: lora\nlora_r: 8\nlora_target_modules: 'a(b+c)?.*'", "lora_target_modules"),
    ("tensor_parallel_size: 8", "tensor_parallel_size"),  # of 4 ranks
    ("seed: -1", "seed"),
    ("chat_template: command_a", "chat_template"),
    (
        "datasets: [{path: a/b, type: chat_template, field_thinking: why}]",
        "datasets.field_thinking",
    ),
    ("datasets: [{path: a/b, type: chat_template, a_new_key: 1}]", "datasets.a_new_key"),
    ("datasets: [{path: a/b, type: chat_template, roles: {user: [ghost]}}]", "datasets.roles"),
    ("chat_template: metharme", "chat_template"),
]


@pytest.mark.parametrize(("more", "name"), LOST)
def test_what_changes_the_training_is_lost_with_its_name(tmp_path, more, name):
    names = re.findall(r"^(\w+):", more, re.MULTILINE)
    text = AXOLOTL.replace("\n  - {path", " [{path").replace("dialog}", "dialog}]")
    text = "\n".join(line for line in text.splitlines() if line.split(":")[0] not in names)
    _, lost = values(tmp_path, f"{text}\n{more}\n")
    assert list(lost) == [name]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("rl: dpo\nrl_beta: 0.2", {"preference.loss": "dpo", "preference.beta": 0.2}),
        (
            "rl: simpo\nsimpo_gamma: 1\ncpo_alpha: 0",
            {"preference.loss": "simpo", "preference.margin": 1},
        ),
        ("rl: kto\nkto_desirable_weight: 2", {"kto.beta": 0.1, "kto.desirable_weight": 2}),
        ("reward_model: true", {"model.task": "reward"}),
    ],
)
def test_pairs_and_marked_answers_of_axolotl(tmp_path, more, expected):
    text = AXOLOTL.replace("type: chat_template, field_messages: dialog", "type: chat_template.x")
    found, lost = values(tmp_path, text + more)
    assert {key: found[key] for key in expected} == expected
    assert found["data.kind"] == ("unpaired" if "kto" in more else "preference")
    assert lost == {}


def test_data_sets_of_several_types_become_a_mixture(tmp_path):
    text = AXOLOTL.replace(
        "  - {path: chats.jsonl, type: chat_template, field_messages: dialog}",
        "  - {path: owner/chats, type: chat_template, split: 'train[:10%]'}\n"
        "  - {path: owner/tasks, type: alpaca, name: en}\n"
        "  - {path: json, data_files: [notes.jsonl], type: completion, field: note}",
    )
    found, lost = values(tmp_path, text)
    assert lost == {}
    assert found["data.kind"] == "chat"
    assert found["data.train"] == {
        "chats_train_10": {"files": ["owner/chats:train[:10%]"]},
        "en": {"files": ["owner/tasks/en"], "prompt_format": "text", "kind": "instruct"},
        "notes": {"files": ["notes.jsonl"], "text_column": "note", "kind": "text"},
    }


def test_llama_factory_reads_its_list_of_data_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    entry = {"file_name": "q.json", "columns": {"prompt": "frage", "response": "output"}}
    pictures = {"file_name": "p.json", "formatting": "sharegpt", "columns": {"images": "images"}}
    info = {"questions": entry, "pictures": pictures}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "data/q.json").write_text('[{"frage": "1 + 1", "output": "2"}]')
    found, lost = values(tmp_path, LLAMA_FACTORY)
    assert lost == {}
    expected = {
        "data.train": ["data/q.json"],
        "data.kind": "instruct",
        "data.overlong": "cut",
        "data.packing": False,
        "data.limit": 100,
        "lora.rank": 8,
        "lora.alpha": 16,
        "schedule.kind": "linear",
        "activation_checkpointing.mode": "full",
        "run.epochs": 2,
    }
    assert {key: found[key] for key in expected} == expected
    assert parse_yaml(converted(tmp_path, LLAMA_FACTORY).text)[0]["data"]["columns"] == {
        "instruction": "frage"
    }
    _, lost = values(tmp_path, LLAMA_FACTORY.replace("questions", "pictures, unknown"))
    assert list(lost) == ["dataset"]
    for stage, key in {"dpo": "preference.loss", "kto": "kto.beta", "rm": "model.task"}.items():
        found, lost = values(tmp_path, LLAMA_FACTORY.replace("stage: sft", f"stage: {stage}"))
        assert key in found
        assert lost == {}
    with pytest.raises(RecipeError, match="no training: neither dataset nor stage"):
        converted(tmp_path, "model_name_or_path: a/b\ntemplate: qwen3\nexport_dir: out\n")


def test_keys_of_adapters_are_not_needed_without_an_adapter(tmp_path):
    """They made a section lora, where the other tool trains all weights."""
    whole = LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: full\nlora_rank: 4")
    recipe = converted(tmp_path, whole)
    assert "lora" not in parse_yaml(recipe.text)[0]
    assert recipe.needless["lora_rank"] == "no adapter is trained"
    recipe = converted(tmp_path, TRL + "lora_r: 4\nlora_modules_to_save: [lm_head]\n")
    assert "lora" not in parse_yaml(recipe.text)[0]


@pytest.mark.parametrize(
    ("more", "train", "lost_keys"),
    [
        ("finetuning_type: full", "none", []),
        ("finetuning_type: full\nfreeze_multi_modal_projector: false", "projector", []),
        ("finetuning_type: full\nfreeze_vision_tower: false", "all", []),
        ("finetuning_type: lora", "none", []),
        ("finetuning_type: lora\nfreeze_vision_tower: false", "none", ["freeze_vision_tower"]),
        ("finetuning_type: full\nfreeze_language_model: true", "none", ["freeze_language_model"]),
    ],
)
def test_images_of_llama_factory(tmp_path, monkeypatch, more, train, lost_keys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    entry = {"file_name": "p.json", "formatting": "sharegpt", "columns": {"images": "pics"}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"questions": entry}))
    text = LLAMA_FACTORY.replace("finetuning_type: lora", more) + "media_dir: pictures\n"
    text = text.replace("Qwen/Qwen3-0.6B", "Qwen/Qwen3-VL-4B-Instruct")
    found, lost = values(tmp_path, text)
    assert list(lost) == lost_keys
    assert found["images.train"] == train
    assert found["images.max_pixels"] == 768 * 768
    assert found["images.folder"] == "pictures"
    whole = parse_yaml(converted(tmp_path, text).text)[0]
    assert whole["data"]["columns"] == {"images": "pics"}
    found, _ = values(tmp_path, text + "image_max_pixels: 262144\n")
    assert found["images.max_pixels"] == 262144


@pytest.mark.parametrize(
    ("model", "more", "train", "lost_keys"),
    [
        ("google/gemma-3-4b-it", "freeze_mm_modules: true", "none", []),
        ("google/gemma-3-4b-it", "", "all", []),
        ("google/gemma-3-4b-it", "image_size: 512", "all", ["image_size"]),
        ("google/gemma-3-4b-it", f"adapter: lora\nlora_r: 8\n{LAYERS}", "none", []),
        ("google/gemma-3-4b-it", "tensor_parallel_size: 2", "all", ["tensor_parallel_size"]),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", "", None, ["processor_type"]),
        ("mistralai/Voxtral-Mini-3B", "", None, ["processor_type"]),
    ],
)
def test_images_of_axolotl(tmp_path, model, more, train, lost_keys):
    text = AXOLOTL.replace("Qwen/Qwen3-0.6B", model) + f"processor_type: AutoProcessor\n{more}\n"
    found, lost = values(tmp_path, text)
    assert found.get("images.train") == train
    assert list(lost) == lost_keys


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        (r".*\.self_attn\.(q|v)_proj|.*\.mlp\.(gate|up)_proj", "q_proj v_proj gate_proj up_proj"),
        (
            r"model\.layers\.[\d]+\.((self_attn)\.(q|(k|v))_proj|mlp\.((gate|up)|down)_proj)",
            "q_proj k_proj v_proj gate_proj up_proj down_proj",
        ),
        (r"^(?!.*visual).*(?:q_proj|o_proj)$", "q_proj o_proj"),
        (r".*\.(left|right)_layer", ""),
        (r"model\.layers\.[0-9]\.self_attn\.q_proj", ""),  # the first ten layers only
        ("((q_proj", ""),
    ],
)
def test_layers_of_a_regular_expression(tmp_path, expression, names):
    """As peft matches them: with groups inside of groups, and alternatives of whole names."""
    more = f"adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_modules: '{expression}'\n"
    found, lost = values(tmp_path, AXOLOTL.replace("adapter: lora", "") + more)
    assert found.get("lora.target_modules") == (names.split() or None)
    assert list(lost) == ([] if names else ["lora_target_modules"])


@pytest.mark.parametrize(("gpus", "batch"), [(8, 4), (2, 2)])
def test_a_batch_of_fewer_groups_than_ranks_is_rounded_up(tmp_path, gpus, batch):
    """Ranks that share sequences there have sequences of their own here."""
    text = LLAMA_FACTORY.replace("bf16: true", "gradient_accumulation_steps: 2")
    text += "tensor_model_parallel_size: 4\npipeline_model_parallel_size: 2\nuse_mca: true\n"
    text = text.replace("Qwen/Qwen3-0.6B", "Qwen/Qwen2-VL-7B-Instruct").replace("qwen3", "qwen2_vl")
    (tmp_path / "data").mkdir()
    entry = {"file_name": "rows.json", "formatting": "sharegpt", "columns": {"images": "images"}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"questions": entry}))
    (tmp_path / "data/rows.json").write_text("[]")
    found, lost = values(tmp_path, text, ranks=gpus)
    assert found["batch.global_batch_size"] == batch
    rounded = {"per_device_train_batch_size"} if batch > 2 else set()
    assert found["strategy.pipeline_parallel_size"] == 2
    assert set(lost) == rounded | {"tensor_model_parallel_size"}
    if rounded:
        wanted = "2 sequences a step there. 4 groups of ranks with 1 each take 4 here; "
        assert (
            f"{wanted}batch.global_batch_size=2 and gpus=4 would take as many"
            in lost[rounded.pop()]
        )


def test_the_second_trainer_of_llama_factory(tmp_path):
    text = (
        "model: Qwen/Qwen3-0.6B\nmodel_class: llm\ntrain_dataset: owner/chats\ncutoff_len: 512\n"
        "peft_config: {name: lora, r: 4, lora_alpha: 8}\nmicro_batch_size: 2\nmax_steps: 5\n"
        "dist_config: {name: fsdp2}\nlearning_rate: 1e-4\noptim_config: {name: muon, momentum: 0.95}\n"
    )
    found, lost = values(tmp_path, text)
    assert lost == {}
    assert found["lora.rank"] == 4
    assert found["strategy.kind"] == "fsdp"
    assert found["optimizer.momentum"] == 0.95


def test_torchtune_names_components(tmp_path):
    found, lost = values(tmp_path, TORCHTUNE)
    assert lost == {}
    expected = {
        "model.path": "owner/small",  # by the comment, because the folder is not here
        "lora.target_modules": ["q_proj", "o_proj"],
        "data.train": ["yahma/alpaca-cleaned:train[:95%]"],
        "data.loss_on": "all",
        "data.sequence_length": 512,
        "data.packing": "auto",
        "optimizer.weight_decay": 0.05,
        "optimizer.max_grad_norm": None,
        "schedule.warmup_steps": 7,
    }
    assert {key: found[key] for key in expected} == expected
    absent = converted(tmp_path, TORCHTUNE.replace("tune download", "another line of"))
    assert "model.path: no such folder with a config.json: /tmp/small-model" in absent.absent[0]


def test_trl_and_accelerate_are_read_together(tmp_path):
    (tmp_path / "trl.yaml").write_text(TRL + "use_peft: true\n")
    accelerate = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n"
    accelerate += "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}\n"
    (tmp_path / "zero.yaml").write_text(accelerate)
    files = [tmp_path / "trl.yaml", tmp_path / "zero.yaml"]
    result = convert_files(files, ranks=2)
    assert result.lost == {}
    recipe = parse_yaml(result.text)[0]
    assert recipe["batch"] == {"global_batch_size": 32, "micro_batch_size": 2}
    assert recipe["strategy"]["cpu_offload"] == {"what": "optimizer"}
    assert recipe["schedule"]["warmup_ratio"] == 0.03
    assert recipe["data"]["train"] == ["owner/rows/small"]
    assert recipe["lora"]["dropout"] == 0.05
    with pytest.raises(RecipeError, match="names neither model nor data"):
        convert_files(files[1:], ranks=2)
    (tmp_path / "trl.yaml").write_text(TRL + "beta: 0.2\nloss_type: [hinge]\n")
    recipe = parse_yaml(convert_files(files[:1], ranks=2).text)[0]
    assert recipe["preference"] == {"loss": "hinge", "beta": 0.2}
    assert recipe["optimizer"]["learning_rate"] == 1e-6


def test_the_loss_of_chats_is_that_of_trl(tmp_path, monkeypatch):
    """TRL trains on all tokens of messages unless assistant_only_loss is set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    text = TRL.replace("owner/rows", "c.jsonl").replace("dataset_config: small\n", "")
    found, _ = values(tmp_path, text)
    assert (found["data.kind"], found["data.loss_on"]) == ("chat", "all")
    found, _ = values(tmp_path, text + "assistant_only_loss: true\n")
    assert found["data.loss_on"] == "assistant"


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", ["[1, {a: 2}]", "{a: {b: 1}}", "'text'", "-3.5", "true", "[]", "''"]
)
def test_values_of_another_type_are_answers(tmp_path, value):
    """No value of any key ends in a traceback."""
    for text in (AXOLOTL, LLAMA_FACTORY, TORCHTUNE, TRL):
        names = re.findall(r"^(\w+):", text, re.MULTILINE)
        more = ("adapter", "rl", "peft_config", "deepspeed", "fsdp_config", "use_peft", "fsdp")
        for name in (*names, *more):
            kept = parse_yaml(text)[0] | {name: parse_yaml(value)[0]}
            with contextlib.suppress(RecipeError):
                converted(tmp_path, json.dumps(kept))


def test_a_whole_checkout_is_converted_and_counted(tmp_path, monkeypatch, capsys):
    texts = {
        "kept": AXOLOTL.replace("chats.jsonl", "owner/chats"),
        "lost": AXOLOTL.replace("chats.jsonl", "owner/chats") + "optim_target_modules: [a]\n",
        "absent": AXOLOTL,
        "export": "model_name_or_path: a/b\ntemplate: qwen3\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["converting.py", str(tmp_path)])
    runpy.run_path(str(REPOSITORY / "benchmarks/converting.py"), run_name="__main__")
    first, keys, *lost = capsys.readouterr().out.splitlines()
    assert sorted(first.split(", ")) == [
        "1 names files that are not here",
        "1 no training",
        "1 with loss",
        "1 without loss",
    ]
    assert "1 lost" in keys
    assert lost == ["   1 optim_target_modules: the optimizers are those of optimizer.name"]


PLAIN = """
base_model: owner/model
datasets: [{path: rows.json, type: alpaca}]
micro_batch_size: 4
output_dir: out
"""
PAIRS = PLAIN.replace("alpaca", "chat_template.default")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PLAIN + "batch_size: 64", {"batch.global_batch_size": 128, "batch.micro_batch_size": 4}),
        (PLAIN + "batch_size: 64\ngradient_accumulation_steps: 2", {"batch.global_batch_size": 16}),
        (PLAIN, {"checkpoint.every_epochs": 1.0}),
        (
            PLAIN + "val_set_size: 0.1\nevals_per_epoch: 4\nsaves_per_epoch: 2",
            {
                "evaluation.every_epochs": 0.25,
                "evaluation.at_start": True,
                "checkpoint.every_epochs": 0.5,
                "checkpoint.export": "best",
            },
        ),
        (
            PLAIN + "num_epochs: 3\nval_set_size: 0.1\neval_steps: 0.1",
            {"evaluation.every_epochs": pytest.approx(0.3)},
        ),
        (
            PLAIN + "max_steps: 50\nval_set_size: 0.1\neval_steps: 0.05",
            {"evaluation.every_steps": 3},
        ),
        (
            PLAIN + "val_set_size: 0.1\nsave_steps: 30\neval_steps: 20",
            {"checkpoint.export": "at_end", "checkpoint.every_steps": 30},
        ),
        (PLAIN + "val_set_size: 0.1", {"evaluation.every_steps": None}),
        (PLAIN + "curriculum_sampling: true", {"data.shuffle": False}),
    ],
)
def test_batches_and_times_of_axolotl(tmp_path, text, expected):
    found, lost = values(tmp_path, text, ranks=2)
    assert {key: found.get(key, "not given") for key in expected} == expected
    assert not {*lost} & {"curriculum_sampling"}


@pytest.mark.parametrize(
    "more",
    ["shuffle_merged_datasets: false", "sample_packing: true\nsample_packing_sequentially: 1"],
)
def test_rows_of_axolotl_are_drawn_at_random(tmp_path, more):
    assert "data.shuffle" not in values(tmp_path, PLAIN + more)[0]


def test_simpo_of_axolotl_has_the_loss_of_the_chosen_answer(tmp_path):
    _, lost = values(tmp_path, PAIRS + "rl: simpo")
    assert lost == {"rl": "the loss of the chosen answer, times 1.0, is not added to that of SimPO"}
    assert "cpo_alpha" in values(tmp_path, PAIRS + "rl: simpo\ncpo_alpha: 0.5")[1]


@pytest.mark.parametrize(
    ("steps", "best"), [("eval_strategy: epoch\nsave_strategy: epoch", 1.0), ("eval_steps: 20", 20)]
)
def test_the_best_checkpoint_is_exported_if_the_tool_loads_it(tmp_path, steps, best):
    text = LLAMA_FACTORY + f"val_size: 0.1\nload_best_model_at_end: true\n{steps}\n"
    found, _ = values(tmp_path, text)
    assert found["checkpoint.export"] == "best"
    assert found["checkpoint.keep_best"] == "eval_loss"
    every = "every_epochs" if best == 1.0 else "every_steps"
    assert found[f"evaluation.{every}"] == best
    without, _ = values(tmp_path, LLAMA_FACTORY + "load_best_model_at_end: true\n")
    assert without["checkpoint.export"] == "at_end"
    assert "checkpoint.keep_best" not in without


def test_the_first_rows_of_each_data_set_of_llama_factory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    described = {name: {"file_name": f"{name}.json"} for name in ("questions", "more")}
    described["more"]["num_samples"] = 7
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(described))
    both = LLAMA_FACTORY.replace("dataset: questions", "dataset: questions,more")
    found, _ = values(tmp_path, both)
    limits = {name: source["limit"] for name, source in found["data.train"].items()}
    assert limits == {"questions": 100, "more": 7}
    del described["more"]["num_samples"]
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(described))
    found, _ = values(tmp_path, both)
    limits = {name: source["limit"] for name, source in found["data.train"].items()}
    assert limits == {"questions": 100, "more": 100}
    found, _ = values(tmp_path, LLAMA_FACTORY)
    assert found["data.limit"] == 100


SECOND = """
model: owner/model
train_dataset: rows.json
micro_batch_size: 2
global_batch_size: 8
cutoff_len: 512
batching_strategy: padding_free
output_dir: out
"""


def test_the_second_trainer_counts_rows_and_needs_its_description(tmp_path):
    found, lost = values(tmp_path, SECOND)
    assert (found["data.packing"], found["batch.global_batch_size"], lost) == (False, 8, {})
    _, lost = values(tmp_path, SECOND.replace("rows.json", "data/rows.yaml"))
    assert "data/rows.yaml: the description of the data is not here" in lost["train_dataset"]


def test_layers_rows_and_folders_of_torchtune(tmp_path):
    found, _ = values(tmp_path, TORCHTUNE + "tensor_parallel_dim: 2\n")
    assert found["batch.global_batch_size"] == 4  # 2 sequences of each of two groups
    found, _ = values(tmp_path, TORCHTUNE)
    assert found["data.overlong"] == "cut"
    phi = TORCHTUNE.replace("models.llama3_2.lora_llama3_2_1b", "models.phi4.qlora_phi4_14b")
    phi = phi.replace("apply_lora_to_mlp: false", "apply_lora_to_mlp: true")
    found, _ = values(tmp_path, phi)
    layers = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    assert found["lora.target_modules"] == layers
    pairs = TORCHTUNE.replace(
        "alpaca_cleaned_dataset,", "stack_exchange_paired_dataset, data_dir: data/rl,"
    )
    pairs = pairs.replace("modules.loss.LinearCrossEntropyLoss", "rlhf.loss.DPOLoss")
    result = converted(tmp_path, pairs)
    assert result.lost["dataset.data_dir"].startswith("data/rl: a folder of lvwerra/stack-")
    assert "too long answers are cut" in result.differs["tokenizer.max_seq_len"]
    assert "loss" not in result.needless  # it is preference.loss
    result = converted(tmp_path, TORCHTUNE + "max_steps_per_epoch: 50\n")
    assert result.differs["max_steps_per_epoch, epochs"].startswith("there, epochs of fewer steps")
    assert result.needless["loss"] == "the loss of a token is cross-entropy"


def test_the_length_of_prompts_of_trl(tmp_path):
    """It was lost with a reason that is one of mixtures."""
    prompts = "max_prompt_length: 512\n"
    result = converted(tmp_path, TRL + "loss_type: sigmoid\nbeta: 0.1\n" + prompts)
    assert "max_prompt_length" not in result.lost
    assert result.differs["max_prompt_length"].startswith("there, longer prompts are cut")
    assert "max_prompt_length: there, longer prompts are cut" in result.text
    result = converted(tmp_path, TRL + prompts)  # no pairs
    assert result.lost["max_prompt_length"].startswith("prompts are read whole")


def test_a_file_of_trl_has_no_test_split(tmp_path, monkeypatch):
    """The file for training was taken for validation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    text = TRL.replace("owner/rows", "rows.jsonl").replace("dataset_config: small\n", "")
    found, lost = values(tmp_path, text + "eval_strategy: steps\neval_steps: 5\n")
    assert "data.validation" not in found
    assert lost["eval_strategy"].startswith("rows.jsonl has no split test: name files in data.val")
    found, lost = values(tmp_path, TRL + "eval_strategy: epoch\n")
    assert found["data.validation"] == ["owner/rows/small:test"]
    assert found["evaluation.every_epochs"] == 1.0


def test_what_trains_a_bit_differently_is_a_group_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cases = {
        "headings": (PLAIN, "Alpaca's headings without the sentence that axolotl writes before"),
        "kto": (PAIRS + "rl: kto\n", "the reference point is 0 here; there it is estimated from"),
        "pairs": (
            LLAMA_FACTORY.replace("stage: sft", "stage: dpo"),
            "there, too long answers are cut; here pairs with such an answer are dropped",
        ),
        "ends": (LLAMA_FACTORY, "what follows the end of an answer in the template"),
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text('{"questions": {"file_name": "q.json"}}')
    for name, (text, expected) in cases.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        status = main(["new", f"from={name}.yaml", "out=new.yaml", "--force"])
        written, told = (tmp_path / "new.yaml").read_text(), capsys.readouterr().err
        group = told.partition("kept, but trains a bit differently:\n")[2]
        assert expected in group, name
        assert expected[:40] in written.replace("\n  # ", " "), name
        assert status == 0, told


@pytest.mark.parametrize(
    ("template", "name", "difference"),
    [
        ("qwen", "qwen2_5", None),
        ("gemma3", "gemma", None),
        ("llama3", "llama3", None),
        ("mistral_small", "mistral_v7_tekken", None),
        ("zephyr", "zephyr", "here with a line break after each turn"),
    ],
)
def test_names_of_templates_of_llama_factory(tmp_path, template, name, difference):
    """Of base models, too, whose tokenizers have none."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text('{"questions": {"file_name": "q.json"}}')
    result = converted(tmp_path, LLAMA_FACTORY.replace("qwen3", template))
    assert parse_yaml(result.text)[0]["data"]["chat_template"] == name
    assert result.lost == {}
    assert (difference or "") in result.differs.get("template", "")
    assert ("template" in result.differs) == (difference is not None)


def test_a_template_whose_data_is_not_here_becomes_a_line_to_add(tmp_path):
    """A recipe whose kind of data is not known cannot have a template."""
    result = converted(tmp_path, LLAMA_FACTORY)
    assert list(result.lost) == ["dataset"]
    added = "template: qwen3; add chat_template: qwen3 to this section, with the data"
    assert f"LLaMA-Factory: {added}" in result.text.replace("\n  # ", " ")


def test_chatml_of_torchtune_is_kept(tmp_path):
    chat = TORCHTUNE.replace("alpaca_cleaned_dataset", "chat_dataset, source: a/b")
    named = chat.replace("max_seq_len: 512", "max_seq_len: 512, prompt_template: {}")
    found, lost = values(tmp_path, named.replace("{}", "torchtune.data.ChatMLTemplate", 1))
    assert found["data.chat_template"] == "chatml"
    assert "tokenizer.prompt_template" not in lost
    _, lost = values(tmp_path, named.replace("{}", "mine.Template", 1))
    what = lost["tokenizer.prompt_template"]
    assert what.startswith("mine.Template; here the tokenizer's own")


def test_a_recipe_that_cannot_start_ends_with_status_3(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "base"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "phi3"}')
    (model / "tokenizer_config.json").write_text("{}")
    layers = ["model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.down_proj.weight"]
    index = {"weight_map": dict.fromkeys(layers, "model-1.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    text = AXOLOTL.replace("Qwen/Qwen3-0.6B", "base").replace("chats.jsonl", "owner/chats")
    adapter = "adapter: lora\nlora_target_modules: [q_proj, down_proj]\n"
    (tmp_path / "a.yaml").write_text(text + adapter)
    assert main(["new", "from=a.yaml", "out=new.yaml", "--force"]) == 3
    told = capsys.readouterr().err
    assert "base_model: base: its tokenizer has no chat template, so training cannot start" in told
    assert "lora_target_modules: q_proj: base has no such layers; lora.target_modules names" in told
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (tmp_path / "a.yaml").write_text(text + adapter.replace("q_proj", "qkv_proj"))
    assert main(["new", "from=a.yaml", "out=new.yaml", "--force"]) == 0


def test_values_of_a_checkout_are_compared(tmp_path, monkeypatch, capsys):
    """With the defaults of the tools, which the script has by itself."""
    texts = {
        "axolotl": {
            "a": AXOLOTL.replace("chats.jsonl", "owner/chats"),
            "b": PLAIN + "batch_size: 64",
        },
        "llamafactory": {"a": LLAMA_FACTORY + "gradient_accumulation_steps: 2\n", "b": SECOND},
        "torchtune": {"a": TORCHTUNE},
    }
    script = str(REPOSITORY / "benchmarks/moved_values.py")
    for tool, configs in texts.items():
        folder = tmp_path / tool
        folder.mkdir()
        for name, text in configs.items():
            (folder / f"{name}.yaml").write_text(text)
        monkeypatch.setattr("sys.argv", ["moved_values.py", tool, str(folder)])
        monkeypatch.chdir(folder)
        runpy.run_path(script, run_name="__main__")
        *differing, last = capsys.readouterr().out.splitlines()
        assert differing == []
        assert last.startswith(f"{len(configs)} configs, ")
    wrong = runpy.run_path(script)
    assert not wrong["same"](32, 8)
    assert wrong["axolotl"](parse_yaml(PLAIN)[0])["batch.global_batch_size"] == 32
