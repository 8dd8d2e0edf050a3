"""Tests of the null devices: their properties, faults, collectives and log."""

import sys

from tests.distributed.launching import run, torchrun

ONE_PROCESS = """
import os
import torch
import torch.nn.functional as F
from tests.nullgpu.devices import preloaded
library = preloaded()
assert torch.cuda.device_count() == 3 and torch.cuda.get_device_capability(0) == (9, 0)
free, total = torch.cuda.mem_get_info()
assert total == 40 * 2**30
big = torch.empty(2**30, dtype=torch.uint8, device="cuda:1")
assert torch.cuda.memory_allocated(1) == 2**30, torch.cuda.memory_allocated(1)
try:
    torch.empty(50 * 2**30, dtype=torch.uint8, device="cuda:1")
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("no error for more memory than there is")
query = torch.empty(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
out = F.scaled_dot_product_attention(query, query, query, is_causal=True)
assert "Cudnn" in type(out.grad_fn).__name__, type(out.grad_fn)
out.sum().backward()
pinned = torch.empty(5000, dtype=torch.uint8, pin_memory=True)
before = library.nullgpu_waits()
values = torch.tensor([3.0, 4.0]).pin_memory().to("cuda", non_blocking=True)
assert library.nullgpu_waits() == before
assert values.tolist() == [3.0, 4.0]
assert library.nullgpu_waits() == before + 1
torch.cuda.synchronize()
assert library.nullgpu_waits() == before + 2
library.nullgpu_fail_allocations(1000)
try:
    torch.empty(2**30, device="cuda")
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("an allocation that should fail succeeded")
library.nullgpu_lose_device()
try:
    torch.cuda.synchronize()
except torch.AcceleratorError:
    print("lost", flush=True)
library.nullgpu_mark(b"end")
os._exit(0)  # like the launcher: threads of torch can abort a normal exit of the interpreter
"""

TWO_RANKS = """
import os
import torch
import torch.distributed as dist
from tests.nullgpu.devices import preloaded
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    value = torch.tensor([rank + 1], dtype=dtype).cuda()
    dist.all_reduce(value)
    assert value.item() == 3, value
    largest = torch.tensor([rank + 1], dtype=dtype).cuda()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert largest.item() == 2, largest
mean = torch.tensor([rank + 1.0]).cuda()
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
assert mean.item() == 1.5, mean
gathered = torch.empty(2, device="cuda")
dist.all_gather_into_tensor(gathered, torch.tensor([rank + 1.0]).cuda())
assert gathered.tolist() == [1.0, 2.0]
scattered = torch.empty(1, device="cuda")
dist.reduce_scatter_tensor(scattered, torch.tensor([1.0 + rank, 3.0]).cuda())
assert scattered.item() == (3.0 if rank == 0 else 6.0), scattered
exchanged = torch.empty(2, device="cuda")
dist.all_to_all_single(exchanged, torch.tensor([10.0 * rank, 10.0 * rank + 1]).cuda())
assert exchanged.tolist() == [rank, 10.0 + rank]
sent = torch.tensor([7.0 if rank == 1 else 0.0]).cuda()
dist.broadcast(sent, src=1)
assert sent.item() == 7.0
alone = dist.new_group([rank], use_local_synchronization=True)
dist.all_reduce(sent, group=alone)
assert sent.item() == 7.0
library = preloaded()
library.nullgpu_block_next_collective()
work = dist.all_reduce(sent, async_op=True)
assert not work.is_completed()
library.nullgpu_mark(b"end")
print("exchanged", flush=True)
os._exit(0)
"""


def test_memory_waits_and_faults_in_one_process(null_gpus, tmp_path):
    gpus = null_gpus(count=3, gib=40, capability=90)
    result = run([sys.executable, "-c", ONE_PROCESS], timeout=60, **gpus.variables).check()
    assert "lost" in result.output
    (log,) = (log for log in gpus.logs() if log.of_kind("mark"))
    assert log.contexts == {0, 1}
    assert sum(int(event.arguments[0]) for event in log.of_kind("pin")) >= 5000
    taken = [
        int(event.arguments[1]) for event in log.of_kind("allocate") if event.arguments[0] == "1"
    ]
    assert sum(taken) == 2**30
    assert log.of_kind("refuse")


def test_collectives_exchange_values(null_gpus, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(TWO_RANKS)
    gpus = null_gpus(count=2)
    result = torchrun(script, ranks=2, timeout=60, PYTHONPATH=".", **gpus.variables).check()
    assert result.output.count("exchanged") == 2
    for log in gpus.ranks():
        assert log.contexts == {log.rank}
        calls = [event.arguments for event in log.of_kind("nccl")]
        assert ["reduce_scatter", calls[1][1], "ranks=2", "bytes=8"] in calls
        assert log.of_kind("stuck")
