"""Copies of checkpoints in stores: which are whole, which start continues, what is removed."""

import random
from pathlib import Path

import pytest

from launcher.checkpoint import copies, files
from launcher.checkpoint.copier import RateLimiter
from launcher.checkpoint.copies import CopyRecord, RunCopy, SupersededError, outdated
from launcher.errors import RecipeError
from launcher.files import write_file
from launcher.recipe import schema
from launcher.recipe.load import load_recipe
from launcher.reliability.run_directory import RunFolder
from launcher.sources.location import Location
from launcher.sources.store_requests import StoreError
from tests.object_store import BUCKET, Answer, once

pytestmark = pytest.mark.slow
COPY = f"s3://{BUCKET}/runs/x"
NAMES = (files.rank_file(0), files.rank_file(1), files.INDEX, files.STATE)


def saved(folder, step, content=b"0123456789" * 100):
    """A checkpoint in a folder."""
    scratch = files.scratch_folder(folder, step)
    stored = {name: write_file(scratch / name, content + name.encode()) for name in NAMES}
    return files.commit(scratch, step=step, ranks=2, files=stored)


def put(store, path):
    """A checkpoint of this machine, in the store."""
    store.put_folder(path, f"runs/x/checkpoints/{path.name}")


@pytest.fixture
def recipe(folder):
    return load_recipe(["recipe=x.yaml", f"checkpoint.copy_to={COPY}"], ranks=1).recipe


@pytest.fixture
def run(recipe):
    return RunFolder(Path(recipe.run.dir))


def find(recipe, run, **more):
    return copies.fetch_newest(recipe.checkpoint, run, name=recipe.run.name, **more)


def begin(recipe, run, **more):
    lines = find(recipe, run, **more)
    (run.path / "recipe.yaml").parent.mkdir(parents=True, exist_ok=True)
    (run.path / "recipe.yaml").write_text("recipe")
    copies.take_over(recipe.checkpoint, run, name=recipe.run.name)
    return lines


def elsewhere(folder, recipe):
    """The run folder of another machine with the same recipe."""
    return RunFolder(folder / "elsewhere" / recipe.run.name)


@pytest.fixture(params=["store", "disk"])
def place(request, tmp_path):
    if request.param == "disk":
        return Location(str(tmp_path / "place" / "a.bin"))
    request.getfixturevalue("store")
    return Location(f"s3://{BUCKET}/place/a.bin")


@pytest.mark.parametrize("size", [0, 1, 1000, (64 << 20) + 5])
def test_what_is_written_is_read(place, tmp_path, size):
    content = random.Random(size).randbytes(size)
    blocks = [content[at : at + (5 << 20)] for at in range(0, size, 5 << 20)]
    place.write(lambda: blocks, size=size)
    assert place.read_bytes() == content
    (there,) = Location(place.name.rpartition("/")[0]).files(now=True)
    assert (there.name, there.size()) == (place.name, size)
    stored = there.download(tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == content
    assert stored.bytes == size
    place.write_bytes(b"other")
    assert place.read_bytes() == b"other"
    place.remove()
    place.remove()
    with pytest.raises(FileNotFoundError):
        place.read_bytes()


def test_content_that_fails_leaves_no_object(store):
    def breaks():
        yield bytes(80 << 20)
        raise ValueError("damaged")

    for first in (breaks, lambda: iter([b"x", 1])):
        with pytest.raises((ValueError, TypeError, OSError)):
            Location(f"{COPY}/a.bin").write(first, size=100 << 20)
    assert store.names() == []
    assert "Uploads" not in store.client.list_multipart_uploads(Bucket=BUCKET)


@pytest.mark.parametrize("size", [100, 70 << 20])
def test_a_write_is_tried_again(store, size):
    content = random.Random(1).randbytes(size)
    for answer in (Answer(503, "SlowDown"), Answer(500, "InternalError")):
        store.fault = once(2, answer, of=lambda request: request.method == "PUT")
        Location(f"{COPY}/a.bin").write(lambda: [content], size=size)
        assert Location(f"{COPY}/a.bin").read_bytes() == content


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(403, "AccessDenied", "Access Denied"), r"no right to write it .* delete objects"),
        (Answer(400, "ExpiredToken", "It has expired"), "credentials have expired"),
        (Answer(503, "SlowDown", "wait"), r"failed 8 times.* what is on this machine is kept"),
    ],
)
def test_a_write_that_fails_says_why(store, answer, said):
    store.fault = lambda request: answer if request.method in ("PUT", "POST") else None
    with pytest.raises(StoreError, match=said) as raised:
        Location(f"{COPY}/a.bin").write_bytes(b"content")
    assert raised.value.filename == f"{COPY}/a.bin"


def removed(name):
    return lambda store, at: store.client.delete_object(Bucket=BUCKET, Key=f"{at}/{name}")


def shorter(name):
    return lambda store, at: store.put(f"{at}/{name}", b"short")


@pytest.mark.parametrize(
    "damage",
    [
        removed("commit.json"),
        removed("rank_00001.safetensors"),
        removed("state.json"),
        shorter("rank_00000.safetensors"),
        shorter("commit.json"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_passed_over(store, tmp_path, damage):
    for step in (10, 20):
        put(store, saved(tmp_path, step))
    copy = RunCopy(COPY)
    assert next(copy.checkpoints()).step == 20
    damage(store, "runs/x/checkpoints/step_00000020")
    assert next(copy.checkpoints()).step == 10
    assert copy.find(20) is None


def test_a_start_continues_what_is_in_the_copy(store, recipe, run, folder):
    assert begin(recipe, run) == []
    (run.path / "metrics.jsonl").write_text('{"step": 10}\n')
    checkpoint = saved(run.path / "checkpoints", 10)
    put(store, checkpoint)
    store.put("runs/x/metrics.jsonl", (run.path / "metrics.jsonl").read_bytes())
    store.put("runs/x/rounds/1.json", b"answers")
    other = elsewhere(folder, recipe)
    (line,) = begin(recipe, other)
    assert f"of step 10 (4.0 KiB), is that in {COPY}/checkpoints/step_00000010" in line
    fetched = other.path / "checkpoints" / "step_00000010"
    assert sorted(file.name for file in fetched.iterdir()) == [
        "commit.json",
        "index.json",
        "state.json",
    ]
    assert (other.path / "metrics.jsonl").read_text() == '{"step": 10}\n'
    assert (other.path / "rounds" / "1.json").read_bytes() == b"answers"
    copied = RunCopy(COPY).find(10)
    for rank in range(2):
        size, problem = copies.fetch_missing(copied, fetched, rank=rank, ranks=2)
        assert (size, problem) == (1022, None)
    assert files.verify(fetched) is None
    assert copies.fetch_missing(copied, fetched, rank=0, ranks=1) == (0, None)

    # The first start finds that it was replaced
    own = copies.own_record(run)
    with pytest.raises(SupersededError, match="another start of this run, on "):
        RunCopy(COPY).check(own.start)
    RunCopy(COPY).check(copies.own_record(other).start)
    assert copies.own_record(other).run == own.run


@pytest.mark.parametrize("name", ["../../evil.txt", "../x", "a/b.json", ".hidden", "a b"])
def test_a_store_writes_no_file_outside_of_the_run_folder(store, recipe, run, folder, name):
    begin(recipe, run)
    put(store, saved(run.path / "checkpoints", 10))
    store.put(f"runs/x/rounds/{name}", b"evil")
    store.put("runs/x/rounds/1.json", b"answers")
    store.put(f"runs/x/checkpoints/step_00000010/{name}", b"evil")
    other = elsewhere(folder, recipe)
    begin(recipe, other)
    assert [file.name for file in (other.path / "rounds").iterdir()] == ["1.json"]
    assert [
        file for file in folder.rglob("*") if file.is_file() and b"evil" in file.read_bytes()
    ] == []


def test_a_start_that_only_looked_leaves_the_copy_to_the_other(store, recipe, run, folder):
    """It may be refused for its recipe or data."""
    begin(recipe, run)
    put(store, saved(run.path / "checkpoints", 10))
    find(recipe, elsewhere(folder, recipe))
    RunCopy(COPY).check(copies.own_record(run).start)


def test_a_restart_does_not_take_the_copy_back(store, recipe, run, folder):
    begin(recipe, run)
    put(store, saved(run.path / "checkpoints", 10))
    find(recipe, run, restarted=True)
    begin(recipe, elsewhere(folder, recipe))
    with pytest.raises(
        RecipeError, match=r"another start of this run, on .* writes there; this one"
    ):
        find(recipe, run, restarted=True)
    assert find(recipe, run) == [], "a start of the user may"


def test_a_run_that_has_copied_nothing_is_known_by_its_recipe(store, recipe, run, folder):
    begin(recipe, run)
    seen = []

    def altered(content):
        seen.append(content)
        return ["run.seed: 3 -> 4"]

    assert find(recipe, run, altered=altered) == [], "this run's own"
    with pytest.raises(
        RecipeError, match=r"a run with another recipe \(run.seed: 3 -> 4\); give an"
    ):
        find(recipe, elsewhere(folder, recipe), altered=altered)
    assert seen == [b"recipe"]
    assert find(recipe, elsewhere(folder, recipe)) == []


@pytest.mark.parametrize("kept", ["nothing", "run.json"])
def test_a_folder_that_has_lost_its_record_is_the_same_run(store, recipe, run, kept):
    begin(recipe, run)
    put(store, saved(run.path / "checkpoints", 10))
    own = (run.path / "copy.json").rename(run.path / "run.json")
    if kept == "nothing":
        own.unlink()
    assert find(recipe, run) == []
    assert copies.own_record(run).run == RunCopy(COPY).read_record().run


def test_a_newer_checkpoint_of_this_machine_stays(store, recipe, run):
    begin(recipe, run)
    put(store, saved(run.path / "checkpoints", 10))
    saved(run.path / "checkpoints", 20)
    assert begin(recipe, run) == []
    assert copies._newest_step(run) == 20


def test_an_older_checkpoint_replaces_a_damaged_one(store, recipe, run, folder):
    begin(recipe, run)
    for step in (10, 20):
        path = saved(run.path / "checkpoints", step)
        put(store, path)
    state = (path / "state.json").read_bytes()
    store.put("runs/x/checkpoints/step_00000020/state.json", state[:-1] + b"?")
    other = elsewhere(folder, recipe)
    damaged, found = begin(recipe, other)
    assert damaged.endswith(
        "step_00000020/state.json is damaged, an older checkpoint is looked for"
    )
    assert "of step 10 " in found
    assert files.read_marker(other.path / "checkpoints" / "step_00000010").step == 10


def test_a_file_that_was_damaged_in_the_store_is_refused(store, recipe, run, folder):
    path = saved(run.path / "checkpoints", 10)
    content = (path / "rank_00000.safetensors").read_bytes()
    put(store, path)
    store.put("runs/x/checkpoints/step_00000010/rank_00000.safetensors", content[:-1] + b"?")
    copied = RunCopy(COPY).find(10)
    (folder / "here").mkdir()
    _, problem = copies.fetch_missing(copied, folder / "here", rank=0, ranks=1)
    assert problem == f"{COPY}/checkpoints/step_00000010/rank_00000.safetensors is damaged"


def record(**values):
    known = {"run": "1", "name": "x", "start": "2", "host": "h", "time": 0.0}
    return CopyRecord(**known | values).model_dump_json()


@pytest.mark.parametrize(
    ("there", "overrides", "rule"),
    [
        (
            record(name="another"),
            [],
            "of-another-name",
        ),
        (None, [], "no-record"),
        (
            record(name="small"),
            ["checkpoint.resume=never"],
            "resume-is-never",
        ),
        ("{}", [], "not-a-record"),
    ],
)
def test_another_run_is_not_overwritten(store, folder, words, run, there, overrides, rule):
    put(store, saved(folder / "made", 10))
    if there is not None:
        store.put("runs/x/run.json", there)
    before = {
        key: store.client.head_object(Bucket=BUCKET, Key=key)["ETag"] for key in store.names()
    }
    arguments = ["recipe=x.yaml", f"checkpoint.copy_to={COPY}", *overrides]
    with words.refused(rule):
        begin(load_recipe(arguments, ranks=1).recipe, run)
    after = {key: store.client.head_object(Bucket=BUCKET, Key=key)["ETag"] for key in store.names()}
    assert before == after
    assert not run.path.exists()


def test_a_run_folder_with_another_run_is_refused(store, folder, recipe, run):
    put(store, saved(folder / "made", 10))
    store.put("runs/x/run.json", record(name=recipe.run.name))
    saved(run.path / "checkpoints", 5)
    with pytest.raises(RecipeError, match=r"it holds another run than .*; give another folder"):
        begin(recipe, run)


def test_a_store_that_refuses_ends_the_start(store, recipe, run):
    store.fault = lambda request: Answer(403, "AccessDenied") if request.method == "PUT" else None
    with pytest.raises(
        RecipeError, match=rf"checkpoint.copy_to: {COPY}/run.json: no right to write"
    ):
        begin(recipe, run)


def test_copies_are_removed_by_the_rules_of_checkpoints(tmp_path):
    rng = random.Random(3)
    for case in range(60):
        steps = sorted(rng.sample(range(1, 40), rng.randint(1, 8)))
        best = rng.sample(steps, rng.randint(0, min(2, len(steps))))
        settings = schema.Checkpoint(
            keep_last=rng.randint(1, 4), keep_every=rng.choice([None, 2, 5])
        )
        folder = tmp_path / str(case)
        for step in steps:
            saved(folder, step, b"")
        first, *earlier = [*best, None]
        files.prune(folder, settings.keep_last, settings.keep_every, first, earlier)
        left = [files.step_of(path) for path in files.list_checkpoints(folder)]
        assert sorted({*steps} - {*outdated(steps, settings, best)}) == left, (
            steps,
            settings,
            best,
        )


def test_the_marker_is_removed_first(store, tmp_path):
    put(store, saved(tmp_path, 10))
    store.requests.clear()
    copy = RunCopy(COPY)
    copy.remove(copy.listed()[10])
    deleted = [request.path for request in store.requests if request.method == "DELETE"]
    assert "commit.json" in deleted[0]
    assert len(deleted) == 5
    assert store.names() == []


def test_bandwidth_is_shared(monkeypatch):
    now, slept = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", slept.append)
    limiter = RateLimiter(1000)
    for _ in range(3):
        limiter.wait(500)
    assert slept == [0.0, 0.5, 1.0]
    RateLimiter(None).wait(10**9)
    assert len(slept) == 3
