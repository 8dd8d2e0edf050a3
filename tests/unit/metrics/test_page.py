"""Tests of the pages of `launcher report` and `launcher plan out=FILE`, in a real browser."""

import json
import math
import os
import re
import shlex
from datetime import datetime

import markupsafe
import pytest

from launcher.cli import main
from launcher.metrics import page
from launcher.planner.page import write_plan
from launcher.planner.plan_as_json import as_json
from launcher.recipe.load import load_recipe, to_yaml
from launcher.reliability.json_files import append_line, read_jsonl
from launcher.reliability.run_directory import EXPERTS, RunFolder
from tests.browser import Browser, unavailable
from tests.unit.planner.example_plans import RECIPE, example_plan, example_search

START = 1_800_000_000.0
CHARTS = {
    "Loss": {"training": "loss", "evaluation": "eval_loss"},
    "Evaluation: exact_match": {"exact_match": "eval_exact_match"},
    "Gradient norm before clipping": {"": "grad_norm"},
    "Learning rate": {"": "learning_rate"},
    "Tokens per second, all ranks": {"": "tokens_per_second"},
    "FLOPs utilization (MFU)": {"MFU": "mfu"},
    "Peak memory of a rank": {"allocated": "peak_memory_bytes"},
    "Seconds per step": {"": "step_seconds"},
    "Waits of a step": {"data": "data_seconds"},
    "Power of a GPU, mean": {"": "gpu_power_watts"},
    "Temperature of the hottest GPU": {"": "gpu_temperature_celsius"},
    "Utilization of the least busy GPU": {"busy": "gpu_utilization"},
}
"""Chart titles, the names of their curves, and their keys in metrics.jsonl."""
FACTORS = {"mfu": 100, "gpu_utilization": 100, "peak_memory_bytes": 2**-30}
"""From values in metrics.jsonl to those of a chart."""
NO_HORIZONTAL_SCROLL = (
    "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
)
"""JavaScript: the page does not scroll horizontally."""
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


def make_run(path, steps, *, rate=1e-3, every=5, ended="failed", name=None, **built):
    """Write a run of two attempts. The second resumes from step 10. Step 7 is skipped. ended: the
    event that ends the first attempt."""
    run, lines = RunFolder(path), []
    overrides = [f"optimizer.learning_rate={rate}", f"run.dir={path}", *SMALL_MODEL]
    overrides += [] if name is None else [f"run.name={name}"]
    loaded = load_recipe(["recipe=quickstart", *overrides], ranks=2, files=False)
    run.create(to_yaml(loaded.recipe))
    run.write_status("finished", step=steps, steps=steps)
    for step in range(1, steps + 1):
        when = START + 2 * step + (60 if step > 10 else 0)
        line = {"step": step, "loss": 2 + 3 * math.exp(-step / 20) + math.sin(step) / 10}
        line |= {"grad_norm": 1 + 1 / step, "learning_rate": rate * step, "step_seconds": 1.75}
        line |= {"tokens_per_second": 1000.0 + step, "mfu": 0.4 + step / 1e5, "time": when}
        line |= {"peak_memory_bytes": 2**29 + step * 4096, "data_seconds": 0.25, "cpu_seconds": 3.5}
        line |= {
            "forward_seconds": 0.5,
            "checkpoint_seconds": None,
            "gpu_temperature_celsius": 71.0,
        }
        line |= {"gpu_power_watts": 640.0 + step, "gpu_utilization": 0.97}
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
        (ended, 40, 1, {"step": 12}),
        ("started", 60, 2, {"found_step": 12, "overrides": ["recipe=quickstart", "a='b c'"]}),
        ("resumed", 61, 2, {"step": 10}),
        ("finished", 80 + 2 * steps, 2, {"step": steps}),
    ):
        line = {"event": event, "time": START + after, "attempt": attempt, **more}
        append_line(run.events, line | {"host": "node1", "ranks": 2})
    return run


def embedded(file):
    """Return the charts in a page by their titles."""
    text = re.search(r'id="data">(.*?)</script>', file.read_text(), re.DOTALL)[1]
    return {figure["title"]: figure for part in json.loads(text) for figure in part["figures"]}


def marks_in(file):
    """Return the steps of the marks in a page, as {(run, kind): [step, ...]}."""
    text = re.search(r'id="data">(.*?)</script>', file.read_text(), re.DOTALL)[1]
    marks = {}
    for mark in json.loads(text)[0]["marks"]:
        marks.setdefault((mark["run"], mark["kind"]), []).append(mark["step"])
    return marks


def curves(figure):
    """Return the curves of a chart as {(run, name): [(step, value), ...]}."""
    return {
        (curve["run"], curve["name"]): list(zip(curve["steps"], curve["values"], strict=True))
        for curve in figure["curves"]
    }


def bars_in(browser):
    """Return the bars of a page by title: label, and names with texts and widths of its parts."""
    return browser.evaluate(
        """Object.fromEntries([...document.querySelectorAll("figure.bars")].map(figure => [
            figure.querySelector("h3").textContent.trim(),
            [...figure.querySelectorAll(".bar")].map(bar => [
                bar.previousElementSibling.textContent,
                [...bar.children].map(part => [part.title, parseFloat(part.style.width)])])]))"""
    )


def drawn(browser, title):
    """Return what plotly has drawn of a chart: {(run, name): [(x, y), ...]} of the visible curves."""
    found = browser.evaluate(
        f"""(() => {{
            const n = figures.findIndex(f => f.title === {json.dumps(title)});
            return figures[n].curves.map((curve, k) => [curve.run, curve.name, plots[n].data[k]]);
        }})()"""
    )
    return {
        (run, name): list(zip(trace["x"], trace["y"], strict=True))
        for run, name, trace in found
        if trace["visible"]
    }


def drawn_marks(browser, title):
    """Return the places of the marks that plotly has drawn in a chart: {(color, kind): [x, ...]}."""
    found = browser.evaluate(
        f"""(() => {{
            const n = figures.findIndex(f => f.title === {json.dumps(title)});
            return plots[n].data.slice(figures[n].curves.length).filter(trace => trace.visible).map(
                trace => [trace.line.color, trace.hovertemplate, trace.x]);
        }})()"""
    )
    return {
        (color, kind.removesuffix("<extra></extra>")): list(dict.fromkeys(filter(None, places)))
        for color, kind, places in found
    }


def axis_type(browser, title):
    """Return the type of the value axis that plotly has drawn of a chart."""
    number = f"figures.findIndex(f => f.title === {json.dumps(title)})"
    return browser.evaluate(f"plots[{number}]._fullLayout.yaxis.type")


def hover(browser, title, share):
    """Move the pointer to `share` of the width of a chart. Return the lines of its label."""
    x, y = browser.evaluate(
        f"""(() => {{
            const plot = plots[figures.findIndex(f => f.title === {json.dumps(title)})];
            plot.scrollIntoView({{ block: "center" }});
            const box = plot.querySelector(".nsewdrag").getBoundingClientRect();
            return [box.left + {share} * box.width, box.top + box.height / 2];
        }})()"""
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    return browser.evaluate(
        f"""(async () => {{
            const plot = plots[figures.findIndex(f => f.title === {json.dumps(title)})];
            for (let frame = 0; frame < 600; frame++) {{
                const shown = plot.querySelectorAll(".hoverlayer text");
                if (shown.length) return [...shown].map(text => text.textContent);
                await new Promise(requestAnimationFrame);
            }}
        }})()"""
    )


def test_page_of_a_run(tmp_path, browser, capsys):
    run = make_run(tmp_path / "a<b> & c", 50)
    out = run.path / "report.html"
    (run.log / "rank_0.log").write_text("x" * 20_000 + "\nthe last words\n")
    assert main.main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    command = f"launcher plan recipe={shlex.quote(f'{run.path}/recipe.yaml')} gpus="
    assert str(markupsafe.escape(command)) in out.read_text()
    records = read_jsonl(run.metrics)
    charts = embedded(out)
    assert list(charts) == [*CHARTS]

    def expected(key, along):
        return [
            (along(r), r[key] and pytest.approx(r[key] * FACTORS.get(key, 1)))
            for r in records
            if key in r
        ]

    def without_gap(points):  # between the attempts
        return [point for n, point in enumerate(points) if n != gaps.get(len(points))]

    backgrounds = set()
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            browser.open(out, width=width, scheme=scheme)
            drawings = "document.querySelectorAll('.plot .cartesianlayer').length"
            assert browser.evaluate(drawings) == len(charts)
            assert browser.evaluate(NO_HORIZONTAL_SCROLL)
            backgrounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
            backgrounds.add(
                browser.evaluate("getComputedStyle(document.querySelector('.plot text')).fill")
            )
    assert len(backgrounds) == 4

    browser.open(out, width=1280)
    first = "[...document.body.children].filter(e => e.matches('.cards, .charts, table, h2'))"
    assert browser.evaluate(f"{first}.slice(0, 2).map(e => e.className)") == ["cards", "charts"]
    cards = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.cards div')].map("
        "c => [...c.children].map(e => e.textContent)).map(([n, ...rest]) => [n, rest]))"
    )
    assert cards["state"] == ["finished", ""]
    assert cards["step"] == ["50 of 50", "100%"]
    assert cards["loss"] == [f"{records[-2]['loss']:.4f}", "evaluation 2.5000"]
    assert cards["speed"] == ["1,050 tokens/s", "1.75 s a step"]
    assert cards["took"] == ["3 min 00 s", "1 restart"]
    assert cards["memory"] == ["512.2 MiB", ""]
    assert cards["checkpoint"] == ["none", ""]
    gaps = {51: 10, 11: 2}  # the second attempt begins after step 10
    assert browser.evaluate("[...axis.options].map(o => o.value)") == ["step", "time", "date"]
    for axis in ("step", "time", "date"):
        browser.evaluate(f"axis.value = '{axis}'; axis.onchange()")
        for title, keys in CHARTS.items():
            found = drawn(browser, title)
            assert set(found) == {(0, name) for name in keys}
            for name, key in keys.items():
                points = found[0, name]
                assert points[gaps[len(points)]][1] is None
                if axis == "step":
                    along = lambda r: r["step"]  # noqa: E731
                elif axis == "time":
                    along = lambda r: pytest.approx((r["time"] - START) / 60)  # noqa: E731
                else:  # of this time zone
                    points = [(datetime.fromisoformat(x).timestamp(), y) for x, y in points]
                    along = lambda r: pytest.approx(r["time"], abs=2e-3)  # noqa: E731
                assert without_gap(points) == expected(key, along)
    assert marks_in(out) == {
        (0, "restart"): [10],
        (0, "checkpoint"): [10],
        (0, "skipped step"): [7],
    }
    browser.evaluate("axis.value = 'step'; axis.onchange()")
    marks = drawn_marks(browser, "Loss")
    assert {kind: places for (_, kind), places in marks.items()} == {
        "restart": [10],
        "checkpoint": [10],
        "skipped step": [7],
    }
    for kept in (0.9, 0):
        browser.evaluate(f"smooth.value = {kept}; smooth.oninput()")
        values = [value for _, value in drawn(browser, "Loss")[0, "training"]]
        weights, total, mean = 0.0, 0.0, []
        for value in (r["loss"] for r in records if "loss" in r):
            if value is not None:
                weights, total = kept * weights + 1, kept * total + value
            mean.append(value and pytest.approx(total / weights))
        assert [*values[:10], *values[11:]] == mean
        few = drawn(browser, "Loss")[0, "evaluation"]  # not smoothed
        assert few[0] == (5, 2.95)

    step, value = hover(browser, "Learning rate", 0.8)
    (rate,) = (r["learning_rate"] for r in records if str(r["step"]) == step and "loss" in r)
    assert 30 < int(step) < 50
    assert float(value) == pytest.approx(rate, rel=1e-5)
    assert re.fullmatch(r"allocated .* GiB", hover(browser, "Peak memory of a rank", 0.8)[1])
    assert axis_type(browser, "Loss") == "linear"
    browser.evaluate('document.querySelector(".log").click()')
    assert axis_type(browser, "Loss") == "log"
    assert axis_type(browser, "Learning rate") == "linear"
    bars = bars_in(browser)
    assert list(bars) == ["Time", "Time of a step", "Memory at the peak"]
    ((label, parts),) = bars["Time of a step"]
    assert label == "a<b> & c: 1,750 ms"
    assert parts == [
        ["forward: 500 ms", pytest.approx(100 * 0.5 / 1.75, abs=0.01)],
        ["data: 1,250 ms", pytest.approx(100 * 1.25 / 1.75, abs=0.01)],
    ]

    text = browser.evaluate("document.body.textContent")
    for shown in (
        *("Run a<b> & c", "71% of a step; try data.workers=", "lowest evaluation"),
        *("1,250 ms", "500 ms"),
        *("started", "tokens", "rank-hours", "Time of a step"),
        "launcher train recipe=quickstart 'a='\"'\"'b c'\"'\"'' gpus=2",
        *("Memory at the peak", "512.2 MiB", "parameters", "other"),
        *("optimizer.learning_rate", "2.13.0"),
        "the last words",
    ):
        assert shown in text
    assert browser.problems == []


@pytest.mark.slow
def test_page_of_several_runs(tmp_path, browser):
    long = make_run(tmp_path / "sweep/long", 5000, rate=1e-4, every=None)
    make_run(tmp_path / "sweep/short", 40, device="NVIDIA H100 80GB HBM3", device_memory=80 << 30)
    out = tmp_path / "report.html"
    assert main.main(["report", str(tmp_path / "sweep"), f"out={out}"]) == 0
    found = curves(embedded(out)["Loss"])
    assert set(found) == {(0, "training"), (1, "training"), (1, "evaluation")}
    assert 1000 < len(found[0, "training"]) <= page.MOST_POINTS + 1
    records = {r["step"]: r["loss"] for r in read_jsonl(long.metrics)}
    for step, loss in found[0, "training"]:
        assert loss is None or loss == records[step]
    browser.open(out, width=1280)
    text = browser.evaluate("document.body.innerText")
    assert "the longest has 5,000" in text
    table = browser.evaluate(
        '[...document.querySelector(".scroll table").rows].map(r => [...r.cells].map(c => c.textContent))'
    )
    columns = {name: values for name, *values in zip(*table, strict=True)}
    assert columns[""] == ["long", "short"]
    assert columns["optimizer.learning_rate"] == ["0.0001", "0.001"]
    assert columns["lowest evaluation"] == ["", "2.6000"]
    width, room, height = browser.evaluate(
        "(t => [t.scrollWidth, t.parentElement.clientWidth, t.clientHeight])"
        '(document.querySelector(".scroll table"))'
    )
    assert width <= room
    assert height < 3 * 2 * 20, "three rows of at most two lines"
    assert "State, continued" in text

    step, *labels = hover(browser, "Tokens per second, all ranks", 0.5)
    assert f"long {1000 + int(step.replace(',', '')):,} tokens/s" in labels
    assert {(color, kind) for color, kind in drawn_marks(browser, "Loss")} == {
        (color, kind)
        for color in page._COLORS[:2]
        for kind in ("restart", "checkpoint", "skipped step")
    }
    for hidden in ({0}, {0, 1}):
        browser.evaluate(f'document.querySelectorAll("nav button")[{max(hidden)}].click()')
        assert {run for run, _ in drawn(browser, "Loss")} == {0, 1} - hidden
    assert browser.problems == []


def test_what_is_enlarged_stays_so_until_the_axis_is_another_one(tmp_path, browser):
    run, out = make_run(tmp_path / "run", 50), tmp_path / "report.html"
    assert main.main(["report", str(run.path), f"out={out}"]) == 0
    browser.open(out, width=1280)
    left, right, y = browser.evaluate(
        """(box => [box.left + 0.25 * box.width, box.left + 0.75 * box.width, box.top + 50])(
            plots[0].querySelector(".nsewdrag").getBoundingClientRect())"""
    )
    whole = browser.evaluate("plots[0]._fullLayout.xaxis.range")
    mouse = {"y": y, "button": "left", "clickCount": 1}
    browser.call("Input.dispatchMouseEvent", type="mousePressed", x=left, **mouse)
    for x in (left + 20, right):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, **mouse)
    browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=right, **mouse)
    first, last = browser.evaluate(
        """(async () => {
            for (let frame = 0; frame < 600 && plots[0].layout.xaxis.autorange !== false; frame++)
                await new Promise(requestAnimationFrame);
            return plots[0]._fullLayout.xaxis.range;
        })()"""
    )
    assert whole[0] < first < last < whole[1]
    browser.evaluate("smooth.value = 0.5; smooth.oninput()")
    assert browser.evaluate("plots[0]._fullLayout.xaxis.range") == [first, last]
    for name in ("time", "step"):
        browser.evaluate(f"axis.value = '{name}'; axis.onchange()")
    assert browser.evaluate("plots[0]._fullLayout.xaxis.range") == whole


def test_names_of_runs_are_no_markup_in_labels(tmp_path, browser):
    for name in ("<b>a", "%{y}&lt;"):
        make_run(tmp_path / "runs" / name, 10)
    out = tmp_path / "report.html"
    assert main.main(["report", str(tmp_path / "runs"), f"out={out}"]) == 0
    assert out.read_text().count("plotly.js v") == 1
    browser.open(out, width=1280)
    labels = hover(browser, "FLOPs utilization (MFU)", 0.8)
    assert {label.rsplit(" ", 2)[0] for label in labels[1:]} == {"<b>a MFU", "%{y}&lt; MFU"}


def test_the_load_of_experts_is_a_picture(tmp_path, browser):
    run, out = make_run(tmp_path / "run", 10), tmp_path / "report.html"
    file, layers = run.path / EXPERTS, {"layers.<b>0": [0.0, 2.0, 1.0], "layers.1": [1.0, 0.5, 1.5]}
    damaged = (
        "",
        "[]",
        "[" * 100_000,
        '{"step": 4, "layers": {"a": [1, NaN]}}',
        '{"step": 4, "layers": {"a": null}}',
    )
    for text in (*damaged, '{"step": 1e400, "layers": {"a": [1]}}'):
        file.write_text(text)
        assert main.main(["report", str(run.path), f"out={out}"]) == 0
        assert not any("cells" in figure for figure in embedded(out).values())
    file.write_text(json.dumps({"step": 9, "layers": layers}))
    assert main.main(["report", str(run.path), f"out={out}"]) == 0
    title = "Load of each expert, by layer, at step 9 (1: the mean)"
    assert embedded(out)[title]["cells"] == [*layers.values()]
    for width in (1280, 390):
        browser.open(out, width=width)
        assert browser.evaluate(NO_HORIZONTAL_SCROLL)
        shown = "plots.at(-1).data.map(trace => [trace.type, trace.z, trace.y])"
        assert browser.evaluate(shown) == [
            ["heatmap", [*layers.values()], ["layers.&lt;b>0", "layers.1"]]
        ]
    file.unlink()
    os.mkfifo(file)
    assert main.main(["report", str(run.path), f"out={out}"]) == 0


def test_runs_of_different_recipes_are_compared_by_state(tmp_path):
    make_run(tmp_path / "one", 10)
    other = make_run(tmp_path / "two", 10)
    recipe = other.path / "recipe.yaml"
    text = recipe.read_text()
    for key, value in (("seed", 5), ("workers", 3), ("warmup_steps", 1), ("weight_decay", 0.5),
                       ("prefetch_factor", 99), ("sequence_length", 8), ("max_grad_norm", 2.0)):  # fmt: skip
        text = re.sub(rf"\b{key}: .*", f"{key}: {value}", text)
    recipe.write_text(text)
    out = tmp_path / "report.html"
    assert main.main(["report", str(tmp_path), f"out={out}"]) == 0
    first, *others = re.findall(r"<table.*?</table>", out.read_text(), re.DOTALL)
    assert "data.workers" not in first
    assert any("data.workers" in table for table in others)


def test_a_sweep_is_compared_with_its_recipe(tmp_path):
    """The names of its runs, `quickstart seed=1`, are those of no recipe."""
    for label in ("seed=1", "seed=2"):
        make_run(tmp_path / label, 10, name=f"quickstart {label}")
    out = tmp_path / "report.html"
    assert main.main(["report", str(tmp_path), f"out={out}"]) == 0
    assert ">recipes/quickstart.yaml</th>" in out.read_text()


def test_page_of_a_plan(tmp_path, browser):
    plan = as_json(RECIPE, example_plan(), example_search())
    out = tmp_path / "plan.html"
    write_plan(plan, out)
    browser.open(out, width=390)
    text = browser.evaluate("document.body.textContent")
    for shown in ("Plan of llama_3_1_8b", "backward: 46.9 GiB", "activations", "To take one"):
        assert shown in text
    assert [len(parts) for _, parts in bars_in(browser)["Memory at the peak of each phase"]] == [
        10,
        10,
        7,
    ]
    line = browser.evaluate("parseFloat(document.querySelector('.line').style.width)")
    assert line == pytest.approx(100)
    words = browser.evaluate("[...document.querySelectorAll('.words')].map(e => e.textContent)")
    assert words == [shlex.join(row["overrides"]) for row in plan["search"]["configurations"]]
    cut = "[...document.querySelectorAll('.words')].filter(e => e.scrollWidth > e.clientWidth)"
    assert browser.evaluate(f"{cut}.length") == 0
    assert browser.evaluate("document.querySelector('.scroll').scrollWidth") <= 390
    copied = browser.evaluate(
        """(async () => {
            const copied = [];
            navigator.clipboard.writeText = async text => { copied.push(text); };
            const buttons = [...document.querySelectorAll("[data-copy]")];
            buttons.forEach(button => button.click());
            await new Promise(requestAnimationFrame);
            return [copied, buttons.map(button => button.textContent)];
        })()"""
    )
    pasted = [shlex.join(row["overrides"]) for row in plan["search"]["configurations"]]
    assert copied == [list(filter(None, pasted)), ["copied"] * len(copied[0])]
    assert len(copied[0]) > 1
    (timeline,) = embedded(out).values()
    sizes = [size * 2**30 for size in timeline["curves"][0]["values"]]
    assert sizes == pytest.approx([moment["total"] for moment in plan["timeline"]])
    assert browser.evaluate(NO_HORIZONTAL_SCROLL)
    assert browser.problems == []


def test_restarts_and_resumes_are_marked(tmp_path):
    make_run(tmp_path / "killed", 20)
    reopened = make_run(tmp_path / "resumed", 20, ended="finished")
    later = {"event": "started", "time": START + 500, "attempt": 3, "host": "node1", "ranks": 2}
    append_line(reopened.events, later)  # without a step, after the run was finished
    append_line(reopened.events, later | {"event": "resumed", "step": 20, "time": START + 510})
    out = tmp_path / "report.html"
    assert main.main(["report", str(tmp_path), f"out={out}"]) == 0
    marks = marks_in(out)
    assert marks[0, "restart"] == [10]
    assert marks[1, "resume"] == [10, 20]
    assert {(0, "resume"), (1, "restart")}.isdisjoint(marks)
    text = out.read_text()
    memory = text[text.index("<h3>Memory at the peak") :]
    assert memory[: memory.index("</figure>")].count('class="bar"') == 2  # the peak is kept
    phases = text[text.index("<h3>Time of a step") :]
    phases = phases[: phases.index("</figure>")]
    assert re.findall(r'title="(.*?)"', phases) == ["forward: 500 ms", "data: 1,250 ms"] * 2


def make_samples(run, steps, prompts=2):
    """Answers of evaluations after these steps; those of the last one are right."""
    (run.path / "samples.jsonl").write_text("")
    for step in steps:
        for number in range(prompts):
            right = step == steps[-1]
            sample = {"step": step, "set": "validation", "prompt": f"{number} + 1 = "}
            sample |= {"reference": f"{number + 1}", "answer": f"{number + 1}" if right else "<b>"}
            append_line(run.path / "samples.jsonl", sample | {"exact_match": float(right)})


def shown_answers(browser):
    """Return the texts of the answers in a page: prompt, then names with texts, then scores."""
    return browser.evaluate(
        """[...document.querySelectorAll(".answers article")].map(article => [
            article.querySelector("q").textContent,
            ...[...article.querySelectorAll("div span")].map(
                part => [part.firstChild.textContent, part.lastChild.textContent]),
            article.lastElementChild.textContent])"""
    )


def test_answers_before_and_after_training_are_beside_each_other(tmp_path, browser):
    run, out = make_run(tmp_path / "run", 10), tmp_path / "report.html"
    make_samples(run, [0, 5, 10], prompts=12)
    assert main.main(["report", str(run.path), f"out={out}"]) == 0
    browser.open(out, width=390)
    first, second, *others = shown_answers(browser)
    texts = [["reference", "1"], ["before training", "<b>"], ["after step 10", "1"]]
    assert first == ["0 + 1 = ", *texts, "exact_match 0 → 1"]
    assert second[0] == "1 + 1 = "
    assert len(others) == 6
    assert "8 of 12; all are in samples.jsonl" in out.read_text()
    assert browser.evaluate(NO_HORIZONTAL_SCROLL)


def test_answers_of_one_evaluation(tmp_path, browser):
    run, out = make_run(tmp_path / "run", 10), tmp_path / "report.html"
    make_samples(run, [10])
    assert main.main(["report", str(run.path), f"out={out}"]) == 0
    browser.open(out, width=1280)
    first, _ = shown_answers(browser)
    assert first == ["0 + 1 = ", ["reference", "1"], ["after step 10", "1"], "exact_match 1"]


def test_a_plan_says_first_whether_it_fits(tmp_path, browser):
    plan, out = as_json(RECIPE, example_plan(), None), tmp_path / "plan.html"
    expected = {
        (4 << 30) - (1 << 28): ("good", "fits, 3.8 GiB to spare"),
        -(3 << 30): ("bad", "does not fit, needs 3.0 GiB more"),
    }
    for spare, verdict in expected.items():
        write_plan(plan | {"spare": spare}, out)
        browser.open(out, width=390)
        card = "document.querySelector('h1 + .cards div')"
        found = browser.evaluate(f"[...{card}.children].map(e => [e.className, e.textContent])")
        assert found[0] == ["", "memory of a GPU"]
        assert tuple(found[1]) == verdict
    write_plan(plan | {"spare": None}, out)
    assert "to spare" not in out.read_text().partition("<figure")[0]


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
    torn.metrics.write_text(torn.metrics.read_text().replace("step_seconds", "other"))
    with torn.metrics.open("a") as stream:
        stream.write('{"step": 21, "lo')
    out = tmp_path / "report.html"
    assert main.main(["report", str(tmp_path / "runs"), f"out={out}"]) == 0
    (points,) = curves(embedded(out)["Loss"]).values()
    assert points[-1][0] == 20
    text = out.read_text()
    assert "No values in metrics.jsonl: Retried allocations, Seconds per step." in text
    assert "unknown key; did you mean name?" in text


def test_recipe_that_is_a_pipe_does_not_block(tmp_path):
    run, out = make_run(tmp_path / "run", 3), tmp_path / "report.html"
    (run.path / "recipe.yaml").unlink()
    os.mkfifo(run.path / "recipe.yaml")
    assert main.main(["report", str(run.path), f"out={out}"]) == 0
    assert "recipe.yaml cannot be read: not a regular file" in out.read_text()


def test_unwritable_page_is_an_error(tmp_path, capsys):
    run, file = make_run(tmp_path / "run", 3), tmp_path / "no/r.html"
    file.parent.write_text("")
    assert main.main(["report", str(run.path), f"out={file}"]) == 2
    assert "cannot be made or written to: a part of it is a file" in capsys.readouterr().err
