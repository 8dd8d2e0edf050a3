"""docs/fits.md: which models fit on which GPUs."""

import re

import pytest

from docs import fits_table
from launcher.planner.machine import known_machine


def rows_of_the_page():
    """The memory in each cell, by model and method; None: nothing fits."""
    rows = {}
    for line in fits_table.PAGE.read_text().splitlines():
        if line.startswith("## "):
            model = line.removeprefix("## ")
        method, *cells = [cell.strip() for cell in line.split("|")[1:-1]] or [""]
        if method in fits_table.METHODS:
            memory = [re.search(r"<b>(?:yes|slowly)</b>, ([\d.]+) GiB<", cell) for cell in cells]
            assert all(found or cell == "no" for found, cell in zip(memory, cells, strict=True))
            rows[model, method] = [found and float(found[1]) for found in memory]
    return rows


def test_page_is_complete():
    rows = rows_of_the_page()
    wanted = [(model, method) for model in fits_table.MODELS for method in fits_table.METHODS]
    assert list(rows) == wanted
    for cells in rows.values():
        for memory, (gpu, _) in zip(cells, fits_table.MACHINES.values(), strict=True):
            machine = known_machine(gpu, nodes=1, gpus_per_node=1)
            assert memory is None or 0 < memory * 2**30 < machine.memory


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "method", "machine"),
    [
        ("meta-llama/Llama-3.2-1B", "full", "1 x 24 GB"),
        ("Qwen/Qwen3-32B", "lora", "8 x 80 GB"),
        ("meta-llama/Llama-3.3-70B-Instruct", "qlora", "1 x 80 GB"),
    ],
)
def test_page_is_current(model, method, machine):
    """If this fails, remove build/fits.json, and `python docs/fits_table.py` writes it again."""
    stated = rows_of_the_page()[model, method][list(fits_table.MACHINES).index(machine)]
    memory, _ = fits_table.cell(model, method, machine)
    assert memory == pytest.approx(stated, rel=0.05)
