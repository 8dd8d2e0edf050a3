"""Writes cards of model types: what a small model of each type does in real runs on this machine.

    python benchmarks/cards.py [TYPE ...]     # without a type: all of transformers', for hours

Each type of transformers gets a small model with random weights. `launcher/train.py` trains it with FSDP
on two ranks, and transformers' model in a plain loop (`tests/distributed/plain_loop.py`) is the
reference. The results go to benchmarks/cards.json, and `python -m docs.cards_page` makes the page.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES  # noqa: E402

from launcher.models.build import make_config  # noqa: E402
from launcher.recipe.schema import Model  # noqa: E402
from tests.distributed import gemma_worker, plain_loop  # noqa: E402
from tests.distributed.families_worker import OTHERS, TYPES  # noqa: E402
from tests.distributed.launching import forked  # noqa: E402
from tests.run_files import write_lines  # noqa: E402
from tests.unit.models.image_text_types import small_config  # noqa: E402
from tests.unit.models.recurrent_families import FAMILIES  # noqa: E402

TRAIN = REPOSITORY / "launcher/train.py"
FILE = Path(__file__).with_name("cards.json")
RANKS = 2
VOCABULARY = 264
"""Of the tokenizer `bytes`, rounded up."""
LONG = 512
"""Tokens of a long row, of a model whose window or chunk is 16."""
MOST_PARAMETERS = 60_000_000
WHOLE: dict[str, dict[str, Any]] = FAMILIES | {"gemma3n_text": gemma_worker.MODELS["gemma3n_text"]}
"""Whole configs, of types whose small config fails."""
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "glm5_next": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_layers": ["global", "local"]},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
}
"""What the small config of a type needs besides OTHERS."""
TOLERANCE = 1e-5
"""Largest relative difference of a loss, unless transformers' own loop in float32 is farther from the same
loop in float64."""
NOT_RUN, PASS, FAIL = "not run", "PASS", "FAIL"
RECIPE = """
run: {name: card, seed: 3}
model: {path: FOLDER/source, compile: false}
data: {kind: tokens, train: [FOLDER/train.jsonl], sequence_length: 24, packing: false, shuffle: false, workers: 0,
  validation: [FOLDER/valid.jsonl], cache: FOLDER/cache}
batch: {global_batch_size: 4, micro_batch_size: 1}
strategy: {kind: fsdp, mixed_precision: null}
optimizer: {learning_rate: 1.0e-3, weight_decay: 0.0, max_grad_norm: 1.0}
schedule: {kind: constant, warmup_steps: 0}
evaluation: {every_steps: null}
checkpoint: {every_steps: null, export: at_end}
logging: {every_steps: 1}
"""


class NotRunError(Exception):
    """A check that this type does not have, or that the launcher refuses by name."""


@dataclass(frozen=True)
class Result:
    """What a check found. difference: largest relative difference from the reference, where there is one."""

    passed: bool
    difference: float | None = None
    more: str = ""

    def stored(self) -> dict[str, Any]:
        found: dict[str, Any] = {"result": PASS if self.passed else FAIL}
        if self.difference is not None:
            found["difference"] = float(f"{self.difference:.2g}")
        return found | ({"more": self.more} if self.more else {})


def config_of(model_type: str) -> dict[str, Any]:
    """The fields of a small config without dropout, for rows of LONG tokens of the tokenizer `bytes`."""
    fields = WHOLE.get(model_type)
    if fields is None:
        fields = small_config(model_type)
        fields |= OTHERS.get(model_type, {}) | MORE.get(model_type, {})
    return {"model_type": model_type} | _changed(fields)


def _changed(fields: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict):
            changed[key] = _changed(value)
        elif key in ("vocab_size", "vocab_size_per_layer_input"):
            changed[key] = VOCABULARY
        elif key in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
            changed[key] = LONG if isinstance(value, int) else value
        elif isinstance(value, float) and ("drop" in key or "pdrop" in key or "jitter" in key):
            changed[key] = 0.0
        else:
            changed[key] = value
    return changed


def model_class(model_type: str) -> Any:
    """The class of transformers that loads a type."""
    images = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM


def write_rows(file: Path, lengths: list[int], seed: int) -> None:
    draw = random.Random(seed)
    rows = [{"input_ids": [draw.randrange(3, 250) for _ in range(length)]} for length in lengths]
    write_lines(file, rows)


class Card:
    """The runs and checks of one model type. Each check is a method that returns a Result."""

    def __init__(self, model_type: str, folder: Path) -> None:
        """Raises NotRunError if there is no small model of the type."""
        self.folder, self.model_type = folder, model_type
        self.load = model_class(model_type).from_pretrained
        draw = random.Random(1)
        write_rows(folder / "train.jsonl", [draw.randint(9, 24) for _ in range(80)], 1)
        write_rows(folder / "valid.jsonl", [draw.randint(9, 24) for _ in range(8)], 2)
        write_rows(folder / "packed.jsonl", [12] * 48, 3)
        write_rows(folder / "long.jsonl", [LONG] * 6, 4)
        pairs = [
            {"prompt": f"{a} + {b} = ", "response": f"{a + b}"} for a in range(8) for b in (1, 7)
        ]
        write_lines(folder / "pairs.jsonl", pairs)
        (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
        self._save_source()

    def _save_source(self) -> None:
        """A checkpoint in which no weight has its initial value."""
        torch.manual_seed(1)
        try:
            fields = config_of(self.model_type)
            model = model_class(self.model_type).from_config(
                make_config(Model(config=fields), None)
            )
            count = sum(parameter.numel() for parameter in model.parameters())
            if count > MOST_PARAMETERS:
                raise ValueError(f"{count:,} parameters")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            model.save_pretrained(self.folder / "source")
            self.reference("train.jsonl", steps=1, batch=4, dtype=torch.float32)
            self.loss_of(self.folder / "source")
        except Exception as error:
            raise NotRunError(f"no small model: {_first_line(error)}") from None

    def train(self, name: str, *overrides: str) -> Path:
        """Trains on two ranks; returns the run folder. Raises NotRunError if the recipe is refused."""
        out = self.folder / name
        words = [f"recipe={self.folder}/recipe.yaml", f"run.dir={out}", *overrides]
        result = forked(TRAIN, *words, ranks=RANKS, timeout=120)
        if result.status == 2:
            raise NotRunError(_refusal(result.output))
        result.check()
        return out

    def reference(
        self, file: str, *, steps: int, batch: int, dtype: torch.dtype, rotate: int = 0
    ) -> list[float]:
        """Losses of transformers' model in a plain loop. rotate: places by which the rows of a batch are
        moved in it, which changes nothing but rounding."""
        rows = plain_loop.read_rows(self.folder / file)
        places = [i // batch * batch + (i + rotate) % batch for i in range(len(rows))]
        losses: list[float] = plain_loop.train(
            self.load(self.folder / "source", dtype=dtype),
            [rows[place] for place in places],
            steps=steps,
            batch=batch,
            learning_rate=1e-3,
            warmup=0,
            min_ratio=1.0,
            weight_decay=0.0,
        )[0]
        return losses

    def compared(self, run: Path, rows: str, *, batch: int, more: str = "") -> Result:
        """The losses of a run beside those of the plain loop."""
        losses = values(run, "loss")
        options = {"steps": len(losses), "batch": batch}
        plain = self.reference(rows, dtype=torch.float32, **options)
        difference = largest(losses, plain)
        if difference > TOLERANCE:  # or do both of them round?
            rotated = self.reference(rows, dtype=torch.float32, rotate=1, **options)
            try:
                exact = self.reference(rows, dtype=torch.float64, **options)
            except RuntimeError:  # grouped products of experts have no float64
                exact = plain
            own, theirs = largest(losses, exact), max(largest(p, exact) for p in (plain, rotated))
            more += f" (from float64 {own:.1e}, transformers' loop in float32 {theirs:.1e})"
            near = math.isfinite(own) and own <= max(TOLERANCE, 2 * theirs)
            return Result(near, difference, more.strip())
        return Result(True, difference, more)

    # The checks

    def weights(self) -> Result:
        """A step with a learning rate of zero: the export has the bits of the source."""
        out = self.train(
            "untrained", "run.max_steps=1", "optimizer.learning_rate=0", "evaluation.at_start=true"
        )
        source, export = read_tensors(self.folder / "source"), read_tensors(out / "hf")
        if source.keys() != export.keys():
            return Result(False, more=f"other names: {sorted(source.keys() ^ export.keys())[:3]}")
        other = [n for n in source if not torch.equal(source[n], export[n])]
        return Result(
            not other, more=f"other bits: {other[:3]}" if other else f"{len(source)} tensors"
        )

    def forward(self) -> Result:
        """The loss of the validation rows before the first step."""
        evaluated = values(self.folder / "untrained", "eval_loss")[0]
        return Result(*within(evaluated, self.loss_of(self.folder / "source")))

    def loss_of(self, folder: Path, *, adapter: Path | None = None) -> float:
        """The loss of the validation rows by transformers."""
        model = self.load(folder, dtype=torch.float32)
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter)
        with torch.no_grad():
            rows = plain_loop.read_rows(self.folder / "valid.jsonl")
            return float(plain_loop.mean_loss(model.eval(), rows))

    def losses(self) -> Result:
        out = self.train(
            "trained",
            "run.max_steps=20",
            "checkpoint={every_steps: 10, keep_last: 9, export: at_end}",
        )
        found = values(out, "loss")
        return self.compared(out, "train.jsonl", batch=4, more=f"{found[0]:.6f} to {found[-1]:.6f}")

    def export(self) -> Result:
        """transformers loads the exported folder, and finds the loss that the run evaluated at its end."""
        out = self.folder / "trained"
        return Result(*within(values(out, "eval_loss")[-1], self.loss_of(out / "hf")))

    def resume(self) -> Result:
        """Steps 11 to 20 again, from the checkpoint of step 10."""
        whole, out = self.folder / "trained", self.folder / "resumed"
        values(whole, "eval_loss")
        self.train(
            "resumed", "run.max_steps=20", f"checkpoint.resume={whole}/checkpoints/step_00000010"
        )
        same = values(out, "loss")[-10:] == values(whole, "loss")[10:]
        one, two = read_tensors(whole / "hf"), read_tensors(out / "hf")
        same_weights = all(torch.equal(one[name], two[name]) for name in one)
        return Result(same and same_weights, more="" if same else "other losses")

    def packed(self) -> Result:
        """Two documents in each sequence."""
        out = self.train(
            "packed",
            "run.max_steps=6",
            "data.packing=true",
            f"data.train=[{self.folder}/packed.jsonl]",
        )
        return self.compared(out, "packed.jsonl", batch=8)

    def long_rows(self) -> Result:
        words = [f"data.sequence_length={LONG}", "batch.global_batch_size=2", "run.max_steps=3"]
        out = self.train("long", *words, f"data.train=[{self.folder}/long.jsonl]")
        return self.compared(out, "long.jsonl", batch=2)

    def lora(self) -> Result:
        """peft loads the adapters, and finds the loss that the run evaluated at its end."""
        words = ["run.max_steps=6", "lora={rank: 4, alpha: 8}", "optimizer.learning_rate=1e-2"]
        out = self.train("adapted", *words)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = self.loss_of(self.folder / "source", adapter=out / "hf")
        if any("missing adapter keys" in str(warning.message) for warning in caught):
            self._check_peft(out / "hf")
        first, last = values(out, "loss")[0], values(out, "loss")[-1]
        return Result(*within(values(out, "eval_loss")[-1], found), f"{first:.6f} to {last:.6f}")

    def _check_peft(self, adapter: Path) -> None:
        """Raises NotRunError if peft does not read its own file of these adapters, either."""
        from peft import LoraConfig, PeftModel, get_peft_model

        targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
        base = self.load(self.folder / "source", dtype=torch.float32)
        get_peft_model(base, LoraConfig(r=4, target_modules=targets)).save_pretrained(
            self.folder / "of_peft"
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            PeftModel.from_pretrained(
                self.load(self.folder / "source", dtype=torch.float32), self.folder / "of_peft"
            )
        if any("missing adapter keys" in str(warning.message) for warning in caught):
            raise NotRunError("peft does not read the adapters of this type that it wrote itself")

    def answers(self) -> Result:
        """The answers of the last evaluation are those that transformers generates from the export."""
        words = [
            "data.kind=instruct",
            f"data.train=[{self.folder}/pairs.jsonl]",
            "data.prompt_format=text",
        ]
        words += [f"data.validation=[{self.folder}/pairs.jsonl]", "data.tokenizer=bytes"]
        words += ["evaluation.generate={prompts: 4, max_new_tokens: 8}", "run.max_steps=8"]
        out = self.train(
            "answers", *words, "data.sequence_length=48", "optimizer.learning_rate=1e-2"
        )
        samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        tokenizer = transformers.AutoTokenizer.from_pretrained(out / "hf")
        model = self.load(out / "hf", dtype=torch.float32).eval()
        theirs = []
        for sample in samples:
            ids = torch.tensor([tokenizer(sample["prompt"], add_special_tokens=False)["input_ids"]])
            options = {
                "attention_mask": torch.ones_like(ids),
                "max_new_tokens": 8,
                "do_sample": False,
            }
            with torch.no_grad():
                made = model.generate(input_ids=ids, pad_token_id=tokenizer.pad_token_id, **options)
            theirs.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
        ours = [sample["answer"] for sample in samples]
        return Result(
            ours == theirs and len(ours) > 0, more="" if ours == theirs else f"{ours} != {theirs}"
        )

    def divided(self, key: str) -> Result:
        """The losses of a model that the two ranks divide."""
        out = self.train(
            key, "run.max_steps=4", f"strategy.{key}_parallel_size=2", "checkpoint.export=null"
        )
        return self.compared(out, "train.jsonl", batch=4)


CHECKS: dict[str, Callable[[Card], Result]] = {
    "weights": Card.weights,
    "forward": Card.forward,
    "losses": Card.losses,
    "export": Card.export,
    "resume": Card.resume,
    "packed": Card.packed,
    "long rows": Card.long_rows,
    "LoRA": Card.lora,
    "answers": Card.answers,
    "tensor": lambda card: card.divided("tensor"),
    "context": lambda card: card.divided("context"),
    "pipeline": lambda card: card.divided("pipeline"),
    "expert": lambda card: card.divided("expert"),
}
"""In this order: `forward` reads the run of `weights`, `export` and `resume` that of `losses`."""


def values(run: Path, key: str) -> list[float]:
    """The values of a metric in the order of metrics.jsonl. Raises NotRunError if there are none."""
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = [line[key] for line in lines if key in line]
    if not found:
        raise NotRunError(f"needs the run of `{run.name}`")
    return found


def within(one: float, other: float) -> tuple[bool, float]:
    difference = largest([one], [other])
    return difference <= TOLERANCE, difference


def largest(found: list[float], expected: list[float]) -> float:
    """The largest relative difference; infinite if a value is not finite or the counts differ."""
    if len(found) != len(expected) or not all(map(math.isfinite, (*found, *expected))):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _refusal(output: str) -> str:
    """The problem that a run ended with."""
    lines = [line.strip() for line in output.splitlines()]
    problems = [line for line in lines if "Error" in line or line.startswith("- ")] or lines[-1:]
    return problems[0].removeprefix("- ")[:300]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[
        :200
    ]


def card(model_type: str) -> dict[str, Any]:
    """All checks of a type."""
    with tempfile.TemporaryDirectory(prefix="card_") as temporary:
        try:
            made = Card(model_type, Path(temporary))
        except NotRunError as error:
            return {"checks": {}, "why": str(error)}
        checks = {}
        for name, check in CHECKS.items():
            try:
                checks[name] = check(made).stored()
            except NotRunError as error:
                if not checks:
                    return {"checks": {}, "why": f"refused: {error}"}
                checks[name] = {"result": NOT_RUN, "more": str(error)}
            except Exception as error:
                print(traceback.format_exc(limit=-3)[-3000:], file=sys.stderr)
                checks[name] = {"result": FAIL, "more": _first_line(error)}
            gc.collect()
        return {"checks": checks}


def environment() -> dict[str, str]:
    """When and with what cards are made: by the code that is loaded now."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit.stdout.strip(),
        "device": f"{RANKS} ranks on a CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def as_text(cards: dict[str, dict[str, Any]]) -> str:
    """JSON with a type in each line."""
    lines = (
        f" {json.dumps(name)}: {json.dumps(card, ensure_ascii=False, separators=(',', ':'))}"
        for name, card in sorted(cards.items())
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(types: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    made_with = environment()
    for model_type in types or TYPES:
        begun = time.monotonic()
        made = made_with | card(model_type)
        with open(
            Path(tempfile.gettempdir()) / "cards.lock", "w"
        ) as lock:  # another process may make other cards
            fcntl.flock(lock, fcntl.LOCK_EX)
            cards = json.loads(FILE.read_text()) if FILE.exists() else {}
            cards[model_type] = made
            FILE.write_text(as_text(cards))
        found = {name: each["result"] for name, each in made["checks"].items()}
        print(f"{model_type}, {time.monotonic() - begun:.0f} s: {found or made['why']}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("types", nargs="*", metavar="TYPE")
    main(parser.parse_args().types)
