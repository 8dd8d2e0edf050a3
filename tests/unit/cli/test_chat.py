"""`launcher chat` with models of random weights: prompts, ends, turns, checkpoints and refusals."""

import io
import shutil
import sys

import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoModelForCausalLM, GenerationMixin

from launcher.cli.chat_model import ChatModel
from launcher.cli.main import main
from launcher.data.run_data import tokenizer_to_keep
from launcher.data.tokenizer import hugging_face_byte_tokenizer
from launcher.recipe.load import to_yaml
from launcher.recipe.schema import Data, Model
from tests.image_models import (
    FAMILIES,
    make_image,
    make_model,
    reference_processor,
    skip_without_packages,
)
from tests.reference_videos import inputs_of, reference_of, whole
from tests.unit.models.test_export import (
    create_checkpoint,
    export_model,
    load_with_adapters,
    model_with_seed,
    recipe_of,
)
from tests.unit.models.test_load import save
from tests.video_files import make_video

CHAT = ("data.kind=chat", "data.train=[chats.jsonl]", "data.tokenizer=bytes")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("llama"), vocab_size=260, max_position_embeddings=64)
    hugging_face_byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def talk(monkeypatch, capsys):
    """Returns a function that runs `launcher chat` with lines from a pipe."""

    def run(*words, lines, status=0):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        words = [str(word) for word in words]
        capsys.readouterr()
        assert main(["chat", "max_new_tokens=5", "temperature=0", *words]) == status
        return capsys.readouterr()

    return run


def greedy(model, text, count=5):
    """The most likely tokens after a text with special tokens, by whole forward passes."""
    tokenizer = hugging_face_byte_tokenizer()
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    new = []
    with torch.no_grad():
        for _ in range(count):
            token = int(model(input_ids=ids).logits[0, -1].argmax())
            if token == 256:  # <|end|>
                break
            new.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    return tokenizer.decode(new, skip_special_tokens=True)


def test_a_folder_answers_with_its_template_and_remembers_turns(pretrained, talk):
    model = AutoModelForCausalLM.from_pretrained(pretrained).eval()
    first = greedy(model, "<|user|>hi<|end|><|assistant|>")
    before = f"<|user|>hi<|end|><|assistant|>{first}<|end|>"
    second = greedy(model, f"{before}<|user|>more<|end|><|assistant|>")
    again = greedy(model, "<|user|>more<|end|><|assistant|>")
    assert len({first, second, again}) == 3
    printed = talk(pretrained, lines="hi\n\nmore\n/reset\nmore\n")
    assert printed.out == f"{first}\n{second}\n{again}\n"
    prompt = "'<|user|>LINE<|end|><|assistant|>'"
    assert printed.err == f"{pretrained}: each line is a turn of the chat template: {prompt}\n"


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        ((), "{}"),
        (
            (*CHAT, "data.system=Be brief"),
            "<|system|>Be brief<|end|><|user|>{}<|end|><|assistant|>",
        ),
    ],
)
def test_a_run_and_its_export_answer_alike(tmp_path, pretrained, talk, words, prompt):
    """A run on texts completed lines, and its export answered with the template of its tokenizer; the
    export had no system prompt."""
    recipe = recipe_of(f"model.path={pretrained}", "data.tokenizer=bytes", *words)
    run, export = tmp_path / "run", tmp_path / "exported/hf"
    model = model_with_seed(pretrained, 3)
    create_checkpoint(run, model, 10, recipe)
    tokenizer = tokenizer_to_keep(Data(tokenizer="bytes"), Model())
    export_model(model, export, tokenizer=tokenizer)
    (export.parent / "recipe.yaml").write_text(to_yaml(recipe))
    for folder in (run, export, export.parent):
        printed = talk(folder, lines="hi\n")
        assert printed.out == f"{greedy(model, prompt.format('hi'))}\n"
        shown = "no chat template" if prompt == "{}" else repr(prompt.format("LINE"))
        assert shown in printed.err


def test_checkpoints_of_a_run(tmp_path, pretrained, talk):
    """The newest one, or that of a step, with the run's system prompt."""
    recipe = recipe_of(f"model.path={pretrained}", *CHAT, "data.system=Be brief")
    answers = []
    for step in (10, 20):
        model = model_with_seed(pretrained, step)
        create_checkpoint(tmp_path, model, step, recipe)
        prompt = "<|system|>Be brief<|end|><|user|>hi<|end|><|assistant|>"
        answers.append(greedy(model, prompt))
    other = greedy(model, "<|system|>Sing<|end|><|user|>hi<|end|><|assistant|>")
    assert len({*answers, other}) == 3
    assert talk(tmp_path, lines="hi\n").out == f"{answers[1]}\n"
    assert talk(tmp_path, "step=10", lines="hi\n").out == f"{answers[0]}\n"
    assert talk(tmp_path, "system=Sing", lines="hi").out == f"{other}\n"
    missing = talk(tmp_path, "step=15", lines="hi", status=2).err
    assert missing.endswith("has no such checkpoint; there are those of steps 10, 20\n")
    for inside in ("hf", "checkpoints/step_00000010"):  # not the folder of the run
        missing = talk(tmp_path / inside, "step=10", lines="", status=2).err
        assert missing.endswith(
            f"no such checkpoint; give the folder of a run, such as {tmp_path}\n"
        )
    refused = talk(tmp_path, "system=a\udcff", lines="hi\n", status=2).err
    assert refused == "command line: system: holds bytes that are not UTF-8\n"


def test_a_run_on_text_completes_lines(tmp_path, pretrained, talk):
    """The tokenizer has a chat template, but the run did not train with it."""
    model = model_with_seed(pretrained, 3)
    recipe = recipe_of(f"model.path={pretrained}", "data.tokenizer=bytes")
    create_checkpoint(tmp_path, model, 10, recipe)
    printed = talk(tmp_path, lines="ab\nab\n")
    assert printed.out == 2 * f"{greedy(model, 'ab')}\n"
    assert "no chat template; each line is completed" in printed.err
    answer = greedy(model, "<|user|>ab<|end|><|assistant|>")
    assert talk(tmp_path, "--template", lines="ab\n").out == f"{answer}\n"
    refused = talk(tmp_path, "system=x", lines="ab\n", status=2)
    assert refused.err.endswith("command line: system: needs a chat template\n")


def test_an_adapter_answers(tmp_path, pretrained, talk):
    model = load_with_adapters(pretrained)
    tokenizer = tokenizer_to_keep(Data(tokenizer="bytes"), Model())
    folder = export_model(model, tmp_path / "hf", tokenizer=tokenizer)
    answer = greedy(model, "<|user|>hi<|end|><|assistant|>")
    assert answer != greedy(
        AutoModelForCausalLM.from_pretrained(pretrained), "<|user|>hi<|end|><|assistant|>"
    )
    for named in (folder, tmp_path):  # RUN_DIR/hf
        assert talk(named, lines="hi\n").out == f"{answer}\n"


def test_interrupt_stops_the_answer_and_not_the_chat(pretrained, talk, monkeypatch):
    answer, calls = ChatModel.answer, []

    def interrupted(self, messages, sampling, write):
        calls.append(messages)
        if len(calls) == 1:
            write("half")
            raise KeyboardInterrupt
        answer(self, messages, sampling, write)

    monkeypatch.setattr(ChatModel, "answer", interrupted)
    printed = talk(pretrained, lines="hi\nmore\n").out
    assert printed.startswith("half [stopped]\n")
    assert [turn["content"] for turn in calls[1]] == ["hi", "half", "more"]


def test_what_cannot_be_answered_is_refused(tmp_path, pretrained, talk):
    printed = talk(pretrained, lines="long " * 20 + "\nhi\n")
    assert "not answered: the conversation has " in printed.err
    assert "and the model 64 positions; /reset" in printed.err
    assert len(printed.out.splitlines()) == 1
    printed = talk(tmp_path / "none", lines="", status=2)
    assert printed.err.startswith(f"command line: no such folder: {tmp_path}/none (looked for")
    assert "neither a checkpoint nor a model" in talk(tmp_path, lines="", status=2).err
    for word, problem in (("top_p=0", "top_p must be above 0"), ("temperature=-1", "at least 0")):
        assert problem in talk(pretrained, word, lines="", status=2).err
    classifier = save(
        tmp_path / "classifier", auto="AutoModelForSequenceClassification", vocab_size=260
    )
    printed = talk(classifier, lines="", status=2)
    what = (
        "LlamaForSequenceClassification does not generate text; use transformers' pipeline, or for"
    )
    assert f"{what} embeddings and rerankers sentence-transformers" in printed.err


def test_answers_do_not_control_the_terminal(pretrained, talk, monkeypatch):
    def answer(self, messages, sampling, write):
        write("\x1b[2Ja\tb\nc\x9b\r")

    monkeypatch.setattr(ChatModel, "answer", answer)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    replaced = "\N{REPLACEMENT CHARACTER}"
    printed = talk(pretrained, lines="hi\n")
    assert printed.out == f"{replaced}[2Ja\tb\nc{replaced}{replaced}\n"


def test_bytes_that_are_no_text_are_replaced(pretrained, talk, monkeypatch):
    """Surrogates instead of these bytes made the tokenizer raise TypeError."""
    with monkeypatch.context() as patch:
        stdin = io.TextIOWrapper(io.BytesIO(b"h\xffi\n"), "utf-8", errors="surrogateescape")
        patch.setattr(io, "StringIO", lambda _: stdin)
        odd = talk(pretrained, lines="")
    assert odd == talk(pretrained, lines="h\N{REPLACEMENT CHARACTER}i\n")


def test_a_temperature_next_to_0_takes_the_most_likely_tokens(pretrained, talk):
    """Logits divided by it overflowed."""
    cold = talk(pretrained, "temperature=1e-320", lines="hi\n")
    assert cold == talk(pretrained, lines="hi\n")


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_temperatures_that_are_none(pretrained, talk, value):
    printed = talk(pretrained, f"temperature={value}", lines="hi\n", status=2)
    assert printed.err == "command line: temperature must be a number of at least 0\n"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Models of images and text by their families, made when first asked for, and two images."""
    root = tmp_path_factory.mktemp("pictures")
    for name, size in (("a wide one", (120, 60)), ("tall", (40, 150))):
        make_image(root / f"{name}.png", size=size, seed=size[0])
    return root


def model_of(pictures, family):
    folder = pictures / family
    return folder if folder.exists() else make_model(folder, family)


@pytest.fixture
def generated(monkeypatch):
    """The tokens of each answer with its prompt."""
    generate, tokens = GenerationMixin.generate, []

    def recorded(self, *args, **options):
        tokens.append(generate(self, *args, **options)[0].tolist())
        return torch.tensor(tokens[-1:])

    monkeypatch.setattr(GenerationMixin, "generate", recorded)
    return tokens


def reference_answer(model, processor, messages, images, count=5, videos=()):
    """The tokens of the prompt, and of the answer, by transformers' own processor and generate."""
    tokenizer = processor.tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    opened = [Image.open(file).convert("RGB") for file in images]
    options = {"add_special_tokens": False}
    if videos:
        frames, about = zip(*map(whole, videos), strict=True)
        options |= {"videos": [*frames], "video_metadata": [*about], "do_sample_frames": True}
    made = inputs_of(processor, images=opened, text=[text], **options)
    ends = [tokenizer.eos_token_id]
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": ends}
    ids = model.generate(**made, **options, pad_token_id=ends[0])[0].tolist()
    prompt = made["input_ids"].shape[1]
    return ids[:prompt], ids[prompt:]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_shown_as_transformers_shows_them(pictures, talk, generated, family):
    """Two images in one message, another in the next one, and a conversation without any."""
    skip_without_packages(family)
    folder = model_of(pictures, family)
    wide, tall = (pictures / f"{name}.png" for name in ("a wide one", "tall"))
    lines = f"/image {wide}\n/image '{tall}'\nWhat?\n/image {tall}\nAnd\n/reset\nhi\n"
    printed = talk(folder, lines=lines)
    mine = list(generated)
    processor = reference_processor(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    image = {"type": "image"}
    messages = [{"role": "user", "content": [image, image, {"type": "text", "text": "What?"}]}]
    ids, wanted = reference_answer(model, processor, messages, [wide, tall])
    assert mine[0] == [*ids, *wanted]
    answer = processor.tokenizer.decode(wanted, skip_special_tokens=True)
    assert printed.out.startswith(f"{answer}\n")
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [image, {"type": "text", "text": "And"}]},
    ]
    ids, wanted = reference_answer(model, processor, messages, [wide, tall, tall])
    assert mine[1] == [*ids, *wanted]
    ids, wanted = reference_answer(model, processor, [{"role": "user", "content": "hi"}], [])
    assert mine[2] == [*ids, *wanted]
    assert f"{wide}, 120 x 60 pixels: " in printed.err
    assert "/image PATH shows an image with the next line" in printed.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "qwen3_vl", "gemma4", "llava_onevision", "internvl", "smolvlm"]
)
def test_videos_are_shown_as_transformers_shows_them(pictures, talk, generated, family):
    """A video beside an image, and another one in the next message."""
    skip_without_packages(family)
    folder = model_of(pictures, family)
    wide, clip = pictures / "a wide one.png", make_video(pictures / "clip.mkv", 16, size=(60, 60))
    printed = talk(folder, lines=f"/image {wide}\n/video {clip}\nWhat?\n/video {clip}\nAnd\n")
    processor = reference_of(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    video = {"type": "video"}
    content = [{"type": "image"}, video, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": content}]
    ids, wanted = reference_answer(model, processor, messages, [wide], videos=[clip])
    assert generated[0] == [*ids, *wanted]
    answer = processor.tokenizer.decode(wanted, skip_special_tokens=True)
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [video, {"type": "text", "text": "And"}]},
    ]
    ids, wanted = reference_answer(model, processor, messages, [wide], videos=[clip, clip])
    assert generated[1] == [*ids, *wanted]
    assert f"{clip}, 60 x 60 pixels, 16 frames, 2.0 s: " in printed.err
    assert "/video PATH shows a video with the next line" in printed.err


@pytest.mark.slow
def test_a_run_with_images_and_its_exports_answer_alike(tmp_path, pictures, talk, generated):
    """The limit of pixels of the run (images.max_pixels) holds for the checkpoint, the adapter and
    the merged model. An adapter's folder had no processor, and a model merged from it lost the limit."""
    folder = model_of(pictures, "qwen2_5_vl")
    words = (f"model.path={folder}", "data.tokenizer=null", "images.max_pixels=4000")
    words = (*words, "data.kind=chat", "data.train=[chats.jsonl]", "batch.micro_batch_size=1")
    recipe = recipe_of(*words, "lora={rank: 4, alpha: 6.0, modules_to_save: [merger]}")
    run = tmp_path / "run"
    model = load_with_adapters(folder, lora=recipe.lora, images=True)
    create_checkpoint(run, model, 10, recipe)
    (run / "recipe.yaml").write_text(to_yaml(recipe))
    for words in ([f"out={run}/hf"], [f"out={tmp_path}/merged", "--merged"]):
        assert main(["export", str(run), *words]) == 0
    copied = shutil.copytree(run / "hf", tmp_path / "other/hf")
    assert main(["export", str(copied.parent), f"out={tmp_path}/again", "--merged"]) == 0
    merged = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    wide, processor = pictures / "a wide one.png", reference_processor(tmp_path / "merged")
    assert processor.image_processor.size["longest_edge"] == 4000
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    asked = [{"role": "user", "content": content}]
    prompt, answer = reference_answer(merged, processor, asked, [wide])
    larger, _ = reference_answer(merged, reference_processor(folder), asked, [wide])
    assert len(larger) > len(prompt)
    for place in (run, run / "hf", tmp_path / "merged", copied, tmp_path / "again"):
        talk(place, lines=f"/image {wide}\nWhat?\n")
        assert generated[-1] == prompt + answer, place


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("none.png", "none.png: no such file"),
        ("text.png", "text.png: is not an image in one of the formats"),
        ("", "the path of a file must follow"),
        ("https://a.b/c.png", "images are not downloaded"),
        ("/video none.mp4", "none.mp4: no such file; videos.folder is where"),
        ("/video text.png", "text.png: is not a video in one of the formats MP4"),
    ],
)
def test_images_that_cannot_be_shown(pictures, talk, monkeypatch, path, problem):
    """In a pipe the chat ends, for the next line asks about the image; in a terminal it goes on."""
    (pictures / "text.png").write_text("no image")
    monkeypatch.chdir(pictures)
    videos = path.startswith("/video")
    folder = model_of(pictures, "qwen2_5_vl" if videos else "llava")
    line = path if videos else f"/image {path}"
    printed = talk(folder, lines=f"{line}\nWhat?\n", status=2)
    assert not printed.out
    assert f"{line.strip()}: not shown: " in printed.err
    assert problem in printed.err


def test_models_that_see_no_images(pretrained, pictures, talk):
    wide = pictures / "a wide one.png"
    for words, problem in (
        ([pretrained], "the model takes no images"),
        (
            [model_of(pictures, "llava"), "--plain"],
            "an image needs a chat template, which shows it",
        ),
    ):
        printed = talk(*words, lines=f"/image {wide}\nWhat?\n", status=2)
        assert printed.err.endswith(f"/image {wide}: not shown: {problem}\n")
        assert "/image PATH" not in printed.err


def test_a_text_that_holds_the_token_of_images_is_refused(pictures, talk):
    """It ended with a traceback of transformers."""
    printed = talk(model_of(pictures, "qwen2_5_vl"), lines="a <|image_pad|>\nhi\n")
    assert "not answered: the text of the conversation holds <|image_pad|>" in printed.err
