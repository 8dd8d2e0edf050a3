"""Rows with videos: frames, tokens, pixels and positions, and what is refused."""

import json
import shutil
import sys

import av
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from launcher.data.attachment_inputs import ModelAttachments, grid_positions
from launcher.data.encoder import make_encoder
from launcher.data.images import RowImages
from launcher.data.token_store import ModelTraits, open_store
from launcher.data.tokenizer_files import read_processor
from launcher.data.video_files import Clip, Video
from launcher.data.video_processor import PROCESSORS, Limits, VideoProcessor, settings_of
from launcher.data.videos import RowVideos, VideoSource
from launcher.errors import RecipeError, RowError
from launcher.models.micro_batch import IGNORED
from launcher.models.tower_inputs import TowerInputs, form_of
from launcher.objectives.next_token import NextToken
from launcher.recipe.schema import Data
from launcher.sources.rows import Row, SourcePart
from tests.image_models import make_image, make_model, skip_without_packages
from tests.reference_videos import inputs_of as of_processor
from tests.reference_videos import reference_of, video_processor, whole
from tests.run_files import write_lines
from tests.unit.amounts import IN_CHECK, slow_but
from tests.video_files import make_video, moving_frames, write_video

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4", "llava_onevision")
FAMILIES += ("internvl", "smolvlm")
OLD = transformers.__version__.startswith("5.17.")
ANSWER = {"role": "assistant", "content": "A thing."}
CLIPS = {
    "short": (12, (48, 36), 8),
    "wide": (40, (130, 90), 10),
    "odd": (31, (57, 99), 12.5),
}
"""Frames, width and height, and rate of the videos of these tests."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models by their families, made when first asked for, videos and an image."""
    root = tmp_path_factory.mktemp("videos")
    for seed, (name, (count, size, fps)) in enumerate(CLIPS.items()):
        frames = moving_frames(count, size=size, seed=seed)
        write_video(root / f"{name}.mkv", frames, fps=fps)
    make_image(root / "still.png", size=(84, 56))
    return root


def model_in(folder, family):
    path = folder / family
    return path if path.exists() else make_model(path, family)


def kinds_of(name, **limits):
    return RowImages(name), RowVideos(name, limits=Limits(**limits))


def encoded(folder, rows, family="qwen2_5_vl", *, modalities=None, **data):
    name = str(model_in(folder, family))
    encoder = make_encoder(
        "chat",
        Data(kind="chat", **data),
        tokenizer=name,
        modalities=modalities or kinds_of(name),
    )
    part = SourcePart(str(folder / "rows.jsonl"), "jsonl")
    return list(encoder.encode_rows(Row(part, n, row) for n, row in enumerate(rows, 1)))


def asked(*parts, **columns):
    return {"messages": [{"role": "user", "content": [*parts]}, ANSWER], **columns}


def text(words):
    return {"type": "text", "text": words}


def video(name):
    return {"type": "video", "video": f"{name}.mkv"}


ROWS = [
    asked(video("wide"), text("What?"), video("short")),
    asked(text("hello")),
    asked(text("x"), {"type": "image", "path": "still.png"}, video("odd"), text("\n\ny")),
]


def inputs_of(folder, row, processor, **options):
    """What transformers makes of a row."""
    parts = row["messages"][0]["content"]
    shown = [whole(folder / part["video"]) for part in parts if part["type"] == "video"]
    images = [folder / part["path"] for part in parts if part["type"] == "image"]
    written = processor.tokenizer.apply_chat_template(row["messages"], tokenize=False)
    if shown:
        options |= {"videos": [frames for frames, _ in shown], "do_sample_frames": True}
        options |= {"video_metadata": [about for _, about in shown]}
    opened = [transformers.image_utils.load_image(str(each)) for each in images]
    return of_processor(processor, images=opened, text=[written], **options)


@pytest.mark.parametrize("family", slow_but(IN_CHECK, FAMILIES))
def test_tokens_and_pixels_are_those_of_the_processor(folder, family):
    """Of transformers' own classes for the family, which see all frames and choose."""
    skip_without_packages(family)
    processor = reference_of(model_in(folder, family))
    modality = RowVideos(str(folder / family))
    for row, found in zip(ROWS, encoded(folder, ROWS, family), strict=True):
        assert not found.problem
        made = inputs_of(folder, row, processor)
        assert found.ids.tolist() == made["input_ids"][0].tolist()
        learned = found.labels[found.labels != IGNORED]
        assert processor.tokenizer.decode(learned) == "A thing.<|end|>"
        table, data = found.attachments
        shown = [
            str(folder / part["video"]) for part in row["messages"][0]["content"] if "video" in part
        ]
        arrays = []
        for record, path in zip(table[table["kind"] == 1], shown, strict=True):
            assert data[record["begin"] :][: record["size"]].decode() == path
            assert found.ids[record["first"]] in modality.token_ids
            assert found.ids[record["end"] - 1] in modality.token_ids
            read = modality.loaded.read(VideoSource(path.encode(), is_file=True), in_bytes=False)
            arrays.append(read[0].arrays)
        for name, array in modality.join(arrays).items() if arrays else ():
            wanted = made[name].numpy()
            if family in ("internvl", "smolvlm"):  # whose frames follow the tiles of images
                frames = family == "smolvlm"  # the dimension of frames and tiles
                wanted = np.take(wanted, range(-array.shape[frames], 0), axis=int(frames))
            assert np.array_equal(array, wanted.astype(array.dtype)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_in_bytes_become_the_same_values(folder, family):
    skip_without_packages(family)
    processor = VideoProcessor(str(model_in(folder, family)), Limits())
    opened = Video.of((folder / "odd.mkv").read_bytes())
    pixels = processor.frames.pixels
    in_bytes = processor.process(opened, in_bytes=True).arrays[pixels]
    wanted = processor.process(opened).arrays[pixels]
    table = processor.pixel_table
    assert in_bytes.dtype == np.uint8
    if family == "gemma4":  # whose colours have the same values, and stand last
        assert np.array_equal(table[0], table[1])
        return
    colours = in_bytes.reshape(len(in_bytes), 3, -1)
    made = table[np.arange(3)[:, None], colours]
    assert np.array_equal(made.reshape(wanted.shape), wanted)


CHOICES = [
    ("Qwen2VLVideoProcessor", {"fps": 2}, {}, {}),
    ("Qwen2VLVideoProcessor", {"fps": 1}, {"fps": 1.0}, {"min_pixels": 3136, "max_pixels": 20_000}),
    ("Qwen2VLVideoProcessor", {"fps": 7, "max_frames": 6}, {"fps": 7.0, "max_frames": 6}, {}),
    ("Qwen2VLVideoProcessor", {"fps": 2, "cap_pixels_per_frame": True, "max_video_tokens": 200}, {},
     {"cap_pixels_per_frame": True, "max_video_tokens": 200}),
    ("Qwen3VLVideoProcessor", {}, {}, {}),
    ("Qwen3VLVideoProcessor", {"fps": 5}, {"fps": 5.0}, {"size": {"shortest_edge": 4096, "longest_edge": 40_960}}),
    ("Qwen3VLVideoProcessor", {"max_frames": 4}, {"max_frames": 4}, {}),
    ("Qwen3VLVideoProcessor", {"cap_pixels_per_frame": True, "max_video_tokens": 6}, {},
     {"cap_pixels_per_frame": True, "max_video_tokens": 6}),
    ("Gemma4VideoProcessor", {"num_frames": 5}, {"max_frames": 5}, {}),
    ("LlavaOnevisionVideoProcessor", {"fps": 2}, {"fps": 2.0}, {}),
    ("InternVLVideoProcessor", {"num_frames": 5}, {"max_frames": 5}, {}),
    ("InternVLVideoProcessor", {"fps": 7}, {"fps": 7.0}, {"size": {"height": 56, "width": 56}}),
    ("InternVLVideoProcessor", {"num_frames": 4}, {"max_frames": 4}, {"initial_shift": False}),
    ("SmolVLMVideoProcessor", {"fps": 1, "num_frames": 64}, {}, {}),
    ("SmolVLMVideoProcessor", {"fps": 9, "num_frames": 3}, {"fps": 9.0, "max_frames": 3},
     {"max_image_size": {"longest_edge": 70}, "size": {"longest_edge": 90}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "limits", "settings"), CHOICES)
def test_frames_and_sizes_are_those_of_transformers(name, given, limits, settings):
    """With the settings of the real models, for lengths, rates and shapes."""
    if OLD and not name.startswith("Qwen"):
        pytest.skip("the choice of frames and the shapes of transformers 5.17 are others")
    mine = PROCESSORS[name](settings, Limits(**limits))
    theirs = video_processor(name, **settings | given, do_sample_frames=True)
    for total, fps, size in ((5, 8, (64, 40)), (37, 12.5, (36, 200)), (90, 29.97, (50, 31))):
        frames = moving_frames(total, size=size)
        about = {"total_num_frames": total, "fps": fps, "duration": total / fps}
        made = theirs([frames], video_metadata=[about], return_metadata=True, return_tensors="np")
        indices = [int(index) for index in made["video_metadata"][0].frames_indices]
        assert list(mine.choose(total, fps)) == indices, total
        clip = Clip(frames[indices], tuple(indices), total, fps)
        arrays = mine.arrays(mine.normalized(mine.scaled(clip)))
        wanted = np.asarray(made[mine.pixels if mine.pixels in made else "pixel_values_videos"])
        found = arrays[mine.pixels]
        assert np.array_equal(found, wanted.reshape(found.shape)), total


def test_values_of_torchvision():
    """Sums of transformers' processors with torchvision 0.28.0, which need not be installed."""
    frames = moving_frames(40, size=(200, 90))
    for name, settings, expected in (
        ("Qwen2VLVideoProcessor", {}, -21296.049006),
        ("Qwen3VLVideoProcessor", {}, -53790.417264),
        ("Gemma4VideoProcessor", {"num_frames": 8}, 1488712.690970),
        ("LlavaOnevisionVideoProcessor", {"num_frames": 8, "size": {"height": 56, "width": 56}},
         -238.305845),
        ("InternVLVideoProcessor", {"num_frames": 8, "size": {"height": 56, "width": 56}},
         -101.285289),
        ("SmolVLMVideoProcessor", {"fps": 3, "size": {"longest_edge": 300},
                                   "max_image_size": {"longest_edge": 112}}, -39847.020728),
    ):  # fmt: skip
        if name == "SmolVLMVideoProcessor" and torch.__version__ < "2.12":
            continue  # without Lanczos
        mine = PROCESSORS[name](settings, Limits())
        indices = list(mine.choose(40, 12.5))
        clip = Clip(frames[indices], tuple(indices), 40, 12.5)
        made = mine.arrays(mine.normalized(mine.scaled(clip)))[mine.pixels]
        assert made.astype(np.float64).sum() == pytest.approx(expected, abs=1e-5), name


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_positions_are_those_of_the_model(folder, family):
    """The positions of the model's own function, which reads the device."""
    if OLD and family == "qwen2_5_vl":
        pytest.skip("transformers 5.17 cuts seconds to whole ones")
    config = transformers.AutoConfig.from_pretrained(model_in(folder, family))
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config).model
    processor = reference_of(folder / family)
    towers = [TowerInputs(config.image_token_id, form_of(config, "image"))]
    towers += [TowerInputs(config.video_token_id, form_of(config, "video"))]
    kinds = [RowImages("", tower=towers[0]), RowVideos("", tower=towers[1])]
    for row, found in zip(ROWS, encoded(folder, ROWS, family), strict=True):
        made = inputs_of(folder, row, processor)
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "mm_token_type_ids")
        given = {name: made[name] for name in names if name in made}
        if "second_per_grid_ts" in given:  # as models take it of a processor, in float32
            given["second_per_grid_ts"] = given["second_per_grid_ts"].float()
        wanted, _ = model.get_rope_index(made["input_ids"], **given)
        places = [
            (int(one["first"]),
             *kinds[one["kind"]].grid(one["meta"].tolist(), found.ids[one["first"] : one["end"]]))
            for one in found.attachments[0]
        ]  # fmt: skip
        positions = grid_positions(np.arange(len(found.ids)), places)
        assert np.array_equal(positions, wanted[:, 0].numpy())


def test_a_video_is_described_by_its_own_frames(folder):
    """SmolVLM's text names their number; of several videos in a row transformers names the largest."""
    skip_without_packages("smolvlm")
    source = shutil.copytree(model_in(folder, "smolvlm"), folder / "smolvlm5", dirs_exist_ok=True)
    settings = json.loads((source / "video_preprocessor_config.json").read_text())
    settings["video_sampling"]["max_frames"] = 5
    (source / "video_preprocessor_config.json").write_text(json.dumps(settings))
    [found] = encoded(folder, [asked(video("short"), video("wide"))], "smolvlm5")
    written = reference_of(source).tokenizer.decode(found.ids)
    for count, seconds in (("three", 1), ("five", 4)):
        assert f"series of {count} frames from a 0:00:0{seconds} [H:MM:SS] video" in written
    assert written.count("Frame from 00:0") == 8


@pytest.mark.parametrize("family", ["internvl", "smolvlm"])
@pytest.mark.parametrize(
    ("kinds", "words", "expected"),
    [
        ("video", "{image}", "stands for images; remove it; images.train=none trains on them"),
        ("image", "<video>", "stands for videos; remove it; videos.train=none trains on them"),
        ("both", "{image}", "stands for images; remove it; <image> is the place of an image of"),
    ],
)
def test_tokens_of_images_are_not_written_beside_videos(folder, family, kinds, words, expected):
    """Videos have the tokens of images. `<video>` is the place of a video of the row's column, so the
    row needs that section for it."""
    skip_without_packages(family)
    name = str(model_in(folder, family))
    images, videos = kinds_of(name)
    modalities = {"video": (videos,), "image": (images,), "both": (images, videos)}[kinds]
    shown = video("short") if kinds != "image" else {"type": "image", "path": "still.png"}
    token = {"internvl": "<IMG_CONTEXT>", "smolvlm": "<image>"}[family]
    if kinds == "both" and family == "smolvlm":
        expected = "<image> in a text is the place of an image"
    row = asked(shown, text(words.format(image=token)))
    [found] = encoded(folder, [row], family, modalities=modalities)
    assert expected in found.problem


def test_forms_of_rows_are_the_same(folder):
    messages = [{"role": "user", "content": "What?"}, ANSWER]
    marked = [{"role": "user", "content": "<video>What?"}, ANSWER]
    own = [{"role": "user", "content": "What?", "videos": ["short.mkv"]}, ANSWER]
    content = (folder / "short.mkv").read_bytes()
    forms = [
        asked(video("short"), text("What?")),
        asked({"type": "video", "path": "short.mkv"}, text("What?")),
        # As datasets writes parts with several keys as JSON
        asked({**video("short"), "text": None, "image": None}, text("What?") | {"video": None}),
        asked({"type": "video_url", "video_url": {"url": "short.mkv"}}, text("What?")),
        asked({"type": "video"}, text("What?"), videos=["short.mkv"]),
        {"messages": marked, "videos": ["short.mkv"]},
        {"messages": messages, "video": "short.mkv"},
        {"messages": messages, "videos": json.dumps(["short.mkv"])},
        {"messages": messages, "videos": [{"bytes": content, "path": None}]},
        {"messages": own},
    ]
    first, *others = encoded(folder, forms)
    assert not first.problem
    assert (first.ids == 263).sum() == 12
    for other in others:
        assert other.ids.tolist() == first.ids.tolist()


def test_a_list_of_pictures_is_a_video(folder):
    """Of two frames in a second (Qwen). All are taken, up to videos.max_frames."""
    frames = moving_frames(8, size=(60, 60), seed=5)
    names = [f"frame{number}.png" for number in range(8)]
    for name, frame in zip(names, frames, strict=True):
        Image.fromarray(frame).save(folder / name)
    rows = [asked({"type": "video", "video": names}, text("?")), asked(text("?"), videos=[names])]
    first, second = encoded(folder, rows, "qwen3_vl")
    assert not first.problem
    assert first.ids.tolist() == second.ids.tolist()
    table, data = first.attachments
    source = VideoSource(data[table["begin"][0] :][: table["size"][0]])
    modality = RowVideos(str(folder / "qwen3_vl"))
    made, checksum = modality.loaded.read(source, in_bytes=False)
    assert checksum == table["checksum"][0]
    processor = reference_of(folder / "qwen3_vl")
    about = {"total_num_frames": 8, "fps": 2.0, "duration": 4.0}
    written = processor.tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    wanted = processor(
        videos=[frames], text=[written], video_metadata=[about], do_sample_frames=True,
        return_tensors="np",
    )  # fmt: skip
    assert made.meta[0] == 4
    assert first.ids.tolist() == wanted["input_ids"][0].tolist()
    assert np.array_equal(made.arrays["pixel_values_videos"], wanted["pixel_values_videos"])
    line, strip = source.shown(99, made.meta)
    assert f"video: 8 frames from {folder}/frame0.png, 60 x 60 pixels, 8 frames, 4.0 s: " in line
    assert strip.size[1] == 60
    Image.fromarray(frames[0]).save(folder / names[7])
    with pytest.raises(RowError, match=r"8 frames from .* has changed since its row was tokenized"):
        modality.loaded.read(source, in_bytes=False, checksum=checksum)


def test_a_caption_of_a_video(folder):
    name = str(model_in(folder, "qwen2_5_vl"))
    data = Data(kind="instruct", columns={"response": "caption"})
    encoder = make_encoder("instruct", data, tokenizer=name, modalities=kinds_of(name)[1:])
    part = SourcePart(str(folder / "rows.jsonl"), "jsonl")
    rows = [Row(part, 1, {"video": "short.mkv", "caption": "A square."})]
    [found] = encoder.encode_rows(rows)
    assert not found.problem
    assert (found.ids == 263).sum() == 12


def damaged(folder):
    content = (folder / "wide.mkv").read_bytes()
    (folder / "half.mp4").write_bytes(make_video(folder / "full.mp4").read_bytes()[:400])
    (folder / "empty.mkv").write_bytes(b"")
    (folder / "words.mkv").write_text("no video " * 100)
    (folder / "list.mkv").write_text(f"#EXTM3U\n#EXTINF:9,\nfile://{folder}/wide.mkv\n")
    (folder / "files.mkv").write_text(f"ffconcat version 1.0\nfile {folder}/wide.mkv\n")
    write_video(folder / "one.mkv", moving_frames(1))
    make_image(folder / "odd.png", size=(40, 40))
    return content


REFUSED = [
    (asked(video("none")), "no-such-file"),
    (asked(video("empty")), "empty"),
    (asked(video("words")), "format"),
    (asked({"type": "video", "video": "half.mp4"}), "format"),
    (asked(video("list")), "format"),
    (asked(video("files")), "format"),
    (asked(video("one")), "one-frame"),
    (asked({"type": "video", "video": "still.png"}), "format"),
    (asked({"type": "video", "video": ["still.png", "2.png"]}), "picture-is-missing"),
    (asked({"type": "video", "video": ["still.png", b"1"]}), "pictures-are-bytes"),
    (asked({"type": "video", "video": ["still.png", "odd.png"]}), "size-of-a-picture"),
    (asked({"type": "video", "video": ["still.png", "odd.png"]}), "sizes-of-pictures"),
    (asked({"type": "video", "video": []}), "type"),
    (
        asked({"type": "video", "video": "https://a.b/c.mp4"}),
        "address",
    ),
    (
        asked({"type": "video", "video": "short.mkv", "fps": 1.0}),
        "key-fps",
    ),
    (
        asked({"type": "video", "video": "short.mkv", "nframes": 8}),
        "key-nframes",
    ),
    (asked(text("a <|video_pad|>")), "token-in-a-text"),
    (
        asked(text("a <video>"), videos=[]),
        "none-for-its-mark",
    ),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [video("short")]}]},
        "in-an-answer",
    ),
    (asked(text("a"), audio="a.mp3"), "column-of-audio"),
    (asked({"type": "audio", "audio": "a.mp3"}), "part-of-audio"),
]  # fmt: skip


def test_a_single_frame_is_refused(folder):
    damaged(folder)
    for family in ("qwen2_5_vl", "qwen3_vl"):
        [found] = encoded(folder, [asked(video("one"))], family)
        assert found.problem.endswith("one.mkv: has 1 frame; a video has at least 2")


@pytest.mark.parametrize(("row", "rule"), REFUSED)
def test_rows_that_cannot_be_used(folder, words, row, rule):
    damaged(folder)
    [found] = encoded(folder, [row])
    words.check(rule, str(found.problem))


def test_a_placeholder_of_videos_is_no_text(folder):
    """Also where rows have images only: its embedding is never a feature there."""
    name = str(model_in(folder, "qwen3_vl"))
    row = asked(text("<|video_pad|>"))
    [found] = encoded(folder, [row], "qwen3_vl", modalities=(RowImages(name),))
    assert "holds <|video_pad|>, which stands for videos; remove it" in found.problem
    # A run names the file and the line
    write_lines(folder / "rows.jsonl", [asked(text("a")), asked(video("empty"))])
    (folder / "empty.mkv").write_bytes(b"")
    data = Data(kind="chat", sequence_length=512, workers=0, cache=str(folder / "cache"))
    model = ModelTraits(tokenizer=name, attachments=ModelAttachments(kinds_of(name), grid=True))
    with pytest.raises(RecipeError, match=r"rows\.jsonl:2: .*empty\.mkv: is empty"):
        open_store((str(folder / "rows.jsonl"),), data, tokenizer=name, model=model, build=True)


def test_limits_that_a_model_does_not_have(folder):
    for family, limits, expected in (
        ("qwen2_5_vl", {"max_pixels": 100}, "videos.max_pixels: must be at least 3,136 for this"),
        ("qwen2_5_vl", {"max_frames": 1}, "videos.max_frames: must be at least 2 for this model"),
        ("qwen3_vl", {"max_frames": 1}, "videos.max_frames: must be at least 2 for this model"),
        (
            "gemma4",
            {"fps": 1.0},
            "videos.fps: the processor of this model takes a number of frames",
        ),
        ("gemma4", {"max_pixels": 100}, "videos.max_pixels: the processor of this model has no"),
        ("llava_onevision", {"max_pixels": 100}, "videos.max_pixels: the processor of this model"),
        ("internvl", {"max_pixels": 100}, "videos.max_pixels: the processor of this model"),
        (
            "glm4v",
            {},
            "rows with videos are not supported for models of type glm4v, but for gemma4",
        ),
    ):
        if OLD and family == "gemma4":  # whose processor needs torchvision
            continue
        with pytest.raises(RecipeError, match=expected):
            VideoProcessor(str(model_in(folder, family)), Limits(**limits))


def test_a_file_whose_header_counts_too_many_frames(folder, monkeypatch):
    """As after a cut at another frame than a key frame: the frames that are there are chosen of."""
    content = (folder / "wide.mkv").read_bytes()
    clip = Video(content, 43, 10.0).clip(lambda total, fps: [0, total - 1])
    assert clip.indices == (0, 39)
    assert clip.total == 40
    with pytest.raises(RowError, match="is damaged: 40 of its 100 frames can be decoded"):
        Video(content, 100, 10.0).clip(lambda total, fps: [0, total - 1])


def test_frames_are_those_of_the_file(folder):
    frames = moving_frames(*CLIPS["wide"][:1], size=CLIPS["wide"][1], seed=1)
    clip = Video.of((folder / "wide.mkv").read_bytes()).clip(lambda total, fps: [0, 7, 39])
    assert np.array_equal(clip.frames, frames[[0, 7, 39]])
    assert (clip.total, clip.fps) == (40, 10.0)


def test_frames_that_are_not_shown_do_not_count(tmp_path):
    """A part of a video that was cut out without encoding it again, as `ffmpeg -ss -c copy` does: it
    begins at the key frame before, and its edit list says where it is shown from."""
    frames = moving_frames(40, size=(48, 32))
    write_video(tmp_path / "whole.mp4", frames, options={"crf": "0", "g": "250"})
    options = {"avoid_negative_ts": "disabled"}
    with (
        av.open(str(tmp_path / "whole.mp4")) as whole_file,
        av.open(str(tmp_path / "part.mp4"), "w", options=options) as part,
    ):
        stream = whole_file.streams.video[0]
        own = part.add_stream_from_template(stream)
        before = round(30 / 8 / stream.time_base)
        for packet in whole_file.demux(stream):
            if packet.size:
                packet.pts, packet.dts = packet.pts - before, packet.dts - before
                packet.stream = own
                part.mux(packet)
    video = Video.of((tmp_path / "part.mp4").read_bytes())
    assert (video.total, video.seconds) == (10, 10 / 8)
    clip = video.clip(lambda total, fps: [0, total - 1])
    assert clip.indices == (0, 9)
    assert np.array_equal(clip.frames, frames[[30, 39]])


@pytest.mark.parametrize("turned", [(0, 65536, -65536, 0), (0, -65536, 65536, 0)])
def test_a_turned_video_is_upright(tmp_path, turned):
    """As phones write it: the matrix of the track says how the frames are shown."""
    frames = moving_frames(4, size=(48, 32))
    content = write_video(tmp_path / "a.mp4", frames).read_bytes()
    at = content.index(b"tkhd") + 4 + 40
    a, b, c, d = turned
    matrix = [a, b, 0, c, d, 0, 0, 0, 1 << 30]
    content = (
        content[:at]
        + b"".join(n.to_bytes(4, "big", signed=True) for n in matrix)
        + content[at + 36 :]
    )
    clip = Video.of(content).clip(lambda total, fps: [0, 3])
    quarter = -1 if b > 0 else 1  # clockwise, or not
    assert np.array_equal(clip.frames[1], np.rot90(frames[3], quarter))


def test_packed_rows_with_images_and_videos(folder):
    """From rows to a micro-batch: counts, tokens of types and positions of two documents."""
    name = str(model_in(folder, "qwen3_vl"))
    write_lines(folder / "rows.jsonl", ROWS)
    data = Data(kind="chat", sequence_length=512, workers=0, cache=str(folder / "cache"))
    attachments = ModelAttachments(kinds_of(name), grid=True, token_types="mm_token_type_ids")
    config = transformers.AutoConfig.from_pretrained(name)
    towers = {
        "image": TowerInputs(262, form_of(config, "image")),
        "video": TowerInputs(263, form_of(config, "video")),
    }
    modalities = [type(one)(name, tower=towers[one.kind]) for one in attachments.modalities]
    attachments = ModelAttachments(tuple(modalities), grid=True, token_types="mm_token_type_ids")
    model = ModelTraits(tokenizer=name, attachments=attachments)
    store = open_store((str(folder / "rows.jsonl"),), data, tokenizer=name, model=model, build=True)
    dataset = NextToken().open(store, data, model)
    assert len(dataset) == 1
    made = dataset.collate([dataset[0]]).micro_batch.inputs
    counts = {kind: given["count"] for kind, given in made["attachments"].items()}
    assert counts == {"image": 1, "video": 3}
    ids = made["input_ids"][0]
    for kind, token, type_ in (("image", 262, 1), ("video", 263, 2)):
        places = made["attachments"][kind]["positions"]
        assert torch.equal(places, (ids == token).nonzero()[:, 0])
        assert set(made["mm_token_type_ids"][0][places].tolist()) == {type_}
    assert (made["position_ids"][0, 0] == 0).sum() == 4  # three documents, and padding


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limits", [{}, {"fps": 3.0, "max_frames": 6}, {"max_pixels": 40_960}])
def test_an_exported_processor_takes_the_same_frames(folder, tmp_path, family, limits):
    """transformers' class with the exported settings. Qwen2.5-VL has one file for images and videos:
    those of videos get their own, and the images stay as they are."""
    skip_without_packages(family)
    if family == "gemma4":
        limits = {key: value for key, value in limits.items() if key == "max_frames"}
    if family in ("llava_onevision", "internvl"):
        limits = {key: value for key, value in limits.items() if key == "fps"}
    if family == "smolvlm":
        limits = {key: value for key, value in limits.items() if key != "max_pixels"}
    source = model_in(folder, family)
    modality = RowVideos(str(source), limits=Limits(**limits))
    files = read_processor(source)
    before = json.dumps(files["preprocessor_config.json"])
    modality.limit_files(files)
    assert json.dumps(files["preprocessor_config.json"]) == before
    exported = shutil.copytree(source, tmp_path / "hf")
    for name, content in files.items():
        (exported / name).write_text(json.dumps(content))
    settings = settings_of(read_processor(exported))
    assert settings.get("do_sample_frames", family != "qwen2_vl")
    processor, mine = reference_of(exported), modality.loaded
    frames, about = whole(folder / "wide.mkv")
    made = processor(
        videos=[frames], text=[processor.video_token], video_metadata=[about], return_tensors="pt"
    )
    wanted, pixels = mine.process(Video.of((folder / "wide.mkv").read_bytes())), mine.frames.pixels
    expected = wanted.arrays[pixels]
    assert np.array_equal(made[pixels].reshape(expected.shape), expected)
    # As the launcher reads it, also beside an adapter, whose base has the model's own settings
    own = RowVideos.of_export(exported, None).loaded
    assert own.frames.settings["fps"] == mine.frames.settings["fps"]
    adapter = RowVideos.of_export(exported, str(source)).loaded
    clip = Video.of((folder / "wide.mkv").read_bytes())
    for other in (own, adapter):
        assert np.array_equal(other.process(clip).arrays[pixels], expected)


def test_a_missing_package_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        RowError, match=r"needs av, which is not installed: pip install 'launcher\[video"
    ):
        VideoSource(b"...").decode(b"...")
