"""The table of layouts: kinds and columns of popular data sets, and columns that are not used."""

import json
from typing import Any

import pytest

from launcher.errors import RecipeError
from launcher.recipe.layouts import (
    KEYS,
    LAYOUTS,
    NAMES,
    TOKEN_KINDS,
    describe_column,
    guess,
    lost_meaning,
    match,
    named_columns,
    no_layout,
    role_of,
    unused_columns,
    unused_line,
)
from launcher.recipe.load import load_recipe
from tests import REPOSITORY

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
# fmt: off
SETS = {
    # name: columns, the kind, and the columns by their roles, `role=column` or one word for both
    "tatsu-lab/alpaca": ("instruction input output text", "instruct", "instruction input response=output"),
    "yahma/alpaca-cleaned": ("instruction input output", "instruct", "instruction input response=output"),
    "vicgalle/alpaca-gpt4": ("instruction input output text", "instruct", "instruction input response=output"),
    "iamtarun/python_code_instructions_18k_alpaca": ("instruction input output prompt", "instruct", "instruction input response=output"),
    "databricks/databricks-dolly-15k": ("instruction context response category", "instruct", "instruction input=context response"),
    "garage-bAInd/Open-Platypus": ("input output instruction data_source", "instruct", "instruction input response=output"),
    "sahil2801/CodeAlpaca-20k": ("output input instruction", "instruct", "instruction input response=output"),
    "TIGER-Lab/MathInstruct": ("source output instruction", "instruct", "instruction response=output"),
    "meta-math/MetaMathQA": ("type query original_question response", "instruct", "instruction=query response"),
    "Open-Orca/OpenOrca": ("id system_prompt question response", "instruct", "instruction=question response system=system_prompt"),
    "openai/gsm8k": ("question answer", "instruct", "instruction=question response=answer"),
    "b-mc2/sql-create-context": ("question context answer", "instruct", "instruction=question input=context response=answer"),
    "AI-MO/NuminaMath-CoT without messages": ("source problem solution", "instruct", "instruction=problem response=solution"),
    "open-r1/OpenR1-Math-220k without messages": (
        "problem solution answer generations",
        "instruct", "instruction=problem response=solution"),
    "nvidia/OpenMathInstruct-2": (
        "problem generated_solution expected_answer problem_source",
        "instruct", "instruction=problem response=generated_solution"),
    "microsoft/orca-math-word-problems-200k": ("question answer", "instruct", "instruction=question response=answer"),
    "TIGER-Lab/WebInstructSub": (
        "orig_question orig_answer source index question answer",
        "instruct", "instruction=question response=answer"),
    "CohereForAI/aya_dataset": (
        "inputs targets language language_code annotation_type user_id",
        "instruct", "instruction=inputs response=targets"),
    "camel-ai/math": ("role_1 topic sub_topic message_1 message_2", "instruct", "instruction=message_1 response=message_2"),
    "YeungNLP/firefly-train-1.1M": ("kind input target", "instruct", "instruction=input response=target"),
    "medical-o1-reasoning-SFT": ("Question Complex_CoT Response", "instruct", "instruction=Question response=Response"),
    "WizardLM_evol_instruct_70k": ("instruction output", "instruct", "instruction response=output"),
    "glaiveai/glaive-code-assistant": ("question answer", "instruct", "instruction=question response=answer"),
    "glaiveai/reasoning-v1-20m": ("prompt response", "instruct", "prompt response"),
    "OpenO1-SFT": ("prompt response", "instruct", "prompt response"),
    "nampdn-ai/tiny-codes": ("prompt main_topic response", "instruct", "prompt response"),
    "axolotl context_qa": ("article question answer", "instruct", "instruction=question input=article response=answer"),
    "axolotl metharme": ("prompt generation", "instruct", "prompt response=generation"),
    "ms-swift query and response": ("system query response history", "instruct", "system instruction=query response history"),
    "Salesforce/xlam-function-calling-60k": ("id query answers tools", "instruct", "instruction=query calls=answers tools"),
    "ShareGPT": ("id conversations", "chat", "messages=conversations"),
    "teknium/OpenHermes-2.5": ("conversations source category system_prompt", "chat", "messages=conversations system=system_prompt"),
    "Open-Orca/SlimOrca": ("conversations", "chat", "messages=conversations"),
    "HuggingFaceH4/ultrachat_200k": ("prompt prompt_id messages", "chat", "messages"),
    "HuggingFaceH4/no_robots": ("prompt prompt_id messages category", "chat", "messages"),
    "HuggingFaceTB/smoltalk": ("messages source", "chat", "messages"),
    "allenai/tulu-3-sft-mixture": ("id messages source", "chat", "messages"),
    "AI-MO/NuminaMath-CoT": ("source problem solution messages", "chat", "messages"),
    "GAIR/lima": ("conversations source", "chat", "messages=conversations"),
    "lmsys/lmsys-chat-1m": ("conversation_id model conversation turn language redacted", "chat", "messages=conversation"),
    "allenai/WildChat-1M": ("conversation_hash model conversation turn toxic", "chat", "messages=conversation"),
    "NousResearch/hermes-function-calling-v1": ("id conversations tools category task", "chat", "messages=conversations tools"),
    "Team-ACE/ToolACE": ("system conversations", "chat", "messages=conversations system"),
    "glaive_toolcall (LLaMA-Factory)": ("conversations tools", "chat", "messages=conversations tools"),
    "open-thoughts/OpenThoughts-114k": ("system conversations", "chat", "messages=conversations system"),
    "BAAI/Infinity-Instruct": ("id conversations label langdetect source", "chat", "messages=conversations"),
    "Magpie-Pro-300K-Filtered": ("uuid instruction response conversations intent", "chat", "messages=conversations"),
    "OpenAI fine-tuning": ("messages tools parallel_tool_calls", "chat", "messages tools"),
    "Vertex AI": ("systemInstruction contents", "chat", "messages=contents system=systemInstruction"),
    "HuggingFaceH4/ultrafeedback_binarized": (
        "prompt prompt_id chosen rejected messages score_chosen score_rejected",
        "preference", "prompt chosen rejected"),
    "Anthropic/hh-rlhf": ("chosen rejected", "preference", "chosen rejected"),
    "Intel/orca_dpo_pairs": ("system question chosen rejected", "preference", "system instruction=question chosen rejected"),
    "argilla/distilabel-intel-orca-dpo-pairs": (
        "system input chosen rejected rating status",
        "preference", "system instruction=input chosen rejected"),
    "argilla/dpo-mix-7k": ("dataset chosen rejected chosen_rating rejected_rating", "preference", "chosen rejected"),
    "mlabonne/orpo-dpo-mix-40k": ("source chosen rejected prompt question", "preference", "prompt chosen rejected"),
    "jondurbin/truthy-dpo-v0.1": ("id source system prompt chosen rejected", "preference", "system prompt chosen rejected"),
    "Skywork-Reward-Preference-80K": ("chosen rejected source", "preference", "chosen rejected"),
    "DPO of LLaMA-Factory": ("conversations chosen rejected", "preference", "messages=conversations chosen rejected"),
    "DPO of ms-swift": ("messages rejected_response", "preference", "messages rejected=rejected_response"),
    "query and rejected_response of ms-swift": (
        "query response rejected_response",
        "preference", "instruction=query response rejected=rejected_response"),
    "OpenAI preference": (
        "input preferred_output non_preferred_output",
        "preference", "instruction=input chosen=preferred_output rejected=non_preferred_output"),
    "lvwerra/stack-exchange-paired": (
        "qid question date response_j response_k",
        "preference", "instruction=question chosen=response_j rejected=response_k"),
    "argilla of axolotl": (
        "instruction chosen_response rejected_response",
        "preference", "instruction chosen=chosen_response rejected=rejected_response"),
    "allenai/c4": ("text timestamp url", "text", "text"),
    "HuggingFaceFW/fineweb-edu": ("text id dump url score int_score", "text", "text"),
    "wikimedia/wikipedia": ("id url title text", "text", "text"),
    "tiiuae/falcon-refinedweb": ("content url timestamp", "text", "text=content"),
    "togethercomputer/RedPajama-Data-V2": ("raw_content doc_id meta", "text", "text=raw_content"),
    "HuggingFaceTB/cosmopedia": ("prompt text token_length audience", "text", "text"),
    "timdettmers/openassistant-guanaco": ("text", "text", "text"),
    "stanfordnlp/imdb": ("text label", "classification", "text label"),
    "stanfordnlp/sst2": ("idx sentence label", "classification", "text=sentence label"),
}
# fmt: on


def row_of(columns):
    values = {"label": {}, "score": 0.5, "messages": CHAT, "conversations": CHAT}
    return {column: values.get(column, "x") for column in columns.split()}


@pytest.mark.parametrize("name", SETS)
def test_layouts_of_popular_data_sets(name):
    columns, kind, expected = SETS[name]
    row = row_of(columns)
    found = guess(row, {}, kinds=TOKEN_KINDS if kind in TOKEN_KINDS else [kind])
    assert found.layout.kind == kind
    roles = (pair.partition("=") for pair in expected.split())
    assert dict(found.columns) == {role: column or role for role, _, column in roles}
    assert lost_meaning(row, found) is None
    assert match(row, {}, [kind]) == found  # the same where the kind is given


def test_what_a_pair_is_without_training_on_pairs():
    asked = [{"from": "human", "value": "a"}]
    for row, kind in (
        ({"conversations": asked, "chosen": {}, "rejected": {}}, "preference"),
        ({"messages": CHAT, "chosen": CHAT, "rejected": CHAT}, "chat"),
        ({"messages": CHAT, "rejected_response": "x"}, "chat"),
        ({"query": "a", "response": "b", "rejected_response": "x"}, "instruct"),
        ({"prompt": "a", "chosen": "b", "rejected": "x"}, "preference"),
    ):
        assert guess(row, {}).layout.kind == kind


def test_named_columns_go_before_usual_names():
    named = named_columns({"columns": {"prompt": "question", "completion": "answer"}})
    assert named == {"prompt": "question", "response": "answer"}
    row = {"question": "a", "answer": "b", "prompt": "c", "response": "d", "instruction": "e"}
    assert dict(match(row, named, ["instruct"]).columns) == named
    assert named_columns({"prompt_column": "question", "text_column": "text"}) == {
        "prompt": "question"
    }
    assert match({"answer": "b", "prompt": "c"}, named, ["instruct"]) is None
    # Names of another kind do not matter, as in a mixture
    assert match({"text": "a"}, named, ["text"]) is not None
    found = match({"instruction": "a", "output": "b", "input": "c"}, {}, ["instruct"], ["input"])
    assert dict(found.columns) == {"instruction": "instruction", "response": "output"}


def test_names_stand_for_one_role():
    every = [name for names in NAMES.values() for name in names]
    # `input` and `article` are an instruction, or the input of one
    assert len(set(every)) == len(every) - 2
    assert {role_of(name) for name in every} <= NAMES.keys()
    assert role_of("weights") is role_of("nothing") is None
    assert KEYS.keys() <= NAMES.keys()


LOST: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "completion": "b", "label": True}, "marks good and bad answers"),
    ({"prompt": "a", "completion": "b", "label": "0"}, "marks good and bad answers"),
    ({"messages": CHAT, "kto_tag": False}, "marks good and bad answers"),
    ({"messages": CHAT, "images": ["cat.jpg"]}, "holds images"),
    (
        {"text": "a", "image": {"bytes": b"x"}},
        "holds images beside a text, which images.train=none data.",
    ),
    (
        {"text": "a", "file_name": "train/a.PNG"},
        "names files of images, which images.train=none data.columns.images=file_name "
        "data.columns.response=text trains on",
    ),
    (
        {"messages": CHAT, "file_names": ["a.jpg", "b.jpg"]},
        "names files of images, which images.train=none data.columns.images=file_names trains on",
    ),
    ({"messages": CHAT, "weight": 0.5}, "holds a weight, which data.weights_column=weight uses"),
    ({"prompt": "a", "completion": "b", "weight": 2}, "holds a weight, and kind instruct has none"),
    ({"prompt": "a", "completion": "b", "score": 0}, "says how good an answer is"),
    ({"text": "a", "parent_id": "1", "role": "prompter"}, "says who speaks"),
    ({"input_ids": [1], "loss_mask": [0]}, "says which tokens carry loss"),
    ({"input_ids": [1], "weights": [0.5]}, "holds a weight, which data.weights_column=weights"),
]
KEPT: list[dict[str, Any]] = [
    {"prompt": "a", "completion": "b", "label": "poem", "images": [], "weight": None},
    {"messages": CHAT, "score": [1, 2], "image": ""},
    {"prompt": "a", "chosen": "b", "rejected": "c", "score": 3},
    {"text": "a", "score": 4.5, "label": 0},
    {"text": "a", "file_name": "a.html"},
    {"input_ids": [1], "labels": [1], "loss_mask": [0]},
]


def test_columns_that_change_the_meaning_are_refused():
    for row, expected in LOST:
        found, last = guess(row, {}), list(row)[-1]
        problem = lost_meaning(row, found)
        assert problem.startswith(f"column {last!r} {expected}"), problem
        assert problem.endswith(f"; data.ignore_columns='[{last}]' trains without it")
        assert lost_meaning(row, guess(row, {}, ignored=[last]), [last]) is None
    for row in KEPT:
        assert (
            lost_meaning(row, guess(row, {}, kinds=["preference" if "chosen" in row else "chat"]))
            is None
        )


def test_columns_that_are_not_used_are_named():
    row = {
        "question": "a",
        "answer": "b",
        "category": "c",
        "empty": "",
        "rationale": "d",
        "persona": "e",
        "dialogue": CHAT,
        "as_text": json.dumps(CHAT),
        "final_answer": "f",
        "id": 1,
    }
    found = guess(row, {})
    unused = {
        name: describe_column(name, value, found)
        for name, value in unused_columns(row, found, ["id"])
    }
    assert unused_line(unused) == (
        "columns that are not used: category, rationale (reasoning? "
        "data.columns.reasoning=rationale), persona (a system prompt? data.columns.system=persona), dialogue (a "
        "conversation?), as_text (a conversation?), final_answer (an answer?) "
        "(data.ignore_columns: on purpose)"
    )


def test_a_pair_that_is_not_used_is_named():
    row = {
        "prompt": "p",
        "messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}],
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
        "score_rejected": 2.0,
    }
    found = guess(row, {})
    unused = {
        name: describe_column(name, value, found) for name, value in unused_columns(row, found)
    }
    assert unused_line(unused) == (
        "columns that are not used: chosen and rejected (pairs of answers? preference.loss=dpo "
        "trains on them), prompt (a prompt?), score_rejected (a score?) (data.ignore_columns: on "
        "purpose)"
    )


def test_nothing_fits():
    text = no_layout({"question": 1, "choices": 2, "answerKey": 3}, {})
    assert text == (
        "no column for response (response, completion, output, solution, ...) of the nearest layout "
        "(instruct: instruction, response); columns: question, choices, answerKey; "
        "data.columns.response=NAME names it"
    )
    squad = {"context": "c", "question": "q", "answers": {"text": ["a"], "answer_start": [0]}}
    assert "data.columns.response=NAME names it" in no_layout(squad, {})
    assert no_layout(["a"], {"messages": "talk"}, "chat") == (
        "the recipe names columns that are not there: 'talk' for messages; columns: a"
    )
    alpaca = ["instruction", "input", "output"]
    assert no_layout(alpaca, {"prompt": "gone"}) == (
        "the recipe names columns that are not there: 'gone' for prompt; columns: instruction, "
        "input, output"
    )
    assert no_layout(alpaca, {"prompt": "instruction", "instruction": "input"}) == (
        "no layout has columns for all of prompt, instruction, which the recipe names; the nearest "
        "layout is instruct: instruction, response; columns: instruction, input, output"
    )
    assert "or set data.kind=chat, which has such columns" in no_layout(
        ["messages", "a"], {}, "instruct"
    )


def load(*overrides):
    return load_recipe(["recipe=x.yaml", *overrides], ranks=None)


def test_the_start_refuses_rows_before_torch_is_imported(folder):
    def problem(row, *more):
        (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(RecipeError) as error:
            load("data.train=rows.jsonl", *more)
        return str(error.value)

    label = {"prompt": "a", "completion": "b", "label": False}
    where = "command line: data.train=rows.jsonl: rows.jsonl: "
    assert problem(label).startswith(f"{where}column 'label' marks good and bad answers")
    assert problem({"a": 1, "b": 2}).startswith(f"{where}no layout of rows has these columns")
    mixture = "data.train={a: {files: rows.jsonl}}"
    assert "data.columns.colour" in problem({"text": "a"}, "data.columns={colour: a}")
    (folder / "rows.jsonl").write_text(json.dumps(label) + "\n")
    with pytest.raises(RecipeError, match=r"rows\.jsonl: column 'label' marks"):
        load(mixture)
    recipe = load("data.train=rows.jsonl", "data.ignore_columns=label").recipe
    assert recipe.data.kind == "instruct"
    named = load(
        "data.train=rows.jsonl", "data.ignore_columns=[label]", "data.columns={text: prompt}"
    )
    assert named.recipe.data.kind == "text"


def test_the_kind_follows_from_named_columns_of_data_that_is_not_here(folder):
    for columns, kind in (("{prompt: a, completion: b}", "instruct"), ("{messages: a}", "chat")):
        options = ["recipe=x.yaml", "data.train=gone.jsonl", f"data.columns={columns}"]
        assert load_recipe(options, ranks=None, files=False).recipe.data.kind == kind


def test_the_byte_tokenizer_needs_its_roles_for_chats(folder):
    (folder / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    small = ["data.train=rows.jsonl", "data.tokenizer=bytes", "model.config.vocab_size=257"]
    with pytest.raises(
        RecipeError, match=r"257 is too small; .* needs 260 for chats: .*prompt_format"
    ):
        load(*small)
    load(*small, "data.prompt_format=text")
    load(*small[:2], "model.config.vocab_size=260")


def test_the_documents_show_the_table():
    """The table of layouts in docs/reference/data.md has a row for each one, with the usual names."""
    text = (REPOSITORY / "docs/reference/data.md").read_text().partition("## Layouts of rows")[2]
    table = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    layouts = [
        [f"`{layout.kind}`", ", ".join(layout.needs), ", ".join(layout.also), layout.becomes]
        for layout in LAYOUTS
    ]
    assert shown[: len(layouts)] == layouts
    names = [
        [f"`{role}`", ", ".join(f"`{name}`" for name in names)]
        for role, names in NAMES.items()
        if names
    ]
    assert shown[len(layouts) :] == names
