"""`launcher train` with slow phases, for tests that stop it.

Environment variables: PHASE is import, tokenize, reference, model, evaluate, save, export or end;
when a rank begins that phase, it creates the file REACHED and waits for SECONDS. `end` begins when
the outcome has been written, `reference` when the log-probabilities have. Arguments: those of
`launcher train`; its ranks run this file with the recipe's arguments only.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def slow(original, *, after=False):
    def reached(*arguments, **more):
        if after:
            original(*arguments, **more)
        # The other ranks have nothing to do at the end, and are there before rank 0 has written its status
        if os.environ["PHASE"] != "end" or os.environ.get("RANK", "0") == "0":
            Path(os.environ["REACHED"]).touch()
        time.sleep(float(os.environ.get("SECONDS", "1.5")))
        return None if after else original(*arguments, **more)

    return reached


def install(phase):
    from launcher.checkpoint import writer
    from launcher.data import encoder
    from launcher.objectives import kept_files
    from launcher.run import reporting
    from launcher.training import evaluation, setup

    owner, name = {
        "tokenize": (encoder, "render"),
        "reference": (kept_files.ReferenceFile, "write"),
        "model": (setup, "_make_evaluator"),
        "evaluate": (evaluation.Evaluator, "evaluate"),
        "save": (writer, "write_chunks"),
        "export": (setup, "export_hugging_face"),
        "end": (reporting.Reporter, "end"),
    }[phase]
    setattr(owner, name, slow(getattr(owner, name), after=phase in ("end", "reference")))


def rank():
    from launcher import train

    prepare, phase = train.prepare_cuda, os.environ.get("PHASE", "step")

    def prepare_and_install(**options):
        prepare(**options)
        if phase not in ("boot", "step"):
            install(phase)

    train.prepare_cuda = slow(prepare) if phase == "import" else prepare_and_install
    from launcher.distributed.spawn import end_process

    end_process(train.main())


def launch():
    from launcher.cli import main, train

    run_agent = train._run_agent

    def run_this_file(arguments, log):
        after = arguments.index("-m")
        return run_agent([*arguments[:after], __file__, *arguments[after + 2 :]], log=log)

    train._run_agent = run_this_file
    sys.exit(main.main(["train", *sys.argv[1:]]))


if __name__ == "__main__":
    rank() if "RANK" in os.environ else launch()
