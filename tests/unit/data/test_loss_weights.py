"""data.loss_weights: the weights of reasoning, calls and answer of an assistant's message."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.data.chat_template import ChatTemplate
from launcher.data.messages import chat_of, read_messages
from launcher.data.opening import open_dataset
from launcher.data.streaming import StreamingDataset, StreamOrder
from launcher.data.template_source import read_template
from launcher.data.token_store import ModelTraits
from launcher.errors import RowError
from launcher.models.micro_batch import IGNORED
from launcher.objectives.loss import summed_loss
from launcher.objectives.next_token import NextToken
from launcher.recipe import schema
from tests.unit.data.rows import write
from tests.unit.data.test_chat import (
    GEMMA4,
    GLM,
    GPT_OSS,
    QWEN35,
    R1,
    RULE,
    SERVED,
    TOOL_CHAT,
    bpe_tokenizer,
    dialogue,
    encode_file,
    folder,  # noqa: F401
    with_marks,
    without_marks,
)

WEIGHTS = {"reasoning": 0.25, "calls": 0.5, "answer": 2.0}
CALL = {"function": {"name": "look", "arguments": {"at": "</b> look"}}}
TOOL = {"type": "function", "function": {"name": "look"}}
ALL = {
    "role": "assistant",
    "reasoning_content": "why not?",
    "content": "Wait </b>",
    "tool_calls": [CALL, CALL],
}
WRITTEN_CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "</b> look"}}\n</tool_call>'


def weighed(template, messages, tools=None, tokenizer=None, weights=WEIGHTS, of_messages=None):
    """The texts of one weight that carry loss, with their weights."""
    tokenizer = tokenizer or bpe_tokenizer()
    chat_template = ChatTemplate(tokenizer, "it", template)
    chat = chat_of(read_messages(messages, "messages"), tools)
    chat = replace(chat, part_weights=weights, weights=of_messages)
    [document] = chat_template.encode([chat_template.render(chat)])
    tokens = zip(document.ids, document.labels != IGNORED, document.weights, strict=True)
    runs = itertools.groupby(tokens, key=lambda token: (bool(token[1]), float(token[2])))
    return [
        (weight, tokenizer.decode([token[0] for token in run]))
        for (learned, weight), run in runs
        if learned
    ]


TURN = dialogue("a")
PARTS = {
    "qwen3": (
        read_template("qwen3"),
        [*TURN, ALL],
        [
            (0.25, "<think>\nwhy not?\n</think>\n\n"),
            (2.0, "Wait </b>"),
            (0.5, f"\n{WRITTEN_CALL}\n{WRITTEN_CALL}<|im_end|>"),
        ],
    ),
    "qwen3, reasoning in the content": (
        read_template("qwen3"),
        [*TURN, {"role": "assistant", "content": "<think>\n\nwhy\n</think>\n\n yes\n"}],
        [(0.25, "<think>\nwhy\n</think>\n\n"), (2.0, " yes\n<|im_end|>")],
    ),
    "qwen3, no content": (
        read_template("qwen3"),
        [*TURN, {**ALL, "content": ""}],
        [
            (0.25, "<think>\nwhy not?\n</think>\n\n"),
            (0.5, f"{WRITTEN_CALL}\n{WRITTEN_CALL}<|im_end|>"),
        ],
    ),
    "qwen3, no reasoning": (
        read_template("qwen3"),
        dialogue("a", "yes", "b", "no"),
        [(2.0, "yes<|im_end|>"), (0.25, "<think>\n\n</think>\n\n"), (2.0, "no<|im_end|>")],
    ),
    "a template that shows no marks": (
        read_template("chatml"),
        dialogue("a", "<think>why</think> yes"),
        [(0.25, "<think>why</think>"), (2.0, " yes<|im_end|>")],
    ),
    "deepseek-r1": (*SERVED["a thought beside it"][:2], [(0.25, "what 1\n</think>\n\n"), (2.0, "yes<eos>")]),
    "deepseek-r1, no reasoning": (R1, dialogue("a", "no"), [(0.25, "\n</think>\n\n"), (2.0, "no<eos>")]),
    "gpt-oss": (
        *RULE["reasoning of gpt-oss"][:2],
        [
            (0.25, "<|neck|>analysis what 3<|end|>"),
            (2.0, "<|begin|>assistant<|neck|>final no<eos>"),
        ],
    ),
    "gpt-oss, a call": (
        GPT_OSS,
        TOOL_CHAT,
        [(0.5, " to=maybe</turn>"), (2.0, "<|neck|>final no<eos>")],
    ),
    "glm": (
        GLM,
        TOOL_CHAT,
        [
            (0.25, "\n<think></think>\n"),
            (0.5, "<call>maybe</call><|begin|>"),
            (0.25, "\n<think></think>\n"),
            (2.0, "no<eos>"),
        ],
    ),
    "gemma 4": (GEMMA4, TOOL_CHAT, [(0.5, "<call>maybe</call><|neck|>"), (2.0, "no</turn>")]),
    "qwen3.5": (*RULE["qwen3.5"][:2], [(0.25, "what 3\n</think>\n\n"), (2.0, "no<|end|>")]),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("mark", [without_marks, with_marks])
def test_each_part_has_its_weight(name, mark):
    """Also what the template writes around it. Expected texts are read off the templates."""
    template, messages, expected = PARTS[name]
    if name.startswith("deepseek") and mark is with_marks:
        pytest.skip("its marks leave the reasoning out")
    tokenizer = bpe_tokenizer()
    ends = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    tokenizer.add_special_tokens(ends)
    tools = [TOOL] if messages[-1].get("tool_calls") else None
    marked = mark(template) if "[[" in template else template
    assert weighed(marked, messages, tools, tokenizer) == expected


def test_parts_multiply_the_weights_of_messages_and_rows(tmp_path, folder):  # noqa: F811
    (tmp_path / "t.jinja").write_text(without_marks(QWEN35))
    rows = [
        {
            "messages": [
                *TURN,
                {
                    "role": "assistant",
                    "reasoning_content": "what",
                    "content": "no",
                    "weight": 0.5,
                },
            ],
            "worth": 4.0,
        }
    ]
    [found] = encode_file(
        tmp_path,
        rows,
        "chat",
        folder,
        chat_template=str(tmp_path / "t.jinja"),
        message_weights=True,
        weights_column="worth",
        loss_weights={"reasoning": 0.25},
    )
    learned, tokenizer = found.labels_or_ids != IGNORED, bpe_tokenizer()
    texts = {
        weight: tokenizer.decode(found.ids[learned & (found.weights == weight)])
        for weight in {*found.weights[learned].tolist()}
    }
    assert texts == {0.25 * 0.5 * 4: "what\n</think>\n\n", 0.5 * 4: "no<|end|>"}


def test_a_part_of_weight_0_has_no_loss():
    zero = {"reasoning": 0.0}
    assert weighed(without_marks(QWEN35), RULE["qwen3.5"][1], weights=zero) == [(1.0, "no<|end|>")]
    assert weighed(without_marks(R1), dialogue("a", "no"), weights={"answer": 0}) == [
        (1.0, "\n</think>\n\n")
    ]


MIXED = {
    "calls and their names apart": (
        "{{ m.content + '!' + m.content[:1] + '<|end|>' }}",
        dialogue("a", "yes"),
    ),
    "text that chooses": (
        "{{ ('?' if 'yes' in m.content else '!') + m.content + '<|end|>' }}",
        dialogue("a", "yes"),
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_parts_that_are_not_known_are_an_error_of_the_row(name):
    said, messages = MIXED[name]
    template = (
        "{% for m in messages %}{{ '<|begin|>' + m.role }}{% if m.role == 'assistant' %}"
        f"{{% generation %}}{said}{{% endgeneration %}}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|begin|>assistant' }}{% endif %}"
    )
    with pytest.raises(
        RowError, match=r"does not show which text is reasoning.*data\.loss_weights"
    ):
        weighed(template, messages)


def rows_and_data(tmp_path, folder, **more):  # noqa: F811
    (tmp_path / "t.jinja").write_text(without_marks(QWEN35))
    rows = []
    for thought, said in (("what", "no"), ("maybe yes", "the answer"), ("is", "forty two")):
        answer = {"role": "assistant", "reasoning_content": thought, "content": said}
        rows.append({"messages": [*TURN, answer]})
    file = write(tmp_path / "rows.jsonl", rows)
    return schema.Data(
        kind="chat",
        train=(str(file),),
        cache=str(tmp_path / "cache"),
        sequence_length=256,
        chat_template=str(tmp_path / "t.jinja"),
        loss_weights={"reasoning": 0.25, "answer": 2.0},
        shuffle=False,
        **more,
    )


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
def test_the_loss_is_the_weighted_mean(tmp_path, folder, packing, streaming):  # noqa: F811
    """Of the cross-entropies of plain torch, row by row, with weights that are written out here."""
    data = rows_and_data(tmp_path, folder, packing=packing, streaming=streaming)
    options = {"objective": NextToken(), "tokenizer": folder, "model": ModelTraits()}
    if streaming:
        stream = StreamingDataset(data, **options, seed=0, build=True)
        order = StreamOrder(stream)
        count = 1 if packing else 3
        made = stream.collate([stream[order.sample(position)] for position in range(count)])
    else:
        dataset = open_dataset(data, data.train, **options, build=True)
        made = dataset.collate([dataset[index] for index in range(len(dataset))])
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=400, hidden_size=16, intermediate_size=16, num_hidden_layers=0,
        num_attention_heads=2,
    )  # fmt: skip
    # Without layers a token's prediction depends on it alone, and so not on packing
    model = AutoModelForCausalLM.from_config(config)
    mean = summed_loss(model, made.micro_batch) / made.loss_weight

    tokenizer, total, weight = bpe_tokenizer(), 0.0, 0.0
    for thought, said in (("what", "no"), ("maybe yes", "the answer"), ("is", "forty two")):
        text = f"<|begin|>user\na<|end|>\n<|begin|>assistant\n<think>\n{thought}\n</think>\n\n{said}<|end|>\n"
        encoding = tokenizer(text, return_offsets_mapping=True)
        ids = torch.tensor(encoding["input_ids"])
        starts = torch.tensor([start for start, _ in encoding["offset_mapping"]])
        begin, middle = text.index("<think>\n") + 8, text.rindex(said)
        end = text.rindex("\n")
        weights = ((starts >= begin) & (starts < middle)) * 0.25
        weights = weights + ((starts >= middle) & (starts < end)) * 2.0
        losses = torch.nn.functional.cross_entropy(
            model(ids[None]).logits[0, :-1], ids[1:], reduction="none"
        )
        total, weight = total + (losses * weights[1:]).sum(), weight + weights[1:].sum()
    torch.testing.assert_close(mean, total / weight, rtol=1e-5, atol=0)
