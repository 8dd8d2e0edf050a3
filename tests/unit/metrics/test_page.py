"""Tests of the pages of `launcher report` and `launcher plan --html`, in a real browser."""

import json
import math
import os
import re

import pytest

from launcher.cli import main
from launcher.metrics import page
from launcher.planner.formatting import as_json
from launcher.planner.page import plan_page
from launcher.recipe.load import load_recipe, to_yaml
from launcher.reliability.json_files import append_line, read_jsonl
from launcher.reliability.run_directory import RunFolder
from tests.browser import Browser, unavailable
from tests.unit.planner.example_plans import RECIPE, example_plan, example_search

START = 1_800_000_000.0
CHARTS = {
    "Loss": "loss",
    "Evaluation loss": "eval_loss",
    "Evaluation: exact_match": "eval_exact_match",
    "Learning rate": "learning_rate",
    "Gradient norm before clipping": "grad_norm",
    "Tokens per second, all ranks": "tokens_per_second",
    "Seconds per step": "step_seconds",
    "FLOPs utilization (MFU)": "mfu",
    "Peak memory of a rank": "peak_memory_bytes",
}
"""Chart titles and their keys in metrics.jsonl."""
NO_HORIZONTAL_SCROLL = (
    "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
)
"""JavaScript: the page does not scroll horizontally."""
UNITS = {"": 1, "%": 0.01, " MiB": 2**20, " GiB": 2**30}
SMALL_MODEL = [
    "model.config={model_type: llama, hidden_size: 32, intermediate_size: 64, vocab_size: 260, "
    "num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2}",
    "data.sequence_length=16",
]


@pytest.fixture(scope="module")
def browser():
    if (reason := unavailable()) is not None:
        message = f"no browser to test with: {reason}"
        assert os.environ.get("CI_REQUIRES_BROWSER") != "1", message
        pytest.skip(message)
    with Browser() as browser:
        yield browser


def make_run(path, steps, *, rate=1e-3, every=5, **built):
    """Write a run of two attempts. The second resumes from step 10. Step 7 is skipped."""
    run, lines = RunFolder(path), []
    overrides = [f"optimizer.learning_rate={rate}", f"run.dir={path}", *SMALL_MODEL]
    loaded = load_recipe(["recipe=quickstart", *overrides], ranks=2, files=False)
    run.create(to_yaml(loaded.recipe))
    run.write_status("finished", step=steps, steps=steps)
    for step in range(1, steps + 1):
        when = START + 2 * step + (60 if step > 10 else 0)
        line = {"step": step, "loss": 2 + 3 * math.exp(-step / 20) + math.sin(step) / 10}
        line |= {"grad_norm": 1 + 1 / step, "learning_rate": rate * step, "step_seconds": 1.75}
        line |= {"tokens_per_second": 1000.0 + step, "mfu": 0.4 + step / 1e5, "time": when}
        line |= {"peak_memory_bytes": 2**29 + step * 4096, "data_seconds": 0.25, "cpu_seconds": 3.5}
        line |= {"forward_seconds": 0.5, "checkpoint_seconds": None}
        if step == 7:  # in the first attempt
            line |= {"loss": None, "grad_norm": None, "skipped": True, "peak_memory_bytes": 2**30}
        lines.append(line)
        if every and step % every == 0:
            scores = {"eval_loss": 3 - step / 100, "eval_exact_match": step / 100}
            lines.append({"step": step, **scores, "eval_tokens": 900, "time": when})
            sample = {"step": step, "set": "validation", "prompt": f"{step} + 1 = "}
            sample |= {"reference": str(step + 1), "answer": "<b>5</b>", "exact_match": 0.0}
            append_line(run.path / "samples.jsonl", sample)
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    held = {"parameters": 1 << 20, "gradients": 1 << 20, "optimizer": 2 << 20}
    built = {"device": "cpu", "device_memory": None, "ranks_per_node": 2, "held": held} | built
    built["versions"] = {"torch": "2.13.0", "cuda": None}
    for event, after, attempt, more in (
        ("started", 0, 1, {}),
        ("built", 0, 1, built),
        ("saved", 21, 1, {"step": 10}),
        ("started", 60, 2, {"found_step": 12}),
        ("resumed", 61, 2, {"step": 10}),
        ("verdict", 79 + 2 * steps, 2, {"step": steps, "text": "Bound by <data>."}),
        ("finished", 80 + 2 * steps, 2, {"step": steps}),
    ):
        line = {"event": event, "time": START + after, "attempt": attempt, **more}
        append_line(run.events, line | {"host": "node1", "ranks": 2})
    return run


def embedded(file):
    text = re.search(r'id="data">(.*?)</script>', file.read_text(), re.DOTALL)[1]
    return json.loads(text)


def hover(browser, title, share):
    """Hover over the chart at `share` of its width; return name, step and text for each run."""
    x, y = browser.evaluate(
        f"""(() => {{
            const heading = [...document.querySelectorAll("h3")].find(
                one => one.textContent === {json.dumps(title)});
            const svg = heading.parentNode.querySelector("svg");
            svg.scrollIntoView({{ block: "center" }});
            const box = svg.getBoundingClientRect();
            return [box.left + LEFT + {share} * (box.width - LEFT - RIGHT), box.top + 100];
        }})()"""
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    rows = browser.evaluate('[...document.querySelectorAll(".tip div")].map(d => d.textContent)')
    return [re.match(r"(.*?) step (\d+): (\S+(?: [GM]iB)?)", row).groups() for row in rows]


def value_of(text):
    if text == "not":  # from "not finite"
        return None
    number, unit = re.fullmatch(r"([\d.,]+)(.*)", text).groups()
    return float(number.replace(",", "")) * UNITS[unit]


def test_page_of_a_run(tmp_path, browser, capsys):
    run, out = make_run(tmp_path / "a<b> & c", 50), tmp_path / "report.html"
    assert main.main(["report", str(run.path), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    records = read_jsonl(run.metrics)
    charts = {chart["title"]: chart["series"] for chart in embedded(out)["charts"]}
    assert set(charts) == set(CHARTS)
    for title, key in CHARTS.items():
        (curve,) = charts[title]
        lines = [record for record in records if key in record]
        assert curve["y"] == [line[key] for line in lines]
        assert curve["step"] == [line["step"] for line in lines]
        assert curve["time"] == [line["time"] - START for line in lines]

    backgrounds = set()
    for width in (1280, 400):
        for scheme in ("light", "dark"):
            browser.open(out, width=width, scheme=scheme)
            assert browser.evaluate("document.querySelectorAll('svg').length") == len(CHARTS)
            assert browser.evaluate(NO_HORIZONTAL_SCROLL)
            colour = "getComputedStyle(document.body).backgroundColor"
            backgrounds.add(browser.evaluate(colour))
    assert len(backgrounds) == 2

    browser.open(out, width=1280)
    seen = set()
    for axis in ("step", "time"):
        for title, key in CHARTS.items():
            for share in (0.01, 0.122, 0.4, 0.7, 0.99):
                ((_, step, text),) = hover(browser, title, share)
                expected = next(r[key] for r in records if r["step"] == int(step) and key in r)
                assert value_of(text) == (expected and pytest.approx(expected, rel=1e-5))
                seen.add((axis, int(step)))
        browser.evaluate('document.getElementById("axis").click()')
    assert {("step", 1), ("step", 50), ("step", 7), ("time", 50)} <= seen

    # The heights of the curve are a linear function of the values
    path = browser.evaluate('document.querySelector(".curve").getAttribute("d")')
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)h0", path)]
    losses = [r["loss"] for r in records if r.get("loss") is not None]
    factor = (heights[-1] - heights[0]) / (losses[-1] - losses[0])
    expected = [heights[0] + factor * (loss - losses[0]) for loss in losses]
    assert heights == pytest.approx(expected, abs=0.2)
    assert path.count("M") == 2  # a gap at the skipped step
    browser.evaluate('document.getElementById("axis").click()')
    curve = browser.evaluate('document.querySelector(".curve").getAttribute("d")')
    assert curve.count("M") == 3  # over time, there is also a gap between the attempts
    for kind in ("restart", "checkpoint", "skipped"):
        marks = f'document.querySelectorAll(".{kind}").length'
        assert browser.evaluate(marks) == len(CHARTS), kind

    text = browser.evaluate("document.body.innerText")
    for shown in (
        *("Run a<b> & c", "Bound by <data>.", "lowest evaluation"),
        *("data, 14.3%", "forward, 28.6%"),  # shares of 1.75 s
        *("planned", "512.2 MiB", "driver and libraries"),  # 512.2 MiB is measured
        *("optimizer.learning_rate", "2.13.0"),
        *("answers in the evaluation after step 50", "50 + 1 =", "<b>5</b>"),
    ):
        assert shown in text
    assert browser.problems == []


def test_page_of_several_runs(tmp_path, browser):
    long = make_run(tmp_path / "sweep/long", 5000, rate=1e-4, every=None)
    make_run(tmp_path / "sweep/short", 40, device="NVIDIA H100 80GB HBM3", device_memory=80 << 30)
    out = tmp_path / "report.html"
    assert main.main(["report", str(tmp_path / "sweep"), f"out={out}"]) == 0
    chart = next(c for c in embedded(out)["charts"] if c["title"] == "Loss")
    assert 1000 < len(chart["series"][0]["y"]) <= page.MOST_POINTS
    browser.open(out, width=1280)
    text = browser.evaluate("document.body.innerText")
    assert "the longest has 5,000" in text
    table = browser.evaluate(
        '[...document.querySelector("table").rows].map(r => [...r.cells].map(c => c.textContent))'
    )
    columns = {name: values for name, *values in zip(*table, strict=True)}
    assert columns[""] == ["long", "short"]
    assert columns["optimizer.learning_rate"] == ["0.0001", "0.001"]
    assert columns["lowest evaluation"] == ["", "2.6000"]

    records = {r["step"]: r["loss"] for r in read_jsonl(long.metrics)}
    (first, step, text), second = hover(browser, "Loss", 0.5)
    assert (first, second[:2]) == ("long", ("short", "40"))
    assert value_of(text) == pytest.approx(records[int(step)], rel=1e-5)
    browser.evaluate('document.querySelectorAll("nav button")[0].click()')
    assert [name for name, *_ in hover(browser, "Loss", 0.5)] == ["short"]
    browser.evaluate('document.querySelectorAll("nav button")[1].click()')
    assert hover(browser, "Loss", 0.5) == []
    assert browser.problems == []


def test_runs_of_different_recipes_are_compared_by_state(tmp_path):
    make_run(tmp_path / "one", 10)
    other = make_run(tmp_path / "two", 10)
    recipe = other.path / "recipe.yaml"
    text = recipe.read_text()
    for key, value in (("seed", 5), ("workers", 3), ("warmup_steps", 1), ("weight_decay", 0.5),
                       ("shuffle_buffer", 99), ("sequence_length", 8), ("max_grad_norm", 2.0)):  # fmt: skip
        text = re.sub(rf"\b{key}: .*", f"{key}: {value}", text)
    recipe.write_text(text)
    out = tmp_path / "report.html"
    assert main.main(["report", str(tmp_path), f"out={out}"]) == 0
    first, *others = re.findall(r"<table>.*?</table>", out.read_text(), re.DOTALL)
    assert "data.workers" not in first
    assert any("data.workers" in table for table in others)


def test_page_of_a_plan(tmp_path, browser):
    plan = as_json(RECIPE, example_plan(), example_search())
    out = tmp_path / "plan.html"
    page.write(plan_page(plan), out)
    browser.open(out, width=400)
    text = browser.evaluate("document.body.innerText")
    for shown in ("Plan of llama_3_1_8b", "backward\n46.9 GiB", "activations", "To take one"):
        assert shown in text
    bars = browser.evaluate('[...document.querySelectorAll(".bar")].map(b => b.children.length)')
    assert bars == [10, 10, 7]
    assert [p["total"] for p in plan["timeline"]] == embedded(out)["charts"][0]["series"][0]["y"]
    assert browser.evaluate(NO_HORIZONTAL_SCROLL)
    assert browser.problems == []


def test_thinned_curves_keep_extremes():
    points = [(n, float(n), math.sin(n)) for n in range(1, 100_000)]
    points[500] = (501, 501.0, 99.0)
    points[70_000] = (70_001, 70_001.0, None)
    kept = page.thin(points)
    assert len(kept) <= page.MOST_POINTS
    assert kept == sorted(kept, key=lambda point: point[0])
    assert {points[0], points[500], points[70_000], points[-1]} <= set(kept)
    assert page.thin(points[:2000]) == points[:2000]


def test_page_of_incomplete_runs(tmp_path, capsys):
    fresh = RunFolder(tmp_path / "runs/fresh")
    fresh.path.mkdir(parents=True)
    fresh.write_status("running", step=0)
    torn = make_run(tmp_path / "runs/torn", 20, every=None)
    (torn.path / "recipe.yaml").write_text("run: {nme: x}\n")
    torn.events.unlink()
    with torn.metrics.open("a") as stream:
        stream.write('{"step": 21, "lo')
    out = tmp_path / "report.html"
    assert main.main(["report", str(tmp_path / "runs"), "--out", str(out)]) == 0
    data = embedded(out)
    assert [run["name"] for run in data["runs"]] == ["fresh", "torn"]
    assert {series["run"] for chart in data["charts"] for series in chart["series"]} == {1}
    assert data["charts"][0]["series"][0]["step"][-1] == 20
    text = out.read_text()
    assert "No values in metrics.jsonl: Evaluation loss." in text
    assert "unknown key; did you mean name?" in text
    assert "torn is not planned: its recipe or its device is not recorded." in text


def test_unwritable_page_is_an_error(tmp_path, capsys):
    run, file = make_run(tmp_path / "run", 3), tmp_path / "no/r.html"
    run.events.unlink()  # without events, nothing is planned
    assert main.main(["report", str(run.path), f"out={file}"]) == 2
    assert f"{file}: cannot be written: No such" in capsys.readouterr().err
