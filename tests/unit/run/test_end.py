"""The end of a run."""

import types

import pytest

from launcher.errors import TrainingError
from launcher.reliability.progress import Progress
from launcher.run.run import TrainingRun


def test_a_run_whose_final_weights_are_nowhere_has_failed():
    """A full disk at the last step, and no export: exit status 0 would say that all is well."""

    def finish(finished, *, saved, export):
        checkpoints = types.SimpleNamespace(
            saved_step=saved, trouble="disk", finish=lambda: None, close=lambda: None
        )
        run = types.SimpleNamespace(
            _checkpoints=checkpoints,
            _progress=Progress(),
            _recipe=types.SimpleNamespace(checkpoint=types.SimpleNamespace(export=export)),
            _reporter=types.SimpleNamespace(warn=lambda text: None),
        )
        run._progress.step = 6
        TrainingRun._finish_checkpoints(run, finished)

    for finished, export in ((True, None), (True, "at_end"), (False, None), (False, "at_end")):
        finish(finished, saved=6, export=export)
    finish(True, saved=4, export="at_end")  # whose failure is reported
    for finished, export in ((True, None), (False, None), (False, "at_end")):
        with pytest.raises(TrainingError, match="the final checkpoint could not be saved: disk"):
            finish(finished, saved=4, export=export)
