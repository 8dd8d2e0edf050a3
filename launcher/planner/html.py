"""The plan as a page to look at: one HTML file that needs no network, in light and in dark, and says all without its script.

The script adds what is under the pointer, and copies overrides.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import RecipeError
from launcher.metrics.console import bytes_as_text
from launcher.planner.components import Moment
from launcher.planner.formatting import (
    EXPLAINED,
    NAMES,
    as_written,
    batch_in_words,
    disagreement,
    is_best,
    machine_in_words,
    micro_batches,
    nothing_fits,
    parts,
    rungs_of,
    strategy_in_words,
    where,
)
from launcher.planner.plan import Plan
from launcher.recipe.hub import model_folder
from launcher.recipe.schema import Recipe

if TYPE_CHECKING:
    from launcher.planner.search import Ladder, Rung

_COLOURS = {
    "parameters": ("#2f6fb5", "#5a9be0"),
    "gradients": ("#2a9aa8", "#4fc0cc"),
    "optimizer": ("#7a9fd0", "#3d62a0"),
    "gathered": ("#8a5cc2", "#a983e0"),
    "activations": ("#e3a21a", "#e8b64a"),
    "logits": ("#d1503f", "#e8705f"),
    "communication": ("#4f9d4f", "#6dbd6d"),
    "temporary": ("#c76a9f", "#dd8cbb"),
    "context": ("#8b8f98", "#7a7f8a"),
    "margin": ("#c3c6cc", "#4c515c"),
}
"""In light and in dark."""

_HEIGHT = 260.0


def render_page(recipe: Recipe, plan: Plan, ladder: Ladder | None) -> str:
    """The page of a plan, and of its ladder where one was made (None: it was not)."""
    rungs = [] if ladder is None else rungs_of(ladder)
    colours = [
        "".join(f"--{name}:{pair[dark]};" for name, pair in _COLOURS.items()) for dark in (0, 1)
    ]  # in the order of the style sheet's two themes
    body = "\n".join(
        [
            *_head(recipe, plan),
            *_bars(recipe, plan, ladder, rungs),
            *_timeline(recipe, plan),
            *(_ladder(ladder, rungs) if ladder is not None else ()),
            *_formulas(recipe, plan),
            *_notes(plan),
        ]
    )
    title = escape(f"{recipe.run.name}: memory plan")
    style = _STYLE.replace("LIGHT_COLOURS", colours[0]).replace("DARK_COLOURS", colours[1])
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{style}</style></head>\n<body><main>\n{body}\n</main>\n"
        f'<div id="tip" hidden></div>\n<script type="application/json" id="moments">{_data(recipe, plan)}</script>\n'
        f"<script>{_SCRIPT}</script>\n</body></html>\n"
    )


def _data(recipe: Recipe, plan: Plan) -> str:
    """What the script shows of each moment: where it is, and its bytes by name."""
    passes = micro_batches(recipe, plan.machine.ranks)
    moments = [{"where": where(moment, micro_batches=passes), "parts": parts(plan, moment.components)} for moment in plan.step.timeline]
    return json.dumps({"names": NAMES, "moments": moments}).replace("<", "\\u003c")


def _head(recipe: Recipe, plan: Plan) -> Iterator[str]:
    yield f"<h1>{escape(recipe.run.name)} <span>on {escape(machine_in_words(plan.machine))}</span></h1>"
    yield f'<p class="lead">{escape(strategy_in_words(recipe))}<br>{escape(batch_in_words(recipe, plan.machine.ranks))}</p>'
    verdict = {True: ("yes", "fits"), False: ("no", "does not fit"), None: ("unknown", "no verdict")}[plan.fits]
    spare = plan.spare
    if spare is None:
        room = "memory of the device not known"
    else:
        room = f"{bytes_as_text(abs(spare))} {'to spare' if spare >= 0 else 'too much'}"
    device = "GPU" if plan.machine.device == "cuda" else "rank"
    host = bytes_as_text(plan.host.total)
    if plan.host_spare is not None:
        host += f"<small>{bytes_as_text(abs(plan.host_spare))} {'to spare' if plan.host_spare >= 0 else 'too much'}</small>"
    disk = bytes_as_text(plan.checkpoint_bytes) + (f"<small>{plan.checkpoints} at once</small>" if plan.checkpoints else "")
    at = escape(where(plan.step.peak, micro_batches=micro_batches(recipe, plan.machine.ranks)))
    yield '<div class="cards">'
    yield f'<div class="card {verdict[0]}"><b>{verdict[1]}</b><small>{room}</small></div>'
    yield f'<div class="card"><i>one {device} needs</i><b>{bytes_as_text(plan.needed)}</b><small>most {at}</small></div>'
    yield f'<div class="card"><i>host memory a node</i><b>{host}</b></div>'
    yield f'<div class="card"><i>a checkpoint on disk</i><b>{disk}</b></div></div>'


def _legend() -> str:
    items = "".join(
        f'<span title="{escape(EXPLAINED[name])}"><i style="background:var(--{name})"></i>{escape(text)}</span>'
        for name, text in NAMES.items()
    )
    return f'<p class="legend">{items}</p>'


def _bars(recipe: Recipe, plan: Plan, ladder: Ladder | None, rungs: Sequence[Rung]) -> Iterator[str]:
    """One bar for each rung, or one for the recipe alone."""
    rows = [(_label(rung, ladder), rung.plan) for rung in rungs if ladder is not None] or [(escape(strategy_in_words(recipe)), plan)]
    memory = plan.machine.memory
    scale = max([memory or 0, *(row_plan.needed for _, row_plan in rows)]) * 1.02
    yield "<section><h2>What one device holds at the peak</h2>" + _legend() + '<div class="bars">'
    for label, row in rows:
        pieces = "".join(
            f'<i style="width:{100 * amount / scale:.3f}%;background:var(--{name})" data-tip="{escape(NAMES[name])}: '
            f'{bytes_as_text(amount)}" title="{escape(NAMES[name])}: {bytes_as_text(amount)}"></i>'
            for name, amount in parts(row).items()
            if amount
        )
        line = "" if memory is None else f'<u style="left:{100 * memory / scale:.3f}%"></u>'
        over = " over" if row.fits is False else ""
        yield f'<div class="label">{label}</div><div class="bar{over}">{pieces}{line}</div>'
        yield f'<div class="sum{over}">{bytes_as_text(row.needed)}</div>'
    if memory is not None:
        at = f"left:{100 * memory / scale:.3f}%"
        yield f'<div></div><div class="scale"><span style="{at}">{bytes_as_text(memory)}</span></div><div></div>'
    yield "</div></section>"


def _marks(rung: Rung, ladder: Ladder) -> str:
    marks = '<em class="best">fastest that fits</em>' if is_best(rung, ladder) else ""
    if rung.plan.fits is False:
        marks += '<em class="bad">does not fit</em>'
    return marks + ('<em class="own">as written</em>' if as_written(rung, ladder) else "")


def _micro(recipe: Recipe) -> str:
    batch = recipe.batch
    return f"{batch.micro_batch_tokens:,} tokens" if batch.micro_batch_size is None else f"{batch.micro_batch_size:,}"


def _label(rung: Rung, ladder: Ladder) -> str:
    return f"{escape(strategy_in_words(rung.recipe))}, micro-batch {_micro(rung.recipe)} {_marks(rung, ladder)}"


def _timeline(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Stacked areas: a column for each moment of a step, in order; its width says nothing about time."""
    moments = plan.step.timeline
    if not moments:
        return
    memory = plan.machine.memory
    columns = [parts(plan, moment.components) for moment in moments]
    top = max([memory or 0, plan.needed, *(sum(column.values()) for column in columns)]) * 1.04
    count = len(moments)
    paths, below = [], [0.0] * count
    for name in NAMES:
        above = [low + column[name] for low, column in zip(below, columns, strict=True)]
        if above != below:
            upper = " ".join(_step(index, value, top) for index, value in enumerate(above))
            lower = " ".join(_step(index, value, top, backwards=True) for index, value in reversed(list(enumerate(below))))
            paths.append(f'<path d="M{upper} L{lower} Z" style="fill:var(--{name})"/>')
        below = above
    bands, words = [], []
    for start, end, phase, number in _stretches(moments):
        left, width = 100 * start / count, 100 * (end - start) / count
        bands.append(f'<rect x="{start}" y="0" width="{end - start}" height="{_HEIGHT:.0f}" class="band {phase}"/>')
        name = f"{phase} {number + 1}" if phase != "optimizer" else phase
        if width >= 7 or (phase == "optimizer" and width >= 4):
            words.append(f'<span style="left:{left:.3f}%;width:{width:.3f}%">{name}</span>')
    highest = max(range(count), key=lambda index: sum(columns[index].values()))
    axis, tick = [], _tick(top)
    amount = 0.0
    while amount < top:
        axis.append(f'<span style="bottom:{100 * amount / top:.3f}%">{bytes_as_text(amount) if amount else "0"}</span>')
        amount += tick
    line = ""
    if memory is not None:
        below_it = ' class="under"' if memory > 0.9 * top else ""
        name = f"{escape(plan.machine.name)} {bytes_as_text(memory)}"
        line = f'<div class="limit" style="bottom:{100 * memory / top:.3f}%"><span{below_it}>{name}</span></div>'
    peak = f'<div class="peak" style="left:{100 * (highest + 0.5) / count:.3f}%;bottom:{100 * below[highest] / top:.3f}%"></div>'
    yield "<section><h2>A step, from its first forward pass to the optimizer</h2>"
    how = "A trace of the step" if plan.step.method == "traced" else "By closed formulas"
    yield (
        f'<p class="dim">{how}: the highest moment of each module, in order; widths are not times. '
        "The circle is the highest of all. Driver, libraries and margin are included.</p>"
    )
    yield f'<div class="chart"><div class="axis">{"".join(axis)}</div><div class="plot" id="plot">'
    yield f'<svg viewBox="0 0 {count} {_HEIGHT:.0f}" preserveAspectRatio="none" role="img" aria-label="memory over a step">'
    yield f'{"".join(bands)}{"".join(paths)}<rect id="cursor" y="0" width="1" height="{_HEIGHT:.0f}" visibility="hidden"/></svg>'
    yield f'{line}{peak}</div><div></div><div class="phases">{"".join(words)}</div></div></section>'


def _step(index: int, value: float, top: float, *, backwards: bool = False) -> str:
    height = _HEIGHT * (1 - value / top)
    first, second = (index + 1, index) if backwards else (index, index + 1)
    return f"{first},{height:.2f} {second},{height:.2f}"


def _tick(top: float) -> float:
    """The round number of bytes that divides an axis into at most six."""
    tick = 1.0
    while top / tick > 6:
        tick *= 2
    return tick


def _stretches(moments: Sequence[Moment]) -> Iterator[tuple[int, int, str, int]]:
    """(first, one past the last, phase, micro-batch) of each run of moments of the same pass."""
    start = 0
    for index in range(1, len(moments) + 1):
        before = moments[start]
        if index == len(moments) or (moments[index].phase, moments[index].micro_batch) != (before.phase, before.micro_batch):
            yield start, index, before.phase, before.micro_batch
            start = index


def _ladder(ladder: Ladder, rungs: Sequence[Rung]) -> Iterator[str]:
    fastest = ladder.best.tokens_per_second if ladder.best is not None else max(rung.tokens_per_second for rung in rungs)
    yield "<section><h2>The ladder</h2>"
    yield f'<p class="dim">{ladder.considered:,} ways considered; these are worth a look. Speed is predicted.</p>'
    if nothing_fits(ladder):
        yield '<p class="nothing">Nothing fits.' + (" What would:" if ladder.remedies else "") + "</p>"
        yield "<ul>" + "".join(f"<li>{escape(remedy)}</li>" for remedy in ladder.remedies) + "</ul>"
    yield '<div class="scroll"><table><tr><th></th><th>strategy</th><th>micro-batch</th><th>peak</th><th>host</th><th>tokens/s</th>'
    yield "<th>speed</th><th>overrides</th></tr>"
    for number, rung in enumerate(rungs, start=1):
        text = " ".join(shlex.quote(override) for override in rung.overrides)
        copy = f'<code>{escape(text)}</code> <button data-copy="{escape(text)}">copy</button>' if text else '<span class="dim">none</span>'
        row = "best" if is_best(rung, ladder) else "bad" if rung.plan.fits is False else ""
        yield (
            f'<tr class="{row}"><td>{number}</td><td>{escape(strategy_in_words(rung.recipe))} {_marks(rung, ladder)}</td>'
            f'<td class="number">{_micro(rung.recipe)}</td><td class="number">{bytes_as_text(rung.plan.needed)}</td>'
            f'<td class="number">{bytes_as_text(rung.plan.host.total)}</td>'
            f"<td>{rung.tokens_per_second:,.0f}</td><td>{rung.tokens_per_second / fastest:.0%}</td><td>{copy}</td></tr>"
        )
    yield "</table></div></section>"


def model_shape(recipe: Recipe) -> dict[str, int]:
    """hidden, layers, vocabulary: as far as the model's config says them."""
    config: dict[str, Any] = recipe.model.config or {}
    if recipe.model.path is not None:
        try:
            file = model_folder(recipe.model.path, key="model.path", weights=False) / "config.json"
            config = json.loads(Path(file).read_text(encoding="utf-8"))
        except (RecipeError, OSError, ValueError):
            return {}
    config = config.get("text_config") or config
    names = {"hidden": ("hidden_size", "n_embd", "d_model"), "layers": ("num_hidden_layers", "n_layer"), "vocabulary": ("vocab_size",)}
    found = {what: next((config[key] for key in keys if isinstance(config.get(key), int)), None) for what, keys in names.items()}
    return {what: value for what, value in found.items() if value is not None}


def formulas(recipe: Recipe, plan: Plan) -> list[tuple[str, str, int, int, str]]:
    """The formulas people know beside the plan: (formula, with this recipe's numbers, its bytes, the plan's, what it leaves out).

    A formula is left out where this recipe is none of its cases, or the model's config does not say what it needs.
    """
    found = []
    step, strategy, shape = plan.step, recipe.strategy, model_shape(recipe)
    shards = 1 if strategy.kind == "ddp" else plan.machine.ranks // strategy.replicate
    if strategy.cpu_offload is None and recipe.lora is None and recipe.model.freeze is None:
        number = step.held.parameters * shards / 4
        at_peak = step.peak.components
        found.append(
            (
                "16 bytes a parameter over the ranks that shard it (AdamW: weight, gradient and two moments, 4 bytes each)",
                f"16 x {number / 1e9:.3g} billion / {shards}",
                int(16 * number / shards),
                at_peak.parameters + at_peak.gradients + at_peak.optimizer,
                "gathered weights, activations, logits: all that grows with the batch; buckets of ddp",
            )
        )
    rows = recipe.batch.micro_batch_size
    tokens = rows * recipe.data.sequence_length if isinstance(rows, int) else recipe.batch.micro_batch_tokens
    checkpointing = recipe.activation_checkpointing
    if tokens and "hidden" in shape and "layers" in shape:
        whole = checkpointing is not None and checkpointing.mode == "full" and checkpointing.every_n_blocks == 1
        if checkpointing is None or (whole and not checkpointing.offload_to_cpu):
            factor = 34 if checkpointing is None else 2
            text = (
                "34 bytes a token, layer and unit of width"
                if factor == 34
                else "2 bytes a token, layer and unit of width, with checkpoints"
            )
            found.append(
                (
                    f"{text} (Korthikanti et al., 2022, attention's scores left out)",
                    f"{factor} x {tokens:,} tokens x {shape['layers']} layers x {shape['hidden']:,}",
                    factor * tokens * shape["layers"] * shape["hidden"],
                    step.after_forward.activations,
                    "gated MLPs, grouped heads, norms in float32; it was made for GPT in 16 bits with dropout",
                )
            )
    if tokens and "vocabulary" in shape and recipe.model.task == "causal_lm":
        found.append(
            (
                "10 bytes a token and word: logits in 16 bits, in float32, and their gradient",
                f"10 x {tokens:,} tokens x {shape['vocabulary']:,}",
                10 * tokens * shape["vocabulary"],
                max(moment.components.logits for moment in (*step.timeline, step.peak)),
                "how the loss is computed: in pieces it holds less, upcast twice it holds more",
            )
        )
    return found


def _formulas(recipe: Recipe, plan: Plan) -> Iterator[str]:
    rows = formulas(recipe, plan)
    if not rows:
        return
    yield "<section><h2>The formulas people know, and the plan</h2>"
    yield '<div class="scroll"><table><tr><th>formula</th><th>here</th><th>gives</th><th>plan</th><th>what it leaves out</th></tr>'
    for formula, here, says, planned, without in rows:
        yield (
            f'<tr><td>{escape(formula)}</td><td>{escape(here)}</td><td class="number">{bytes_as_text(says)}</td>'
            f'<td class="number">{bytes_as_text(planned)}</td><td class="dim">{escape(without)}</td></tr>'
        )
    yield "</table></div></section>"


def _notes(plan: Plan) -> Iterator[str]:
    notes = list(plan.notes)
    if plan.arithmetic is not None:
        traced, formula = plan.step.peak.components.total, plan.arithmetic.peak.components.total
        far = disagreement(plan) is not None
        words = "they disagree: allow for the larger" if far else "they agree within 10 %"
        notes.insert(0, f"Tensors at the peak: {bytes_as_text(traced)} by trace, {bytes_as_text(formula)} by closed formulas; {words}.")
    if notes:
        yield "<section><h2>Notes</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul></section>"


_STYLE = """
:root{color-scheme:light dark;--page:#fbfbfa;--ink:#1d2026;--dim:#6b7079;--line:#dcdee2;--panel:#fff;--good:#23803a;--bad:#c43224;
--own:#3a5fa8;LIGHT_COLOURS}
@media(prefers-color-scheme:dark){:root{--page:#14161a;--ink:#e8e9ec;--dim:#989da8;--line:#30343c;--panel:#1c1f25;--good:#56c274;
--bad:#ff7565;--own:#8fb0f0;DARK_COLOURS}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;line-height:1.25;margin:0 0 6px}h1 span{font-weight:400;color:var(--dim)}
h2{font-size:17px;margin:0 0 8px}
section{margin-top:34px}
.lead{margin:0 0 18px}.dim,small{color:var(--dim)}p.dim{margin:0 0 12px;font-size:13.5px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:12px}
.card{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.card b{display:block;font-size:21px;line-height:1.3}.card i{font-style:normal;color:var(--dim);font-size:13px}
.card small{display:block;font-size:13px;font-weight:400;line-height:1.4;overflow-wrap:anywhere}
.card.yes b{color:var(--good)}.card.no b{color:var(--bad)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:0 0 14px;font-size:13px;color:var(--dim)}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
.bars{display:grid;grid-template-columns:minmax(150px,270px) 1fr 84px;gap:9px 14px;align-items:center}
.label{font-size:13.5px;line-height:1.35}.sum{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.sum.over{color:var(--bad)}
.bar{position:relative;display:flex;height:26px}.bar i{display:block;height:100%;min-width:1px}
.bar i:first-child{border-radius:3px 0 0 3px}
.bar u{position:absolute;top:-6px;bottom:-6px;width:0;border-left:2px dashed var(--ink);text-decoration:none;pointer-events:none}
.scale{position:relative;height:18px;font-size:12.5px;color:var(--dim)}
.scale span{position:absolute;transform:translateX(-100%);white-space:nowrap;padding-right:2px}
em{font-style:normal;font-size:11.5px;padding:1px 7px;border-radius:9px;border:1px solid currentColor;white-space:nowrap;margin-left:2px}
em.best{color:var(--good)}em.bad{color:var(--bad)}em.own{color:var(--own)}
.chart{display:grid;grid-template-columns:74px 1fr;gap:4px 8px}
.plot{position:relative;height:300px;border-left:1px solid var(--line);border-bottom:1px solid var(--line)}
.plot svg{position:absolute;inset:0;width:100%;height:100%}
.axis{position:relative}.axis span{position:absolute;right:0;transform:translateY(50%);font-size:12px;color:var(--dim);white-space:nowrap}
.band{fill:none}.band.backward{fill:var(--ink);opacity:.05}.band.optimizer{fill:var(--ink);opacity:.1}
#cursor{fill:var(--ink);opacity:.35}
.limit{position:absolute;left:0;right:0;border-top:2px dashed var(--ink);pointer-events:none}
.limit span{position:absolute;right:4px;bottom:3px;font-size:12.5px}.limit .under{bottom:auto;top:2px}
.peak{position:absolute;width:10px;height:10px;margin:0 0 -5px -5px;border:2px solid var(--ink);border-radius:50%;background:var(--page);
pointer-events:none}
.phases{position:relative;height:20px;font-size:12px;color:var(--dim)}
.phases span{position:absolute;text-align:center;white-space:nowrap;overflow:hidden}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13.5px}
th{text-align:left;font-weight:500;color:var(--dim);font-size:12.5px}th,td{padding:7px 12px 7px 0;border-bottom:1px solid var(--line);
vertical-align:top}td.number{white-space:nowrap;font-variant-numeric:tabular-nums}th{white-space:nowrap}
tr.best td{font-weight:600}tr.bad td{color:var(--dim)}
code{font:12.5px/1.5 ui-monospace,"SF Mono",Menlo,"DejaVu Sans Mono",monospace;font-weight:400;overflow-wrap:anywhere}
button{font:12px system-ui,sans-serif;color:var(--own);background:none;border:1px solid var(--line);border-radius:5px;padding:1px 8px;
cursor:pointer}button:hover{border-color:var(--own)}
@media(max-width:700px){.bars{grid-template-columns:1fr 84px}.label{grid-column:1/3;margin-bottom:-6px}.bar u{top:0;bottom:0}
.bars>div:empty{display:none}
table{min-width:880px}}
.nothing{color:var(--bad);font-weight:600;margin:0}
ul{margin:4px 0 12px;padding-left:20px}
#tip{position:fixed;z-index:2;pointer-events:none;background:var(--panel);border:1px solid var(--line);border-radius:7px;padding:8px 11px;
font-size:12.5px;line-height:1.5;box-shadow:0 4px 18px #0003;max-width:340px}
#tip b{display:block;overflow-wrap:anywhere}#tip div{display:flex;justify-content:space-between;gap:18px}
#tip div i{width:10px;height:10px;border-radius:2px;margin-right:6px;display:inline-block}
"""

_SCRIPT = """
const data=JSON.parse(document.getElementById('moments').textContent),tip=document.getElementById('tip');
const size=n=>{for(const u of ['bytes','KiB','MiB']){if(n<1024)return u=='bytes'?n+' bytes':n.toFixed(1)+' '+u;n/=1024}
return n.toFixed(1)+' GiB'};
const put=(e)=>{tip.hidden=false;const w=tip.offsetWidth,h=tip.offsetHeight;
tip.style.left=Math.max(4,e.clientX+16+w>innerWidth?e.clientX-w-16:e.clientX+16)+'px';
tip.style.top=Math.max(4,Math.min(e.clientY+12,innerHeight-h-4))+'px'};
const make=(tag)=>document.createElement(tag);
const row=(name,text,colour)=>{const d=make('div'),l=make('span'),r=make('span');
if(colour){const i=make('i');i.style.background='var(--'+colour+')';l.append(i)}l.append(name);r.textContent=text;d.append(l,r);return d};
const plot=document.getElementById('plot'),cursor=document.getElementById('cursor');
if(plot){plot.addEventListener('mousemove',e=>{const box=plot.getBoundingClientRect(),n=data.moments.length;
const k=Math.min(n-1,Math.max(0,Math.floor((e.clientX-box.left)/box.width*n))),m=data.moments[k];
cursor.setAttribute('x',k);cursor.setAttribute('visibility','visible');tip.replaceChildren();
const b=make('b');b.textContent=m.where;tip.append(b);let sum=0;
for(const [key,name] of Object.entries(data.names)){sum+=m.parts[key];if(m.parts[key])tip.append(row(name,size(m.parts[key]),key))}
tip.append(row('in all',size(sum)));put(e)});
plot.addEventListener('mouseleave',()=>{tip.hidden=true;cursor.setAttribute('visibility','hidden')})}
for(const i of document.querySelectorAll('[data-tip]')){i.removeAttribute('title');
i.addEventListener('mousemove',e=>{tip.textContent=i.dataset.tip;put(e)});i.addEventListener('mouseleave',()=>{tip.hidden=true})}
for(const b of document.querySelectorAll('[data-copy]'))b.addEventListener('click',async()=>{
try{await navigator.clipboard.writeText(b.dataset.copy)}catch{const t=make('textarea');t.value=b.dataset.copy;
document.body.append(t);t.select();document.execCommand('copy');t.remove()}
b.textContent='copied';setTimeout(()=>b.textContent='copy',1500)});
"""
