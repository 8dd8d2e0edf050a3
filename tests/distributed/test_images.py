"""Rows with images and videos: losses and gradients of transformers' own processor and model, row by row."""

import pytest

from tests.distributed.images_worker import CASES, LONGEST, QUICK, QUICK_VIDEOS, VIDEO_CASES
from tests.distributed.launching import results_of
from tests.image_models import NEEDS, needs, skip_without_packages


def check(results, cases):
    for case in cases:
        found = results[case]
        expected = found["plain"]
        assert found["documents"] == 9, case
        assert not found["cut"], case
        counts = [count for rank in found["images"] for count in rank]
        videos = "videos" in case.split()
        if case.split()[0] not in LONGEST and not videos:
            assert 0 in counts, (case, counts)  # a micro-batch has none
        assert max(counts) > 0, (case, counts)
        # Roundings grow over AdamW's first steps, most in these rows of 1,400 tokens
        grown = 50 if case.startswith("gemma4 videos") else 1
        assert found["losses"][0] == pytest.approx(expected["losses"][0], abs=3e-6), case
        assert found["losses"] == pytest.approx(expected["losses"], abs=grown * 3e-6), case
        answers = {reference: expected["answers"][reference] for reference in found["answers"]}
        assert found["answers"] == answers, case
        assert len(answers) > 6, case
        prompt, shown = found["shown"][0]
        assert len(prompt) < (1000 if case.startswith("smolvlm videos") else 300), case
        wanted = ["0.png"] * ("alone" not in case.split()) + ["0.mkv"] * videos
        assert [name.rpartition("/")[2] for name in shown] == wanted
        assert found["norms"][0] == pytest.approx(expected["norms"][0], rel=2e-5), case
        assert found["norms"] == pytest.approx(expected["norms"], rel=grown * 2e-5), case


def test_rows_with_images_train_as_in_transformers(tmp_path):
    results = results_of("images_worker.py", tmp_path, *QUICK, ranks=2, timeout=240)
    check(results, QUICK)


@pytest.mark.long
def test_families_with_images_train_as_in_transformers(tmp_path):
    done = {*QUICK, *VIDEO_CASES}
    cases = [case for case in CASES if case not in done and not needs(case.split()[0])]
    results = results_of("images_worker.py", tmp_path, *cases, ranks=2, timeout=900)
    check(results, cases)


def test_rows_with_videos_train_as_in_transformers(tmp_path):
    results = results_of("images_worker.py", tmp_path, *QUICK_VIDEOS, ranks=2, timeout=240)
    check(results, QUICK_VIDEOS)


@pytest.mark.long
def test_families_with_videos_train_as_in_transformers(tmp_path):
    rest = [case for case in VIDEO_CASES if case not in QUICK_VIDEOS]
    cases = [case for case in rest if not needs(case.split()[0])]
    results = results_of("images_worker.py", tmp_path, *cases, ranks=2, timeout=900)
    check(results, cases)


@pytest.mark.long
@pytest.mark.parametrize("family", NEEDS)
def test_families_whose_processors_need_more_packages(tmp_path, family):
    skip_without_packages(family)
    cases = [case for case in CASES if case.split()[0] == family]
    results = results_of("images_worker.py", tmp_path, *cases, ranks=2, timeout=400)
    check(results, cases)
