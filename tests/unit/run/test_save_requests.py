"""RUN_DIR/save: each request is answered by a checkpoint."""

from types import SimpleNamespace

from launcher.data.batching import Position
from launcher.run.run import TrainingRun


def saved_steps(requests, *, due=()):
    """Trains ten steps. requests: the steps in which the file is made. A batch counts the request
    before the batch before it is read, as in the loop. Returns the steps that were saved, and
    whether the file is still there."""
    run = TrainingRun.__new__(TrainingRun)
    file, saved = [False], []
    run._saved_after, run._steps, run._position = 0, 100, Position()

    def save(position, **_):
        saved.append(position.step)

    def save_done():
        file[0] = False

    run._checkpoints = SimpleNamespace(report=lambda: None, save=save, trouble=None)
    data = SimpleNamespace(due=lambda step, section: step in due)
    run._training = SimpleNamespace(data=data, ends_round=lambda step: False)
    run._recipe = SimpleNamespace(checkpoint=None)
    run._ranks = None
    context = SimpleNamespace(__enter__=lambda self: None, __exit__=lambda *_: None)
    nothing = type("Nothing", (), vars(context))
    run._reporter = SimpleNamespace(
        excluded=lambda what: nothing(), state=dict, warn=lambda trouble: None
    )
    run._progress = SimpleNamespace(slow=lambda what: nothing())
    run._early_stopping = SimpleNamespace(state=dict)
    run._rank = SimpleNamespace(watch=SimpleNamespace(save_done=save_done))
    counted = []
    for number in range(1, 11):
        counted.append(file[0])  # of the next batch
        file[0] |= number in requests
        requested = number > 1 and counted[number - 2]
        step = SimpleNamespace(
            number=number, batch=SimpleNamespace(samples_seen=number, stream=None)
        )
        run._save_if_due(step, {}, stopping=False, requested=requested)
    return saved, file[0]


def test_each_request_is_saved_once():
    assert saved_steps([2]) == ([4], False)
    assert saved_steps([2, 6]) == ([4, 8], False)


def test_a_request_right_after_a_save_is_not_dropped():
    """It was reported as done, and the file was removed."""
    assert saved_steps([2, 5]) == ([4, 7], False)
    assert saved_steps([2], due=[3]) == ([3, 5], False)
