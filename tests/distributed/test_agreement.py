"""Ranks that would not train the same model are refused, and copies that drift apart are noticed."""

from tests.distributed.launching import results_of


def test_ranks_compare_recipes_data_and_copies(tmp_path):
    found = results_of("agreement_worker.py", tmp_path, ranks=4, timeout=60)
    assert found["own"] == "", "folders, caches and loader processes may differ"
    assert found["same"] == "", "the same tokens from files in other folders"
    first, line, last = found["rate"].splitlines()
    assert first == "the ranks would not train the same model; these differ:"
    assert line.startswith("  optimizer.learning_rate: 0.1 on ")
    assert "(rank 2); 0.5 on " in line
    assert line.endswith("(rank 3)")
    assert last == "start each machine with the same command, versions and files"
    _, line, _ = found["older"].splitlines()
    assert line.startswith('  version of torch: "2.0" on ')
    assert line.endswith("(rank 2)")
    assert found["unread"] == "", "one rank of each machine reads the launcher's code"
    _, line, _ = found["environment"].splitlines()
    assert line.startswith('  model.arguments.token, value: "digest ')
    assert '  data.train, content: "x" on ' in found["data"]
    text = "hold copies of the same parameters, but with other values: 1 of 4 parameters (1.weight)"
    assert found["fsdp"] == [False, "", ""], "no rank has a copy"
    for name, ranks in (("ddp", "0, 3"), ("hybrid", "1, 3")):
        exist, before, after = found[name]
        assert (exist, before) == (True, "")
        assert after.startswith(f"ranks {ranks} {text}"), name
