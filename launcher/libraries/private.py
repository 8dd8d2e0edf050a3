"""Every private name of torch, transformers and Python's multiprocessing that the launcher uses.

A private name may change with any release, so each one stands here, with the versions in which it
was read and with what happens without it. torch 2.11 and 2.13 and transformers 5.17 and 5.23 have
all of them, unless the entry says otherwise. `tests/unit/test_private_names.py` checks that no
other module uses one, and that the installed versions have them all.

What only measures, reports or saves time or memory is optional: without it a run logs once what
it loses, and trains on.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import queues
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.nn.attention import SDPBackend
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

# Names that are only imported under another path than torch's public ones
__all__ = [
    "CheckpointWrapper",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "checkpoint_wrapper",
    "tree_leaves",
    "tree_map_only",
]

logger = logging.getLogger(__name__)

Method = Callable[..., None]
_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


@functools.cache
def log_missing(name: str, consequence: str) -> None:
    """Logs once in this process that torch lacks a name, and what the run loses."""
    logger.warning(f"torch {torch.__version__} has no {name}: {consequence}; training continues")


# Names that runs of torch need, read in torch 2.11 and 2.13. Without one of them no run starts,
# unless the entry says otherwise


def _operator(name: str) -> Any:
    """An operator of torch; None if this version lacks it."""
    return getattr(torch.ops.aten, name, None)


def _overload(name: str) -> Any:
    """The OpOverload that arrives in a dispatch mode for an operator; None if there is none."""
    return getattr(_operator(name), "default", None)


_KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
ATTENTION_OPERATORS = tuple(kernel for name in _KERNELS if (kernel := _overload(name)))
"""Operators that compute attention in one kernel, but for that of packed documents. Selective
checkpointing keeps their results; it computes again what is not among them."""
FLASH_ATTENTION = _operator("_scaled_dot_product_flash_attention")
EFFICIENT_ATTENTION = _operator("_scaled_dot_product_efficient_attention")
MATH_ATTENTION = _operator("_scaled_dot_product_attention_math")
"""Kernels of `scaled_dot_product_attention`, which a plan for GPUs calls. Without them it fails."""
FLOAT8_PRODUCT = _overload("_scaled_mm")
"""The matrix product of float8 tensors. Without it selective checkpointing does not keep it."""
CAST = _overload("_to_copy")
SAFE_SOFTMAX = _overload("_safe_softmax")
SOFTMAX_BACKWARD = _overload("_softmax_backward_data")
"""What `Tensor.to` calls if it copies, and parts of attention without a fused kernel. Without them a
plan counts less memory."""

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_norm = torch._foreach_norm
"""One kernel for a list of tensors. Loops over them would be slower."""
fused_adamw_: Any = getattr(torch, "_fused_adamw_", None)
fused_sgd_: Any = getattr(torch, "_fused_sgd_", None)
"""The updates of `torch.optim.AdamW` and `SGD` with `fused=True`, for plain tensors. Without them
`optimizer.name: sgd`, and moments in low precision on CPUs, fail in the first step."""

BatchNormBase = _NormBase
"""The base of all kinds of BatchNorm, which update running statistics in forward passes."""
DISABLED_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""`__torch_function__` of a subclass of Tensor that only dispatches."""
CHECKPOINT_PREFIX = "_checkpoint_wrapped_module"
"""What activation checkpointing inserts into the names of parameters. Under another name checkpoints
and exports would have wrong names; `tests/unit/test_private_names.py` compares it."""
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
REDISTRIBUTE_LOGGER = "torch.distributed.tensor._redistribute"
"""Loggers that the launcher quiets. Under other names the log has needless lines."""


NOTHING_ON_META = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_")
"""Functions of `torch.nn.init` that do nothing to tensors of the meta device (torch 2.13), by the names
that their callers find them by. Without the first one a constructor's `trunc_normal_` is lost."""


COPIES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
"""Operators whose result has the values of their input, as in `copy.deepcopy` and `Module.half`."""


class PlainDispatch:
    """Comes before `TorchDispatchMode` among the bases of a mode whose calls torch shall not wrap
    (torch 2.13). The wrapper keeps torch.compile out of the mode, which takes as long as the mode.
    Under another name traces take longer."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fake_tensor_on_cpu(like: FakeTensor, meta: torch.Tensor) -> FakeTensor:
    """A fake tensor on the CPU of the same mode as `like`, which has no tensor's values, and with the
    storage of a meta tensor. The constructor takes three times as long."""
    made: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=torch.device("cpu")
    )
    vars(made).update(vars(like))
    return made


def varlen_operator() -> OpOverload:
    """The operator of `varlen_attn`, the attention of packed documents."""
    from torch.nn.attention import varlen  # noqa: F401 (registers the operator)

    operator: OpOverload = torch.ops.torch_attn._varlen_attn.default
    return operator


def version_of(tensor: torch.Tensor) -> int:
    """A counter of in-place changes. Without it a strategy for one rank cannot know whether its
    copies of weights are old."""
    return tensor._version


def storage_id(storage: torch.UntypedStorage) -> int:
    """Identifier of a storage, also of a fake one, which has no address."""
    return int(storage._cdata)


def is_mutable(operator: OpOverload) -> bool:
    """Whether an operator writes to one of its arguments."""
    return bool(operator._schema.is_mutable)


def argument_names(operator: OpOverload) -> list[str]:
    """The names of an operator's arguments."""
    return [argument.name for argument in operator._schema.arguments]


def tensor_without_data(kind: type[_Tensor], shape: torch.Size, *, dtype: torch.dtype) -> _Tensor:
    """A tensor of a subclass, on the CPU and without memory, whose operators all arrive in its
    `__torch_dispatch__`."""
    made: _Tensor = torch.Tensor._make_wrapper_subclass(
        kind, shape, dtype=dtype, device=torch.device("cpu")
    )
    return made


def spec_of(tensor: torch.Tensor) -> DTensorSpec | None:
    """Mesh, placements and shape of a DTensor; None of another tensor."""
    return getattr(tensor, "_spec", None)


def dtensor_of(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """A DTensor with this part on this rank, which `DTensor.from_local` would copy to the mesh's
    device."""
    from torch.distributed.tensor import DTensor

    wrap: Any = DTensor
    made: torch.Tensor = wrap(local, spec, requires_grad=False)
    return made


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that are not part of its state. Without it checkpoints
    cannot leave them out."""
    return module._non_persistent_buffers_set


def fake_store() -> dist.Store:
    """The store of the process group `fake`, whose collectives do nothing. Without it `launcher
    plan` and `auto` cannot trace several ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def all_groups() -> list[dist.ProcessGroup]:
    """All process groups of this rank."""
    return list(distributed_c10d._world.pg_map)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Sets the timeout of a group's later collectives."""
    distributed_c10d._set_pg_timeout(timeout, group)


def set_nccl_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Sets the timeout of NCCL alone, if the group has it: NCCL's watchdog ends the process."""
    gpu = torch.device("cuda")  # also a device of gloo, with the same backend as the CPU
    if gpu in group._device_types and (backend := group._get_backend(gpu)).name() == "nccl":
        backend._set_default_timeout(timeout)


def attention_choice(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    """The name of the kernel that `scaled_dot_product_attention` chooses for these tensors, such as
    FLASH_ATTENTION. Only the summary of a run shows it."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return "an unknown kernel"
    chosen = choose(query, key, key, mask, is_causal=is_causal, enable_gqa=enable_gqa)
    return SDPBackend(chosen).name


def varlen_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: tuple[int, int],
    *,
    key_bounds: torch.Tensor | None = None,
    longest_key: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator of `varlen_attn`: output, log-sum-exp of scores (heads, tokens), and the state of
    its random numbers, which the backward pass takes. Without it attention with sinks has a mask, and
    there is no ring. key_bounds, longest_key: of keys and values; None: those of queries."""
    forward = torch.ops.torch_attn._varlen_attn
    takes_groups = "enable_gqa" in {each.name for each in forward.default._schema.arguments}
    grouped = {"enable_gqa": True} if takes_groups else {}
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = forward(
        query,
        key,
        value,
        bounds,
        bounds if key_bounds is None else key_bounds,
        longest,
        longest if longest_key is None else longest_key,
        False,
        scale,
        list(window),
        **grouped,
    )
    return found


def varlen_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    state: torch.Tensor,
    scale: float,
    window: tuple[int, int],
    *,
    key_bounds: torch.Tensor | None = None,
    longest_key: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator of its backward pass: the gradients of query, key and value."""
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
        torch.ops.torch_attn._varlen_attn_backward(
            gradient,
            query,
            key,
            value,
            out,
            log_sum,
            bounds,
            bounds if key_bounds is None else key_bounds,
            longest,
            longest if longest_key is None else longest_key,
            False,
            state,
            scale,
            list(window),
        )
    )
    return found


def mark_dynamic(tensor: torch.Tensor, dimension: int) -> None:
    """Lets compiled functions take any size of this dimension. Without it they are compiled again
    for another size."""
    torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def is_tracing_graph() -> bool:
    """Whether `torch.compile` makes a graph of what is called, in this thread, also where a backend
    runs Python code on fake tensors for it. Without it checkpointed blocks that have a context of
    their own for recomputation cannot be compiled."""
    return TracingContext.try_get() is not None


def raise_recompile_limit(limit: int) -> None:
    """Sets how many variants of a function are compiled, if the limit is not higher. Without it,
    further variants than 8 run eager."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, limit)


# Optional names of torch


def draw_each_number_alone() -> None:
    """Makes compiled CUDA kernels draw each random number by the index of its element.

    From torch 2.13 on, one-dimensional kernels draw four numbers at once (pytorch#184377). Where the
    indices of a block are not consecutive, as in dropout after a transpose, groups of elements then
    get equal numbers, and a recomputation that is tiled otherwise draws other ones (pytorch#198333,
    open in November 2026). `align_random_eager` is no way out: `randn` is then uniform
    (pytorch#193938). Kernels in caches may have been compiled without this, so the key of the
    caches changes, too. torch 2.11 and 2.12 do not have the name, and draw each number alone.
    """
    from torch._inductor.codegen.triton import TritonOverrides

    if hasattr(TritonOverrides, "_can_use_4x_random"):
        overrides: Any = TritonOverrides
        overrides._can_use_4x_random = staticmethod(lambda: False)
        config: Any = torch.compiler.config
        if _RANDOM_TAG not in config.cache_key_tag:
            config.cache_key_tag += _RANDOM_TAG


_RANDOM_TAG = "+each_random_number_alone"
_FSDP_WAITS = ("wait_for_unshard", "post_backward", "finalize_backward")


def fsdp_groups(model: nn.Module) -> list[Any]:
    """FSDP's groups of parameters, each once: an FSDPParamGroup for each call of `fully_shard` on
    modules with parameters.

    torch 2.11 (`_fsdp_param_group`) and 2.13 (a list). Without it the result is empty, and
    `time_fsdp_waits` says what is lost.
    """
    states: dict[Any, None] = {}
    for module in model.modules():
        if callable(state_of := getattr(module, "_get_fsdp_state", None)):
            states[state_of()] = None
    groups = list[Any]()
    for state in states:
        groups += getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])
    return [group for group in groups if group is not None]


def time_fsdp_waits(model: nn.Module, timed: Callable[[Method], Method], *, blocking: bool) -> bool:
    """Replaces the methods of FSDP in which compute waits for all-gathers and reductions by
    `timed(method)`. `blocking`: collectives wait where they start.

    torch 2.11 to 2.13. If a method is missing, none is replaced, and the result is False: a part
    of the waits would be a wrong measurement.
    """
    groups = fsdp_groups(model)
    names = (*_FSDP_WAITS, "unshard") if blocking else _FSDP_WAITS
    missing = [name for name in names if not all(hasattr(group, name) for group in groups)]
    if missing or not groups:
        name = f"FSDPParamGroup.{missing[0]}" if groups else "FSDPState._fsdp_param_groups"
        log_missing(name, "communication_seconds and slow ranks are not measured")
        return False
    for group in groups:
        for name in names:
            setattr(group, name, timed(getattr(group, name)))
    return True


def after_fsdp_reductions(model: nn.Module, call: Callable[[Any], None]) -> bool:
    """Calls `call(group)` after the reduction of each of FSDP's groups has been started.

    torch 2.11 to 2.13, with what `copied_gradients` reads. Without it the result is False: FSDP sums
    gradients in host memory itself.
    """
    groups = fsdp_groups(model)
    for group in groups:
        parameters = getattr(group, "fsdp_params", [None])
        known = all(hasattr(parameter, "grad_offload_event") for parameter in parameters)
        if not known or not hasattr(group, "post_backward"):
            consequence = "FSDP adds offloaded gradients itself, and waits for each copy"
            log_missing("FSDPParamGroup.post_backward or FSDPParam.grad_offload_event", consequence)
            return False

    def followed(group: Any, start: Callable[..., None]) -> Callable[..., None]:
        def post_backward(*arguments: object) -> None:
            start(*arguments)
            call(group)

        return post_backward

    for group in groups:
        group.post_backward = followed(group, group.post_backward)
    return bool(groups)


def copied_gradients(group: Any) -> list[nn.Parameter]:
    """Parameters of one of FSDP's groups whose gradients are in host memory. Waits for the copies.

    torch 2.11 to 2.13; `after_fsdp_reductions` gives the group.
    """
    found = list[nn.Parameter]()
    for fsdp_param in group.fsdp_params:
        if fsdp_param.sharded_param.grad is None:
            continue
        if (copied := fsdp_param.grad_offload_event) is not None:
            copied.synchronize()
            fsdp_param.grad_offload_event = None
        found.append(fsdp_param.sharded_param)
    return found


def saved_by_partition(
    function: Callable[..., object], inputs: tuple[object, ...]
) -> list[tuple[int | None, int]]:
    """What a function on fake tensors saves for its backward pass if the default backend of
    `torch.compile` divides it into a forward and a backward pass.

    For each storage that is saved: the index among the flat inputs (None: the forward pass computes
    it) and its bytes.

    torch 2.11 to 2.13 (`torch._functorch`). Without it ImportError is raised, and a plan counts
    what autograd saves.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    saved: dict[Any, tuple[int | None, int]] = {}

    def partition(
        joint: Any, example: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[Any, Any]:
        forward, backward = min_cut_rematerialization_partition(
            joint, example, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
        )
        nodes = list(forward.graph.nodes)
        given = [node for node in nodes if node.op == "placeholder"]
        for output in nodes[-1].args[0][num_fwd_outputs:]:
            node = _base_of(output)
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                saved[node] = (given.index(node) if node in given else None, value.nbytes)
        return forward, backward

    aot_function(function, fw_compiler=lambda graph, _: graph, partition_fn=partition)(*inputs)
    return list(saved.values())


def _base_of(node: Any) -> Any:
    """The node of a graph that made the storage of this one's result."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        views = [a for a in schema.arguments if a.alias_info is not None] if schema else []
        if not views or any(view.alias_info.is_write for view in views):
            break
        node = node.args[0]
    return node


def stop_ddp_timing(ddp: nn.Module) -> None:
    """Keeps DDP from waiting for its timing events, which it does by default in each of its first
    ten iterations, and in every 100th.

    torch 2.11 to 2.13. Without it DDP waits.
    """
    stop = getattr(ddp, "_set_ddp_runtime_logging_sample_rate", None)
    if stop is None:
        name = "DistributedDataParallel._set_ddp_runtime_logging_sample_rate"
        log_missing(name, "DDP waits for its timing events in one of 100 steps")
    else:
        stop(2**31 - 1)


def is_reduced(ddp: nn.Module) -> bool:
    """Whether DDP has reduced all gradients in the backward pass before.

    torch 2.11 to 2.13. Without it the result is True: DDP fails in the next forward pass, after an
    update with the gradients of one rank.
    """
    check = getattr(ddp, "_check_reducer_finalized", None)
    if check is None:
        name = "DistributedDataParallel._check_reducer_finalized"
        log_missing(name, "unused parameters are noticed a step later")
        return True
    try:
        check()
    except RuntimeError:
        return False
    return True


def wait_for_pending_works(group: dist.ProcessGroup) -> None:
    """Waits for the collectives of a group, after which NCCL frees their tensors.

    torch 2.11 to 2.13. Without it NCCL frees them at its next collective.
    """
    wait = getattr(group, "_wait_for_pending_works", None)
    if wait is None:
        name = "ProcessGroup._wait_for_pending_works"
        log_missing(name, "DDP takes memory for a copy of all gradients in the second step")
    else:
        wait()


def flight_recorder() -> bytes | None:
    """The last collectives, as `torchfrtrace` reads them: of NCCL, or of gloo without it; None: not
    recorded.

    torch 2.11 to 2.13. Without it the report of a hang lacks them.
    """
    name = "_dump_nccl_trace" if torch.cuda.is_available() else "_dump_fr_trace"
    try:
        return bytes(getattr(torch._C._distributed_c10d, name)())
    except Exception:  # it may be missing or raise anything
        return None


def record_memory_history(*, on: bool) -> None:
    """Starts or ends the record of CUDA allocations that a memory snapshot contains.

    torch 2.11 to 2.13. Without it a snapshot has no history.
    """
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None:
        name = "cuda.memory._record_memory_history"
        log_missing(name, "memory snapshots have no history")
    elif on:
        record()
    else:
        record(enabled=None)


def dump_memory_snapshot(file: str) -> bool:
    """Writes a snapshot of the CUDA memory, for pytorch.org/memory_viz. Returns whether torch can.

    torch 2.11 to 2.13. Without it there is no snapshot. Raises OSError or RuntimeError if it
    cannot be written.
    """
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if dump is None:
        log_missing("cuda.memory._dump_snapshot", "no memory snapshot is written")
        return False
    dump(file)
    return True


def clear_cublas_workspaces() -> None:
    """Frees the workspaces of cuBLAS.

    torch 2.11 to 2.13. Without it a measurement of memory counts them.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # missing in CPU builds
    if clear is None:
        name = "_C._cuda_clearCublasWorkspaces"
        log_missing(name, "measured memory includes the workspaces of cuBLAS")
    else:
        clear()


def compile_counters() -> Mapping[str, Counter[str]]:
    """What dynamo has counted: graphs, reasons of graph breaks, functions that it left eager.

    torch 2.11 to 2.13. Without it the log does not say what was compiled.
    """
    try:
        from torch._dynamo.utils import counters
    except ImportError:
        log_missing("_dynamo.utils.counters", "compiled graphs and graph breaks are not counted")
        return defaultdict(Counter)
    return counters


@contextmanager
def compilation_observed(
    begins: Callable[[object], None], ends: Callable[[object], None]
) -> Iterator[None]:
    """A context in which `begins` and `ends` are called around each compilation.

    torch 2.11 to 2.13. Without it compilation counts as a part of the step, also for
    `run.hang_timeout`.
    """
    try:
        from torch._dynamo.callback import callback_handler as handler
    except ImportError:
        name, counts = "_dynamo.callback.callback_handler", "compilation is not timed"
        log_missing(name, f"{counts}, and counts for run.hang_timeout")
        yield
        return
    handler.register_start_callback(begins)
    handler.register_end_callback(ends)
    try:
        yield
    finally:
        handler.remove_start_callback(begins)
        handler.remove_end_callback(ends)


# A name of Python's multiprocessing, read in Python 3.11 to 3.14


def handle_queue_errors(handle: Callable[[queues.Queue[Any], Exception, Any], None]) -> None:
    """Has this process call a function for each object that a queue cannot pass on, with the queue,
    the error and the object. Without it Python prints a traceback and drops the object, and the rank
    waits for a micro-batch for ever."""
    queues.Queue._on_queue_feeder_error = handle  # type: ignore[attr-defined]


# Names of transformers, which its models use as an interface: classes of models define these
# attributes. Read in transformers 5.17 and 5.23. A user's own model may lack them


def attention_implementation(model: nn.Module) -> str | None:
    """The name of the attention that a model, or its text model, uses, such as `sdpa`; None: it has
    none to choose.

    Without it packed rows and padded rows are computed with a mask.
    """
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return getattr(config if text is None else text(decoder=True), "_attn_implementation", None)


class KernelFunction(NamedTuple):
    """A function of a model's module for which a package has a kernel."""

    call: Any
    """Calls the kernel if the package is installed."""
    operators: Any
    """The same in PyTorch's operators."""
    package: str
    installed: bool


def kernel_functions(module: ModuleType) -> dict[str, KernelFunction]:
    """The functions of a model's module with kernels of other packages (flash-linear-attention,
    mamba-ssm, causal-conv1d), by name. Without it a model on the meta device would launch kernels
    on null addresses, and no run would name a missing package."""
    found: dict[str, KernelFunction] = {}
    for name, function in vars(module).items():
        if not inspect.isfunction(function) or not hasattr(function, "__wrapped__"):
            continue
        known = inspect.getclosurevars(function).nonlocals
        if "is_new_implementation" in known:
            installed = bool(known["is_new_implementation"])
            package = {"fla": "flash-linear-attention"}.get(known["package"], known["package"])
            found[name] = KernelFunction(
                function, function.__wrapped__, package.replace("_", "-"), installed
            )
    return found


def replace_deepstack(text: nn.Module, add: Callable[..., torch.Tensor]) -> None:
    """Replaces the method of Qwen3-VL's text model that adds features of a tower to hidden states.
    Without it such models cannot be trained on attachments: an AssertionError."""
    assert hasattr(text, "_deepstack_process"), type(text).__name__
    text._deepstack_process = add  # type: ignore[assignment]


@contextmanager
def without_block_mask() -> Iterator[None]:
    """A context in which Pixtral's tower makes no mask of patches x patches, for attention that has the
    bounds of attachments. Without it Mistral 3 cannot be trained on these: an AssertionError."""
    from transformers.models.pixtral import modeling_pixtral

    name = "generate_block_attention_mask"
    assert hasattr(modeling_pixtral, name), name
    before = getattr(modeling_pixtral, name)
    setattr(modeling_pixtral, name, lambda *arguments: None)
    try:
        yield
    finally:
        setattr(modeling_pixtral, name, before)


def block_classes(model: nn.Module) -> set[str]:
    """Names of the classes of a model's repeated blocks. Without it no model has blocks, which
    sharding, checkpointing and compilation need."""
    return set(getattr(model, "_no_split_modules", None) or ())


def initializes_weights(model: nn.Module) -> bool:
    """Whether a model has code for `initialize_weights`. Other modules have a
    `reset_parameters()`. A method of this name without an argument initializes only the module that
    it is called on, and the model around it calls it (MiniCPM-V)."""
    draw = getattr(model, "_init_weights", None)
    return callable(draw) and bool(inspect.signature(draw).parameters)


def initialize_weights(model: nn.Module, module: nn.Module) -> None:
    """Draws the weights of a module with the code of the model around it. Without it no model
    starts from random weights, nor one with a new head."""
    draw: Any = model._init_weights
    draw(module)


def is_stateful(model: nn.Module) -> bool:
    """Whether a model carries a state from token to token beside attention. Without it packed rows
    of such a model would mix documents: only `layer_types` would refuse them."""
    return bool(getattr(model, "_is_stateful", False))


def expert_plan(model: nn.Module) -> dict[str, str]:
    """transformers' plan for expert parallelism: styles by patterns of names. Without it
    `strategy.expert_parallel_size` is refused."""
    return getattr(model, "_ep_plan", None) or {}


def may_be_missing(model: Any) -> Collection[str]:
    """Patterns of weights that a checkpoint need not have. Without it, and without the next one,
    some checkpoints are refused."""
    return model._keys_to_ignore_on_load_missing or ()


def may_be_unexpected(model: Any) -> Collection[str]:
    """Patterns of weights of a checkpoint that the model does not need."""
    return model._keys_to_ignore_on_load_unexpected or ()


def names_not_saved(model: Any) -> Collection[str]:
    """Names of weights that an export leaves out."""
    return model._keys_to_ignore_on_save or ()


GENERATION_IS_DERIVED = "_from_model_config"
"""Attribute and key of a generation config that transformers made of the model's config. Under
another name an export may lose the ends that training has added."""


def keep_generation_config(config: Any) -> None:
    """Marks a generation config as set by hand: else transformers may compute it again."""
    setattr(config, GENERATION_IS_DERIVED, False)


def names_in_float32(model: Any, dtype: torch.dtype) -> Collection[str]:
    """Parts of the names of weights that stay in float32 where a model is cast to this dtype, in an
    export too. Without it they are rounded."""
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    return names


def grouped_product(inputs: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product of tokens (tokens, in), sorted by expert, with weights (experts, in, out);
    `ends` are the ends of each expert's tokens. Without it experts are not trained in NF4."""
    # Of the module, not of the package: torch 2.11 cannot compile imports from lazy modules
    from transformers.integrations.moe import _grouped_mm

    product: torch.Tensor = _grouped_mm(inputs, weight, offs=ends)
    return product


def apply_gate(experts: Any, up: torch.Tensor) -> torch.Tensor:
    """The gated activation of a module of experts. Without it experts are not trained in NF4."""
    gated: torch.Tensor = experts._apply_gate(up)
    return gated


def grouped_product_check() -> tuple[Any, str]:
    """The module and the name of the function that decides whether a grouped product has a kernel
    here; a plan replaces it. Without it the plan counts the memory of the loop over experts."""
    from transformers.integrations import moe

    return moe, "_can_use_grouped_mm"
