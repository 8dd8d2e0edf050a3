"""Private names of torch and transformers stand in one module, and the installed versions have them."""

import ast
import functools
import multiprocessing
import queue
from multiprocessing import queues
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from launcher.libraries import private
from tests import REPOSITORY

PACKAGE = REPOSITORY / "launcher"
LIBRARIES = ("torch", "transformers", "torchao", "peft", "triton")

ALLOWED = {
    "_parameters": "how a module of torch holds its parameters; assigning one otherwise registers it",
    "_buffers": "the same for buffers",
    "_replace": "of a NamedTuple: public, by Python's documentation",
    "_asdict": "of a NamedTuple",
    "_exit": "os._exit",
    "_current_frames": "sys._current_frames",
    "_mmap": "of numpy.memmap",
}
"""Names that other modules may use, with the reason."""
ALLOWED_TEXTS = ("torch.utils._pytree",)
"""A logger, named in console.py, which must not import torch."""


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def trees():
    """The modules of the launcher but the one that holds the names, by file."""
    here = PACKAGE / "libraries/private.py"
    return {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py") if file != here}


@functools.cache
def own_names():
    """Everything that the launcher defines itself."""
    names = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if ast.unparse(node.value) == "self":  # else it may be an object of a library
                    names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


@functools.cache
def names_of_models():
    """What the classes of models define, which a tuple of keys for `getattr` may name."""
    from transformers import GenerationConfig, PreTrainedModel

    return {*dir(PreTrainedModel), *vars(GenerationConfig())} - own_names()


def uses(tree):
    """Yields the line and text of each use of a private name of a library."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute):
            # A name like one of ours counts if it is looked up in a library
            of_library = ast.unparse(node.value).split(".")[0] in (*LIBRARIES, "dist", "aten")
            if of_library or node.attr not in own_names():
                names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIBRARIES):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.startswith(LIBRARIES)]
            names = [part for module in modules for part in module.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("getattr", "hasattr", "setattr", "delattr", "replaced.set")
        ):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            names = [text for text in texts if isinstance(text, str)]
            names = [name for name in names if name not in own_names()]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            dotted = node.value.replace(".", "").isidentifier()
            if node.value.startswith(LIBRARIES) and dotted and node.value not in ALLOWED_TEXTS:
                names = node.value.split(".")
            elif is_private(node.value) and node.value in names_of_models():
                names = [node.value]
        if any(is_private(name) and name not in ALLOWED for name in names):
            yield f"{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


@pytest.mark.slow
def test_only_one_module_uses_private_names():
    found = [
        f"{file.relative_to(REPOSITORY)}:{use}"
        for file, tree in trees().items()
        for use in uses(tree)
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "torch._foreach_copy_(a, b)",
        "tensor._version",
        "from torch._ops import OpOverload",
        "from torch.nn.modules.batchnorm import _NormBase",
        "import torch._dynamo",
        "getattr(model, '_no_split_modules', None)",
        "queues.Queue._on_queue_feeder_error = handle",
        "keys = ('_keep_in_fp32_modules',)",
        "stored.pop('_from_model_config')",
        "replaced.set(moe, '_can_use_grouped_mm', grouped)",
        "logging.getLogger('torch._subclasses.fake_tensor')",
        "aten._to_copy.default",
    ],
)
def test_uses_are_found(code):
    assert list(uses(ast.parse(code)))


@pytest.mark.slow
def test_the_allowed_names_are_used():
    text = "\n".join(ast.unparse(tree) for tree in trees().values())
    assert [name for name in ALLOWED if f".{name}" not in text] == []


OPTIONAL = [
    (FSDPModule, "_get_fsdp_state"),
    (FSDPParamGroup, "wait_for_unshard"),
    (FSDPParamGroup, "post_backward"),
    (FSDPParamGroup, "finalize_backward"),
    (FSDPParamGroup, "unshard"),
    (DistributedDataParallel, "_set_ddp_runtime_logging_sample_rate"),
    (dist.ProcessGroup, "_wait_for_pending_works"),
    (torch._C._distributed_c10d, "_dump_fr_trace"),
    (torch.cuda.memory, "_record_memory_history"),
    (torch.cuda.memory, "_dump_snapshot"),
    (torch, "_fused_sdp_choice"),
]
"""Names without which a run trains on; `tests/unit/libraries` tests that."""


@pytest.mark.parametrize(("owner", "name"), OPTIONAL, ids=[name for _, name in OPTIONAL])
def test_torch_has_the_optional_names(owner, name):
    assert callable(getattr(owner, name))


def test_torch_has_the_operators():
    assert len(private.ATTENTION_OPERATORS) == len(private._KERNELS)
    names = "FLASH_ATTENTION EFFICIENT_ATTENTION MATH_ATTENTION FLOAT8_PRODUCT CAST SAFE_SOFTMAX"
    names += " SOFTMAX_BACKWARD fused_adamw_ fused_sgd_"
    assert [name for name in names.split() if not callable(getattr(private, name))] == []
    assert private._overload("_operator_of_the_past") is None


def test_torch_has_what_only_cuda_builds_have():
    if torch.version.cuda is None:
        pytest.skip("a CPU build of torch")
    assert callable(torch._C._cuda_clearCublasWorkspaces)
    assert hasattr(torch._C._distributed_c10d, "_dump_nccl_trace")


class Dispatching(torch.Tensor):
    __torch_function__ = private.DISABLED_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, *arguments):
        raise NotImplementedError


def test_torch_has_the_names_of_tensors_and_modules():
    tensor = torch.zeros(2)
    before = private.version_of(tensor)
    tensor.add_(1)
    assert private.version_of(tensor) == before + 1
    assert private.storage_id(tensor.untyped_storage()) == private.storage_id(
        tensor[1:].untyped_storage()
    )
    assert private.spec_of(tensor) is None
    add = torch.ops.aten.add_.Tensor
    assert private.is_mutable(add)
    assert private.argument_names(add) == ["self", "other", "alpha"]
    assert not private.is_mutable(private.varlen_operator())
    rotary = nn.Module()
    rotary.register_buffer("frequencies", tensor, persistent=False)
    assert private.non_persistent_buffers(rotary) == {"frequencies"}
    wrapped = private.checkpoint_wrapper(nn.Linear(1, 1))
    assert isinstance(wrapped, private.CheckpointWrapper)
    assert [name for name, _ in wrapped.named_children()] == [private.CHECKPOINT_PREFIX]
    made = private.tensor_without_data(Dispatching, torch.Size([2, 3]), dtype=torch.float16)
    assert (made.shape, made.dtype) == ((2, 3), torch.float16)
    query = torch.zeros(1, 1, 4, 8)
    choice = private.attention_choice(query, query, None, is_causal=True, enable_gqa=False)
    assert choice in torch.nn.attention.SDPBackend.__members__
    with private.FakeTensorMode():
        fake = torch.zeros(2).add(1)
        assert fake.shape == (2,)
        again = private.fake_tensor_on_cpu(fake, torch.empty(3, device="meta"))
        assert (again.shape, again.device.type, again.add(1).device.type) == ((3,), "cpu", "cpu")


def test_torch_has_the_names_of_process_groups():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (group,) = private.all_groups()
        private.set_group_timeout(group, private.timedelta(seconds=100))
        private.set_nccl_timeout(group, private.timedelta(seconds=100))
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        whole = dist.tensor.DTensor.from_local(torch.ones(2), mesh, [dist.tensor.Shard(0)])
        again = private.dtensor_of(torch.zeros(2), private.spec_of(whole))
        assert isinstance(again, dist.tensor.DTensor)
        assert again.full_tensor().tolist() == [0.0, 0.0]
    finally:
        dist.destroy_process_group()
    dist.init_process_group("fake", store=private.fake_store(), rank=0, world_size=2)
    dist.destroy_process_group()


def test_torch_has_the_names_of_compilation():
    seen, tracing = [], []

    def backend(graph, inputs):
        tracing.append(private.is_tracing_graph())
        return graph

    private.raise_recompile_limit(8)
    with private.compilation_observed(
        lambda _: seen.append("begins"), lambda _: seen.append("ends")
    ):
        compiled = torch.compile(lambda tensor: tensor + 1, backend=backend)
        tensor = torch.zeros(3)
        private.mark_dynamic(tensor, 0)
        compiled(tensor)
    assert seen[:2] == ["begins", "ends"]
    assert (tracing, private.is_tracing_graph()) == ([True], False)
    assert private.compile_counters()["stats"]["unique_graphs"] >= 1


def test_python_calls_the_function_for_objects_that_a_queue_cannot_pass_on(monkeypatch):
    monkeypatch.setattr(queues.Queue, "_on_queue_feeder_error", None)  # fails if there is none
    refused = queue.SimpleQueue()
    private.handle_queue_errors(lambda _, error, dropped: refused.put((type(error), dropped)))
    waiting = multiprocessing.get_context("spawn").Queue()
    unpicklable = lambda: None  # noqa: E731
    waiting.put(unpicklable)
    kind, dropped = refused.get(timeout=60)
    assert (issubclass(kind, Exception), dropped) == (True, unpicklable)
    waiting.close()
    waiting.join_thread()


def test_transformers_has_the_names():
    import transformers
    from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

    config = MixtralConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        vocab_size=16,
    )
    model = MixtralForCausalLM(config)
    assert private.attention_implementation(model) == "sdpa"
    assert private.attention_implementation(nn.Linear(1, 1)) is None
    assert private.block_classes(model) == {"MixtralDecoderLayer"}
    assert private.expert_plan(model)
    assert private.initializes_weights(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.lm_head._is_hf_initialized = False
    private.initialize_weights(model, model.lm_head)
    assert model.lm_head.weight.any()
    assert not private.is_stateful(model)
    assert hasattr(PreTrainedModel, "_is_stateful")
    for names in (
        private.may_be_missing,
        private.may_be_unexpected,
        private.names_not_saved,
        lambda model: private.names_in_float32(model, torch.float16),
    ):
        assert not set(names(model)) & set(model.state_dict())
    assert model.generation_config.to_dict()[private.GENERATION_IS_DERIVED] is True
    private.keep_generation_config(model.generation_config)
    assert model.generation_config.to_dict()[private.GENERATION_IS_DERIVED] is False
    module, name = private.grouped_product_check()
    assert callable(getattr(module, name))
    tokens, weight = torch.ones(4, 8), torch.ones(2, 8, 8)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    assert private.grouped_product(tokens, weight, ends).tolist() == [[8.0] * 8] * 4
    # Blocks are compiled as one graph. torch 2.11 cannot trace imports from lazy modules
    compiled = torch.compile(private.grouped_product, backend="eager", fullgraph=True)
    assert compiled(tokens, weight, ends).tolist() == [[8.0] * 8] * 4
    assert hasattr(transformers.Qwen3VLTextModel, "_deepstack_process")
    experts = model.model.layers[0].mlp.experts
    assert private.apply_gate(experts, torch.ones(3, 16)).shape == (3, 8)


@pytest.mark.parametrize("missing", ["post_backward", "grad_offload_event"])
def test_fsdp_sums_gradients_itself_where_a_name_is_missing(monkeypatch, missing):
    """What only saves time is optional."""
    parameter = SimpleNamespace(sharded_param=None, grad_offload_event=None)
    group = SimpleNamespace(post_backward=lambda: None, fsdp_params=[parameter])
    monkeypatch.setattr(private, "fsdp_groups", lambda model: [group])
    assert private.after_fsdp_reductions(nn.Linear(1, 1), lambda group: None) is True
    delattr(parameter if missing == "grad_offload_event" else group, missing)
    before = dict(vars(group))
    assert private.after_fsdp_reductions(nn.Linear(1, 1), lambda group: None) is False
    assert vars(group) == before
