"""The last section of docs/models.md: which types of models the tests train."""

from docs import tested_table


def test_page_is_what_the_tests_train():
    """If this fails, `python -m docs.tested_table` writes the page again."""
    text = tested_table.PAGE.read_text()
    assert text == tested_table.page()
    assert "\n| `llama` | trained, packed, classes, LoRA" in text


def test_table_has_what_the_tests_name():
    rows = tested_table.table()
    others = dict.fromkeys(("expert", "masked", "on experts", "dequantized"), "")
    assert rows["llama"] == dict.fromkeys(rows["llama"], "yes") | others
    assert rows["qwen3_5_text"]["losses"] == rows["gemma4_text"]["losses"] == "yes"
    assert rows["gpt_oss"]["on experts"] == rows["deepseek_v3"]["dequantized"] == "yes"
    assert rows["bert"] == dict.fromkeys(rows["bert"], "") | {"classes": "yes", "masked": "yes"}
    assert rows["qwen3_vl"]["trained"] == "yes"
    assert (rows["mixtral"]["expert"], rows["olmoe"]["expert"]) == ("yes", "found")
    assert len(rows) > 25
