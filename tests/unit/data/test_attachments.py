"""Rows with attachments of two kinds: images, and clips of a kind that only these tests know."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from launcher.data import token_store
from launcher.data.attachment_inputs import Loaded, ModelAttachments
from launcher.data.attachments import Placed, Source
from launcher.data.collation import RowInputs, make_sample
from launcher.data.images import RowImages
from launcher.data.modality import Modality
from launcher.data.token_store import ModelTraits, open_store
from launcher.objectives.base import count_attachments
from launcher.objectives.next_token import NextToken
from launcher.recipe.schema import Data
from launcher.sources import layouts
from tests.image_models import make_image, make_model
from tests.run_files import write_lines

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image_pad|>"
    "{% elif part.type == 'clip' %}<|vision_start|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
)
CLIP = "<|vision_start|>"
IMAGE_TOKEN, CLIP_TOKEN = 262, 260


class ClipSource(Source):
    """A file with a number: of its frames, each of which is a token."""

    kind = "clip"

    def shown(self, tokens, meta):
        return f"clip: {tokens} tokens", None


@dataclass(frozen=True)
class Clips(Modality):
    kind = "clip"
    source = ClipSource
    example = "clip.txt"
    token_type = 2
    token_ids = (CLIP_TOKEN,)
    loaded = None
    pixel_table = None

    @property
    def blank(self):
        return {"clips": np.zeros((1, 1))}

    @classmethod
    def of(cls, section, model):
        return cls(model)

    @classmethod
    def of_export(cls, folder, base):
        return cls(str(folder))

    def identity(self):
        return ["clips"]

    def limit_files(self, files):
        raise AssertionError

    def check(self, text, count, kinds):
        assert text.count(CLIP) == count

    def expand(self, rendered, sources):
        counts = [int(source.read()) for source in sources]
        placed = [
            Placed(count, source, source.checksum(source.read()), (count, 1, 1))
            for count, source in zip(counts, sources, strict=True)
        ]
        return rendered.expanded(CLIP, [CLIP * count for count in counts], placed)

    def example_arrays(self):
        raise AssertionError

    def message_part(self, path):
        raise AssertionError

    def load(self, attachment):
        return {"clips": np.full((1, attachment.meta[0]), int(attachment.source.read()))}

    def join(self, attachments):
        return {"clips": np.concatenate([each["clips"].ravel() for each in attachments])}

    def grid(self, meta, ids):
        assert ids.tolist() == [CLIP_TOKEN] * meta[0]
        zeros = np.zeros(meta[0])
        return np.stack([np.arange(meta[0]), zeros, zeros]).astype(int), meta[0]

    def largest(self, tokens):
        raise AssertionError

    def planned(self, model):
        raise AssertionError


@pytest.fixture
def kinds(monkeypatch):
    """The launcher with another kind of attachments."""
    monkeypatch.setitem(token_store._SOURCES, len(layouts.ATTACHMENTS), ClipSource)
    monkeypatch.setitem(layouts.ATTACHMENTS, "clip", "clips")
    monkeypatch.setitem(layouts._LIKE_ATTACHMENTS, "clip", layouts.re.compile("clip"))
    monkeypatch.setitem(layouts._ENDINGS, "clip", (".txt",))
    monkeypatch.setitem(layouts.NAMES, "clips", ("clips",))


def test_two_kinds_of_attachments_share_a_row(kinds, tmp_path):
    """From the messages to the micro-batch; neither kind is named in the code between."""
    name = str(make_model(tmp_path / "model", "qwen2_5_vl"))
    make_image(tmp_path / "wide.png", size=(120, 60))
    (tmp_path / "clip.txt").write_text("3")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    answer = {"role": "assistant", "content": "A thing."}
    parts = [
        {"type": "text", "text": "First <clip>, then "},
        {"type": "image", "path": "wide.png"},
    ]
    rows = [
        {"messages": [{"role": "user", "content": parts, "clip": "clip.txt"}, answer]},
        {"messages": [{"role": "user", "content": "no more"}, answer]},
    ]
    write_lines(tmp_path / "rows.jsonl", rows)
    data = Data(
        kind="chat",
        sequence_length=256,
        workers=0,
        packing=False,
        cache=str(tmp_path / "cache"),
        chat_template=str(tmp_path / "template.jinja"),
    )
    attachments = ModelAttachments(
        (RowImages(name), Clips(name)), grid=True, token_types="mm_token_type_ids"
    )
    model = ModelTraits(tokenizer=name, attachments=attachments)
    files = (str(tmp_path / "rows.jsonl"),)
    store = open_store(files, data, tokenizer=name, model=model, build=True)
    clip, image = store.attachments_between(0, store.ids.size)
    assert [clip.kind, image.kind] == ["clip", "image"]
    assert store.ids[clip.first : clip.end].tolist() == [CLIP_TOKEN] * 3
    assert set(store.ids[image.first : image.end].tolist()) == {IMAGE_TOKEN}
    assert clip.meta == (3, 1, 1, 0)
    dataset = NextToken().open(store, data, model)
    assert count_attachments(dataset) == {"images": (1, 0), "clips": (1, 0)}
    made = dataset.collate([dataset[0], dataset[1]]).micro_batch.inputs
    counts = {kind: given["count"] for kind, given in made["attachments"].items()}
    assert counts == {"image": 1, "clip": 1}
    assert made["clips"].tolist() == [3, 3, 3]
    ids, types = made["input_ids"], made["mm_token_type_ids"]
    assert torch.equal(types, (ids == IMAGE_TOKEN).long() + 2 * (ids == CLIP_TOKEN))
    time = made["position_ids"][0, 0, clip.first : clip.end] - clip.first
    assert time.tolist() == [0, 1, 2]


def test_the_attachments_of_joined_rows_are_moved():
    def sample(length, *spans):
        made = make_sample([(np.arange(length), np.arange(length))])
        return made | {
            "attachments": [Loaded("image", {}, first, end, (0, 0)) for first, end in spans]
        }

    row = RowInputs(64).joined_row([sample(5, (1, 3)), sample(4), sample(6, (0, 2), (3, 5))])
    assert [(one.first, one.end) for one in row["attachments"]] == [(1, 3), (9, 11), (12, 14)]
    assert len(row["input_ids"]) == 15


def test_a_file_of_any_kind_that_is_missing(kinds, tmp_path):
    source = ClipSource(str(tmp_path / "none.txt").encode(), is_file=True)
    with pytest.raises(ValueError, match=r"none.txt: no such file; clips\.folder is where"):
        source.read()
