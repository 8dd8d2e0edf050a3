"""docs/reference/cards.md: what was measured of each model type."""

from docs import cards_page


def test_page_is_what_was_measured_and_what_the_tests_train():
    """If this fails, `python -m docs.cards_page` writes the page again."""
    assert cards_page.PAGE.read_text() == cards_page.page()


def test_lists_of_the_tests():
    found = cards_page.also_tested()
    assert found["llama"] == ["classes", "QLoRA"]
    assert found["gpt_oss"] == ["on experts", "dequantized"]
    assert found["bert"] == ["classes", "masked"]


def test_cells():
    cell = cards_page.cell
    assert cell({"result": "PASS"}) == cell({"result": "PASS", "difference": 0.0}) == "="
    assert cell({"result": "PASS", "difference": 2.5e-08}) == "2e-08"
    losses = {"result": "PASS", "difference": 1.3e-07, "more": "5.667091 to 5.597732"}
    assert cell(losses | {"result": "FAIL"}) == "**FAIL** 1e-07"
    assert cell({"result": "FAIL", "more": "other losses"}) == "**FAIL**"
    assert cell({"result": "not run", "more": "refused"}) == cell(None) == "-"
    shown = "5.667&nbsp;to&nbsp;5.598"
    assert cards_page.first_and_last({"checks": {"losses": losses}}) == shown
    far = losses | {"more": "5.667091 to 5.597732 (from float64 1e-5)"}
    assert cards_page.first_and_last({"checks": {"losses": far}}) == shown
    assert cards_page.first_and_last({"checks": {}}) == "-"


def test_the_page_has_the_families_of_the_readme():
    rows = [line.split(" | ") for line in cards_page.page().splitlines() if line.startswith("| `")]
    by_type = {row[0].strip("| `"): row for row in rows if len(row) > 10}
    for name in ("llama", "qwen3", "mistral", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3"):
        assert by_type[name][1] == "=", name
    assert len(by_type) > 100
    assert any("Qwen3-30B-A3B" in line for line in cards_page.page().splitlines())
