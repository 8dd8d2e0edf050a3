"""What a recipe of vectors does not give: documents of a row, packing, pooling, prompts."""

import json

import pytest
import torch
from transformers import AutoModel

from launcher.errors import RecipeError
from launcher.models.build import build_model
from launcher.objectives.embedding import EmbeddingObjective
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Model
from launcher.sources.sentence_transformers import vector_settings
from tests.run_files import write_lines
from tests.unit.small_recipe import SMALL

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
ROW = {"query": "a", "positive": "b"}


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(SMALL)

    def load(rows, *words):
        write_lines(tmp_path / "rows.jsonl", rows)
        words = ("recipe=x.yaml", "data.train=rows.jsonl", "model.task=embedding", *words)
        return load_recipe(list(words), ranks=None).recipe

    return load


def test_documents_are_the_most_of_the_first_rows(load):
    several = {**ROW, "negatives": ["c", "d"], "negative_2": "e"}
    assert load([ROW]).data.documents == 1
    assert load([ROW, several]).data.documents == 4
    assert load([ROW] * 100 + [several]).data.documents == 1
    assert load([{**ROW, "negatives": ["c"] * 30}]).data.documents == 8
    assert load([ROW, several], "data.documents=2").data.documents == 2
    assert load([ROW], "data.validation=[rows.jsonl]").data.documents == 1
    recipe = load([ROW, several], "data.sequence_length=16")
    assert (recipe.data.kind, recipe.data.row_length, recipe.data.joins_rows) == (
        "retrieval",
        80,
        True,
    )
    assert (
        load([ROW, several], "data.sequence_length=16", "data.packing=false").data.row_length == 16
    )


@pytest.mark.parametrize(
    ("words", "packed"),
    [
        ([], True),
        (["model.bidirectional=true"], False),
        (["model.config={model_type: bert}"], False),
        (["model.config={model_type: modernbert}"], False),
        (["model.config={model_type: gemma3_text, use_bidirectional_attention: true}"], False),
        (["model.config={model_type: gemma3_text}"], True),
    ],
)
def test_texts_share_rows_where_tokens_see_those_before_them(load, words, packed):
    recipe = load([ROW], *words)
    assert recipe.data.packing is packed
    objective = EmbeddingObjective.from_recipe(recipe, trained=False)
    assert objective.settings.pooling == ("last" if packed else "mean")


def test_a_model_folder_says_how_vectors_are_made(load, tmp_path):
    folder = tmp_path / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    pooling = folder / "1_Pooling/config.json"
    pooling.write_text(
        json.dumps({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True})
    )
    prompts = {"prompts": {"query": "find: ", "passage": "text: "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    words = ["model={path: model, config: null}", "data.tokenizer=bytes"]
    recipe = load([ROW], *words)
    assert EmbeddingObjective.from_recipe(recipe, trained=False).settings.pooling == "mean"
    assert vector_settings(folder).query_prompt == "find: "
    assert vector_settings(folder).document_prompt == "text: "
    # As for the texts: a prompt of the recipe replaces its own one alone, also by an empty text
    words[1] = "data.tokenizer=null"
    for key, expected in (
        ("data.limit=9", {"query": "find: ", "document": "text: "}),
        ("data.query_prompt='q: '", {"query": "q: ", "document": "text: "}),
        ("data.query_prompt=''", {"query": "", "document": "text: "}),
    ):
        objective = EmbeddingObjective.from_recipe(load([ROW], *words, key), trained=False)
        assert objective.prompts == expected
    given = load([ROW], *words, "embedding.pooling=last")
    assert EmbeddingObjective.from_recipe(given, trained=False).settings.pooling == "last"
    pooling.write_text(json.dumps({"pooling_mode": "lasttoken"}))
    assert vector_settings(folder).pooling == "last"
    pooling.write_text(json.dumps({"pooling_mode": "weightedmean"}))
    with pytest.raises(RecipeError, match="vectors by weightedmean, which is not available"):
        EmbeddingObjective.from_recipe(recipe, trained=False)
    pooling.write_text("{")
    with pytest.raises(RecipeError, match=r"1_Pooling/config\.json cannot be read"):
        EmbeddingObjective.from_recipe(recipe, trained=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text", "phi3", "olmo2"])
def test_tokens_of_decoders_see_those_after_them(kind):
    changes = {"model_type": kind, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0}
    section = Model(config={**LLAMA, **changes}, task="embedding", bidirectional=True)
    config = build_model(section, sequence_length=16).config
    model = AutoModel.from_config(config).eval()
    row = torch.randint(1, 300, (1, 8), generator=torch.Generator().manual_seed(0))
    other = row.clone()
    other[0, -1] = row[0, -1] % 299 + 1
    with torch.no_grad():
        first, changed = (model(ids).last_hidden_state[0, 0] for ids in (row, other))
    assert not torch.equal(first, changed)
