"""The plan's page: whole, by itself, and true to the plan it shows."""

import dataclasses
import json
import re
import shlex
from html import unescape
from html.parser import HTMLParser

import pytest

from launcher.planner.formatting import NAMES
from launcher.planner.html import formulas, render_page
from launcher.recipe.schema import ActivationCheckpointing, Lora
from tests.unit.made_plan import GIB, RECIPE, made_ladder, made_plan

EMPTY = {"meta", "br", "rect", "path"}


class Tags(HTMLParser):
    """Every element, and whether all of them are closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page():
    ladder = made_ladder()
    return render_page(RECIPE, ladder.asked.plan, ladder)


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(page):
    tags = Tags(page)
    assert tags.open == []
    assert not re.search(r"https?://|@import|url\(", page)
    assert not any(attributes.get("src") or attributes.get("href") for _, attributes in tags.found)
    assert "prefers-color-scheme:dark" in page


def test_the_page_holds_every_component_and_every_override(page):
    ladder = made_ladder()
    for key, name in NAMES.items():
        assert f"</i>{name}</span>" in page
        assert page.count(f"background:var(--{key})") >= 5  # the legend and a bar in each of four rungs
        assert page.count(f"--{key}:#") == 2  # light and dark
    copied = [attributes["data-copy"] for _, attributes in Tags(page).found if "data-copy" in attributes]
    assert [tuple(shlex.split(text)) for text in copied] == [rung.overrides for rung in (*ladder.rungs[:2], ladder.rungs[2])]
    assert page.count("fastest that fits") == 2  # the bar and the table
    assert page.count("does not fit") == 2


def test_bars_are_as_long_as_what_they_show(page):
    plan, widest = made_plan(), max(rung.plan.needed for rung in made_ladder().rungs) * 1.02
    bars = re.findall(r'<div class="bar(?: over)?">(.*?)</div>', page)
    assert len(bars) == 4
    written = [float(width) for width in re.findall(r"width:([\d.]+)%", bars[2])]
    assert sum(written) == pytest.approx(100 * plan.needed / widest, abs=0.01)
    assert float(re.search(r'<u style="left:([\d.]+)%', bars[2])[1]) == pytest.approx(100 * 80 * GIB / widest, abs=0.01)


def test_the_timeline_has_every_moment(page):
    plan = made_plan()
    told = json.loads(re.search(r'<script type="application/json" id="moments">(.*?)</script>', page, re.DOTALL)[1])
    assert len(told["moments"]) == len(plan.step.timeline)
    assert max(sum(moment["parts"].values()) for moment in told["moments"]) == max(
        moment.components.total + plan.context + plan.margin for moment in plan.step.timeline
    )
    top = re.search(r"viewBox=\"0 0 (\d+) ", page)
    assert int(top[1]) == len(plan.step.timeline)


def test_what_others_wrote_is_text_and_never_markup():
    recipe = dataclasses.replace(RECIPE, run=dataclasses.replace(RECIPE.run, name="</title><script>alert(1)</script>"))
    plan = made_plan(notes=("<b>bold</b>",))
    evil = dataclasses.replace(plan.step.timeline[0], where="</script><script>alert(2)</script>")
    plan = dataclasses.replace(plan, step=dataclasses.replace(plan.step, timeline=(evil, *plan.step.timeline[1:]), peak=evil))
    text = render_page(recipe, plan, None)
    assert "<script>alert" not in text
    assert "<b>bold</b>" not in text
    assert "alert(1)" in unescape(text)
    assert Tags(text).open == []


def test_a_plan_alone_and_one_without_a_device_have_a_page():
    text = render_page(RECIPE, made_plan(memory=None), None)
    assert "no verdict" in text
    assert "The ladder" not in text
    assert "<u " not in text
    ladder = made_ladder(fits=False)
    text = render_page(RECIPE, ladder.asked.plan, ladder)
    assert "Nothing fits." in text
    assert "lora={rank: 16}" in text


def test_formulas_stand_beside_the_plan():
    plan = made_plan()
    sixteen, korthikanti, logits = formulas(RECIPE, plan)
    assert sixteen[2] == pytest.approx(4 * plan.step.held.parameters, rel=1e-6)
    assert sixteen[3] == plan.step.held.parameters + plan.step.held.gradients + plan.step.held.optimizer
    assert korthikanti[2] == 34 * 4 * 4096 * 32 * 4096
    assert korthikanti[3] == plan.step.after_forward.activations
    assert logits[2] == 10 * 4 * 4096 * 128256
    full = dataclasses.replace(RECIPE, activation_checkpointing=ActivationCheckpointing())
    assert formulas(full, plan)[1][2] == 2 * 4 * 4096 * 32 * 4096
    # What a formula was not made for gets none
    selective = dataclasses.replace(RECIPE, activation_checkpointing=ActivationCheckpointing(mode="selective"), lora=Lora())
    assert [row[0][:8] for row in formulas(selective, plan)] == ["10 bytes"]
