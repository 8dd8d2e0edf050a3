"""Ranks whose model is on the hub and not in the cache."""

from transformers import AutoConfig, AutoModelForCausalLM

from tests import REPOSITORY
from tests.distributed.launching import torchrun
from tests.hub_server import hub

SIZES = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def test_one_rank_of_a_node_asks_the_hub(tmp_path):
    """A thousand ranks that ask at once are refused (HTTP 429)."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a few words. " * 100)
    words = ["recipe=fsdp", "model.path=me/tiny", "model.config=null", "data.tokenizer=bytes"]
    words += [f"data.train=[{tmp_path}/text.txt]", f"data.cache={tmp_path}/cache"]
    words += ["data.validation=null", "data.sequence_length=32", "data.workers=0"]
    words += ["run.epochs=null", "run.max_steps=1", "checkpoint.every_steps=null"]
    words += ["batch.global_batch_size=2", "batch.micro_batch_size=1", "run.device=cpu"]
    words += [f"run.dir={tmp_path}/run", "evaluation.every_steps=null"]
    with hub(tmp_path / "model", "me/tiny") as (address, asked):
        # Other tests set it for their process
        variables = {"HF_HUB_OFFLINE": "", "HF_ENDPOINT": address}
        variables |= {"HF_HOME": str(tmp_path / "home")}
        torchrun(REPOSITORY / "launcher/train.py", *words, ranks=2, **variables).check()
    fetched = [path for path in asked if path.startswith("GET") and path.endswith(".safetensors")]
    assert len(fetched) == 1
    assert {path: count for path, count in asked.items() if count > 1} == {}
