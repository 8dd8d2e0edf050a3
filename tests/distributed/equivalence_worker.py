"""Trains one tiny model in many configurations on up to four ranks, and in the plain loop.

    torchrun --nproc-per-node 4 equivalence_worker.py FOLDER PART quick|all

PART is one of PARTS. Without `all` the configurations in LONG are left out. Reads train.jsonl from FOLDER and writes losses, gradient
norms and deviations to results.json.
"""

import dataclasses
import functools
import hashlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.data.loader import StepStatistics
from launcher.distributed.process_group import gather
from launcher.distributed.rank_layout import RankLayout
from launcher.models import head as head_module
from launcher.models.initialization import random_weights
from launcher.models.names import clean_name
from launcher.objectives.next_token import NextToken
from launcher.optimizers import offload as optimizer_offload
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import CpuOffload, Strategy
from launcher.strategies.wrap import Parts, wrap
from launcher.training.evaluation import over_all
from launcher.training.setup import assemble
from tests.distributed import plain_loop
from tests.distributed.launching import end_worker
from tests.unit.models.odd_model import Odd

STEPS, BATCH = 6, 16


def dynamic_fine_tuning(logits, targets):
    losses = cross_entropy(logits, targets, reduction="none")
    return (-losses).exp().detach() * losses


def focal(logits, targets):
    losses = cross_entropy(logits, targets, reduction="none")
    return (1 - (-losses).exp()) ** 1.5 * losses


def label_smoothing(logits, targets):
    return cross_entropy(logits, targets, reduction="none", label_smoothing=0.2)


LLAMA = (
    "{model_type: llama, vocab_size: 64, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, \
num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: false}"
)
GPT2 = (
    "{model_type: gpt2, vocab_size: 64, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 64, resid_pdrop: 0.1, embd_pdrop: 0.1, \
attn_pdrop: 0.1}"
)
EXPERTS = "{model_type: mixtral, vocab_size: 64, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, \
num_key_value_heads: 2, max_position_embeddings: 64, num_local_experts: 4, output_router_logits: true, router_aux_loss_coef: 1.0}"
BASE = """
run: {name: equivalence, max_steps: 6, seed: 7}
model: {config: %s}
data: {kind: tokens, train: FOLDER/train.jsonl, sequence_length: 32, packing: false, shuffle: false, workers: 0}
batch: {global_batch_size: 16, micro_batch_size: 1}
strategy: {mixed_precision: null}
optimizer: {learning_rate: 2.0e-3}
schedule: {warmup_steps: 3}
"""
CHECKPOINTING = ("{mode: full}", "{mode: selective}", "{mode: selective, budget: 0.6}")
OFFLOAD = ["strategy.cpu_offload={pin_memory: true}", "activation_checkpointing={mode: full}"]
STRATEGIES = {
    "ddp": ["strategy.kind=ddp"],
    "fsdp": ["strategy.kind=fsdp"],
    "offload": ["strategy.kind=fsdp", *OFFLOAD],
}
SYNCS = {
    1: [(1, True), (4, True)],
    2: [(4, True), (4, False)],
    4: [(1, True), (4, True), (4, False)],
}
"""Micro-batches per step, and strategy.sync_every_micro_batch, by number of ranks."""
ZERO = ["strategy.kind=ddp", "strategy.shard_optimizer=true"]
OPTIMIZERS = {
    "bfloat16": ["optimizer.state_dtype=bfloat16"],
    "int8": ["optimizer.state_dtype=int8"],
    "sgd": ["optimizer.name=sgd", "optimizer.learning_rate=0.03"],
    "adafactor": ["optimizer.name=adafactor"],
    "muon": ["optimizer.name=muon", "optimizer.momentum=0.95"],
    "lion": ["optimizer.name=lion", "optimizer.learning_rate=3e-4"],
}
STATE = "strategy.cpu_offload={what: optimizer}"
IN_FILES = "strategy.cpu_offload={what: optimizer, optimizer_path: FOLDER/state}"
OFFLOADED = {
    "state ranks=1": ([STATE], 1),
    "state ranks=4": ([STATE], 4),
    "state, hybrid": ([STATE, "strategy.replicate=2"], 4),
    "state, int8": ([STATE, OPTIMIZERS["int8"][0]], 2),
    "state, sgd": ([STATE, *OPTIMIZERS["sgd"]], 2),
    "state, lion": ([STATE, *OPTIMIZERS["lion"]], 2),
    "in files ranks=2": ([IN_FILES], 2),
    "in files, int8": ([IN_FILES, OPTIMIZERS["int8"][0]], 2),
    "all, in files": (["strategy.cpu_offload={optimizer_path: FOLDER/state}"], 2),
}
"""Overrides and number of ranks. Each step has two micro-batches."""
SHARDINGS = {
    "ddp ranks=1": (STRATEGIES["ddp"], 1),
    "ZeRO-1 ranks=4": (ZERO, 4),
    "fsdp ranks=4": (STRATEGIES["fsdp"], 4),
    "offload ranks=2": (STRATEGIES["offload"], 2),
}
OWN = {
    "dynamic_fine_tuning": (dynamic_fine_tuning, "null"),
    "focal": (focal, "{gamma: 1.5}"),
    "label_smoothing": (label_smoothing, "{amount: 0.2}"),
}
"""Label smoothing and a user's losses, as the plain loop computes them from full logits, and their arguments."""
OWN_RUNS = {
    "ddp": (STRATEGIES["ddp"], 1),
    "fsdp": (STRATEGIES["fsdp"], 4),
    "packed": ([*STRATEGIES["fsdp"], "data.packing=true", "activation_checkpointing={}"], 2),
    "context": ([*STRATEGIES["fsdp"], "strategy.context_parallel_size=2"], 4),
    "tensor": ([*STRATEGIES["fsdp"], "strategy.tensor_parallel_size=2"], 4),
}
LONG = {
    *("fsdp ranks=1 accumulation=1 sync=True", "offload ranks=1 accumulation=1 sync=True"),
    *("fsdp ranks=4 accumulation=1 sync=True", "offload ranks=4 accumulation=1 sync=True"),
    *("fsdp ranks=2 accumulation=4 sync=False", "offload ranks=2 accumulation=4 sync=False"),
    *("kept gathered, held back", "hybrid 2x2 held back", "not resharded after forward"),
    *("every second block", "ddp selective", "ddp budget", "loader processes"),
    *("ddp ranks=4 accumulation=1 sync=True", "ddp ranks=2 accumulation=4 sync=False"),
    *("fsdp ranks=2 accumulation=4 sync=True", "offload ranks=2 accumulation=4 sync=True"),
    *("fsdp ranks=1 accumulation=4 sync=True", "offload ranks=4 accumulation=4 sync=False"),
    *("ZeRO-1 ranks=1", "ZeRO-1 ranks=2"),
    *("mutation: held back offload", "mutation: mean of means fsdp"),
    *("mutation: mean of means offload", "mutation: held back ddp"),
    *OFFLOADED,
    *(f"{name} {where}" for name in OPTIMIZERS for where in SHARDINGS),
    *(f"{what} {strategy}" for what in ("float16", "overflow") for strategy in ("ddp", "offload")),
    "experts offload",
    *(f"{name} {where}" for name in OWN for where in ("ddp", "context", "tensor")),
    *(
        f"{name} {where}"
        for name in ("dynamic_fine_tuning", "label_smoothing")
        for where in OWN_RUNS
    ),
    *(f"dropout ddp {mode}" for mode in ("null", *CHECKPOINTING)),
}
"""Configurations of the long tests only."""
INITIAL = {"ddp": {"kind": "ddp"}, "fsdp": {}, "offload": {"cpu_offload": CpuOffload()}}


def unsharded(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def weights(training):
    parameters = training.wrapped.module.named_parameters()
    return whole({clean_name(name): parameter for name, parameter in parameters}, training.ranks)


def whole(tensors, ranks):
    """The whole tensors of all stages of a pipeline, or of all ranks."""
    found = {name: unsharded(tensor).clone() for name, tensor in tensors.items()}
    if ranks.pipeline_parallel_size > 1:
        for other in gather(found, ranks.group):
            found = other | found
    return found


class Worker:
    def __init__(self, folder, amount="all"):
        self.left_out = LONG if amount == "quick" else ()
        dist.init_process_group("gloo")
        self.folder, self.rank = folder, dist.get_rank()
        sizes = range(1, dist.get_world_size() + 1)
        self.groups = {size: dist.new_group(list(range(size))) for size in sizes}
        self.results = {}
        self.initial = self.plain = None

    def recipe(self, overrides, ranks, accumulation, config=LLAMA):
        file = self.folder / f"recipe_{self.rank}.yaml"
        file.write_text((BASE % config).replace("FOLDER", str(self.folder)))
        micro = BATCH // ranks // accumulation
        return load_recipe(
            [f"recipe={file}", f"batch.micro_batch_size={micro}", *overrides], ranks=ranks
        ).recipe

    def train(
        self,
        name,
        overrides,
        *,
        ranks=4,
        accumulation=1,
        config=LLAMA,
        mutate=None,
        before_step=None,
        compare=True,
        evaluate=False,
    ):
        """Trains and stores losses, gradient norms, and deviations of the weights.

        Initial weights are compared with the first run, final weights with the plain loop.
        """
        if name in self.left_out:
            return
        note, started = {}, time.process_time()
        if self.rank < ranks:
            data_parallel = RankLayout(
                rank=self.rank, size=ranks, group=self.groups[ranks], device=torch.device("cpu")
            )
            try:
                training = assemble(
                    self.recipe(overrides, ranks, accumulation, config),
                    ranks=data_parallel,
                    build_data=self.rank == 0,
                )
                start = weights(training)
                if mutate is not None:
                    mutate(training)
                losses, norms, skipped = [], [], []
                for step in training.all_steps:
                    if before_step is not None:
                        before_step(step.number + 1, training)
                    loss = step.loss.clone()
                    dist.all_reduce(loss, group=self.groups[ranks])
                    losses.append(loss.item())
                    norms.append(step.grad_norm.item())
                    skipped.append(int(step.skipped.item()))
                end = weights(training)
                note = {"losses": losses, "norms": norms, "skipped": skipped}
                if evaluate:
                    whole = over_all(training.evaluator.evaluate(training.wrapped))
                    note["evaluation"] = [whole.loss, whole.tokens, *whole.scores.values()]
                self.after(note, training)
                if self.initial is None:
                    self.initial = start
                    self.run_plain_loop(training)
                if compare:
                    note["initial"] = max(
                        (start[k] - self.initial[k]).abs().max().item() for k in start
                    )
                    note["final"] = max(
                        (end[k] - self.plain["weights"][k]).abs().max().item() for k in end
                    )
                self.last = end
            except (RuntimeError, ValueError) as error:
                if mutate is None:
                    raise
                note = {"error": repr(error)}
        dist.barrier()
        self.results[name] = note
        if self.rank == 0:
            print(f"{time.process_time() - started:.2f} CPU s  {name}")

    def after(self, note, training):
        """A subclass adds results."""

    def plain_loop(self, **more):
        """The untrained model, trained by the plain loop; the rows, losses and norms."""
        plain = self.plain_model()
        plain.load_state_dict(self.initial)
        rows = plain_loop.read_rows(self.folder / "train.jsonl")
        losses, norms = plain_loop.train(
            plain,
            rows,
            steps=STEPS,
            batch=BATCH,
            learning_rate=2e-3,
            warmup=3,
            min_ratio=0.1,
            weight_decay=0.1,
            **more,
        )
        return plain, rows, losses, norms

    def run_plain_loop(self, training):
        model = type(training.wrapped.module)
        config = training.wrapped.module.config
        from transformers import LlamaForCausalLM

        assert issubclass(model, LlamaForCausalLM)
        self.plain_model = functools.partial(LlamaForCausalLM, config)
        plain, rows, losses, norms = self.plain_loop()
        self.plain = {"losses": losses, "norms": norms, "weights": dict(plain.named_parameters())}
        self.results["plain"] = {
            "losses": losses,
            "norms": norms,
            "evaluation": evaluation_of(plain, rows),
        }


def evaluation_of(plain, rows):
    with torch.no_grad():
        plain.eval()
        total = tokens = 0
        for row in rows:
            labels = (row.get("labels") or row["input_ids"])[1:]
            count = sum(label != -100 for label in labels)
            if count:
                total += plain_loop.mean_loss(plain, [row]).item() * count
                tokens += count
    return [total / tokens, tokens]


def mean_of_means(training):
    """Injects a common mistake: averages the mean losses of the micro-batches."""
    original = NextToken.loss

    def mean(self, model, micro_batch):
        return original(self, model, micro_batch) / micro_batch.counted.sum()

    NextToken.loss = mean
    StepStatistics.loss_weight = lambda self: torch.tensor(
        16.0
    )  # 8 micro-batches of one row on each of two ranks


def skip_one_sync(training):
    """Injects a fault: gradients are not synchronized in the last micro-batch of step 3."""
    wrapped, original, seen = training.wrapped, training.wrapped.micro_batch, [0]

    def micro_batch(*, last):
        seen[0] += last
        return original(last=last and seen[0] != 3)

    wrapped.micro_batch = micro_batch


def compare_strategies(worker):
    train = worker.train
    for strategy, overrides in STRATEGIES.items():
        for ranks, ways in SYNCS.items():
            for accumulation, sync in ways:
                name = f"{strategy} ranks={ranks} accumulation={accumulation} sync={sync}"
                sync_override = f"strategy.sync_every_micro_batch={str(sync).lower()}"
                train(name, [*overrides, sync_override], ranks=ranks, accumulation=accumulation)
    fsdp = ["strategy.kind=fsdp"]
    for name, overrides in {
        "kept gathered": ["strategy.reshard_after_backward=false"],
        "kept gathered, held back": [
            "strategy.reshard_after_backward=false",
            "strategy.sync_every_micro_batch=false",
        ],
        "not resharded after forward": ["strategy.reshard_after_forward=false"],
        "selective": ["activation_checkpointing={mode: selective}"],
        "budget": ["activation_checkpointing={mode: selective, budget: 0.4}"],
        "every second block": ["activation_checkpointing={mode: full, every_n_blocks: 2}"],
        "activations offloaded": ["activation_checkpointing={mode: full, offload_to_cpu: true}"],
        "kept logits": ["model.keep_logits=true"],
        "loader processes": ["data.workers=2"],
    }.items():
        train(name, [*fsdp, *overrides], ranks=2, accumulation=4)
    selective = ["activation_checkpointing={mode: selective, offload_to_cpu: true}"]
    train("ddp selective", ["strategy.kind=ddp", *selective], ranks=2, accumulation=2)
    budget = ["activation_checkpointing={mode: selective, budget: 0.4}"]
    train("ddp budget", ["strategy.kind=ddp", *budget], ranks=2, accumulation=2)
    hybrid = [*fsdp, "strategy.replicate=2"]
    train("hybrid 2x2", hybrid, accumulation=2)
    train(
        "hybrid 2x2 held back", [*hybrid, "strategy.sync_every_micro_batch=false"], accumulation=2
    )
    for ranks in (1, 2, 4):
        train(f"ZeRO-1 ranks={ranks}", ZERO, ranks=ranks, accumulation=2)
    weighted = ["data.weights_column=worth", f"data.validation={worker.folder}/train.jsonl"]
    for strategy, ranks, accumulation in (("ddp", 1, 1), ("ddp", 4, 2), ("fsdp", 2, 8)):
        train(
            f"weighted {strategy} ranks={ranks}",
            [*STRATEGIES[strategy], *weighted],
            ranks=ranks,
            accumulation=accumulation,
            compare=False,
            evaluate=True,
        )
    evaluations(worker)
    # Injected faults come last, because they patch the launcher
    for strategy, overrides in STRATEGIES.items():
        train(
            f"mutation: held back {strategy}",
            [*overrides, "strategy.sync_every_micro_batch=false"],
            ranks=2,
            accumulation=4,
            mutate=skip_one_sync,
        )
    originals = NextToken.loss, StepStatistics.loss_weight
    for strategy, overrides in STRATEGIES.items():
        train(
            f"mutation: mean of means {strategy}",
            overrides,
            ranks=2,
            accumulation=8,
            mutate=mean_of_means,
        )
        NextToken.loss, StepStatistics.loss_weight = originals


def compare_optimizers(worker):
    train = worker.train
    optimizer_offload.BUCKET = 2**13
    before = {}
    for name, (overrides, ranks) in OFFLOADED.items():
        if name in worker.left_out:
            continue
        chosen = [override.replace("FOLDER", str(worker.folder)) for override in overrides]
        train(name, chosen, ranks=ranks, accumulation=2)
        without = [override for override in overrides if "cpu_offload" not in override]
        if (*without, ranks) not in before:
            train(f"{name} before", without, ranks=ranks, accumulation=2)
            before[*without, ranks] = worker.results[f"{name} before"]
        worker.results[f"{name} before"] = before[*without, ranks]

    first = {}
    for optimizer, chosen in OPTIMIZERS.items():
        for name, (overrides, ranks) in SHARDINGS.items():
            train(f"{optimizer} {name}", [*overrides, *chosen], ranks=ranks)
            if worker.rank == 0 and f"{optimizer} {name}" not in worker.left_out:
                first = worker.last if name == "ddp ranks=1" else first
                difference = max((worker.last[k] - first[k]).abs().max().item() for k in first)
                worker.results[f"{optimizer} {name}"]["from_one_rank"] = difference


def compare_precisions_and_models(worker):
    train = worker.train
    bf16 = ["strategy.mixed_precision={param_dtype: bfloat16, reduce_dtype: float32}"]
    for strategy, overrides in STRATEGIES.items():
        train(f"bfloat16 {strategy}", [*overrides, *bf16], ranks=2, accumulation=2)

    fp16 = ["strategy.mixed_precision={param_dtype: float16, reduce_dtype: float32}"]

    hooks = []

    def overflow_on_rank_1(step, training):
        """Makes the output of the embedding on rank 1 infinite in step 4."""
        if worker.rank == 1 and step == 4:
            hook = training.wrapped.module.get_input_embeddings().register_forward_hook(
                lambda m, i, o: o * torch.inf
            )
            hooks.append(hook)
        elif step == 5 and worker.rank == 1:
            hooks.pop().remove()

    zero_int8 = {"ZeRO-1": [*ZERO, *OPTIMIZERS["int8"]]}
    for strategy, overrides in (STRATEGIES | zero_int8).items():
        options = {"ranks": 2, "compare": False}
        train(f"float16 {strategy}", [*overrides, *fp16], **options)
        train(
            f"overflow {strategy}",
            [*overrides, *fp16],
            before_step=overflow_on_rank_1,
            **options,
        )

    train("experts alone", STRATEGIES["ddp"], ranks=1, config=EXPERTS, compare=False)
    options = {"ranks": 2, "accumulation": 2, "compare": False}
    for strategy, overrides in STRATEGIES.items():
        train(f"experts {strategy}", overrides, config=EXPERTS, **options)
    own = [*STRATEGIES["ddp"], "model.router_balance=micro_batch"]
    train("experts, micro-batches", own, config=EXPERTS, **options)
    train(
        "experts without",
        STRATEGIES["ddp"],
        config=EXPERTS.replace("logits: true", "logits: false"),
        **options,
    )

    for name, (of_logits, arguments) in OWN.items():
        _, _, losses, norms = worker.plain_loop(of_logits=of_logits)
        worker.results[f"plain {name}"] = {"losses": losses, "norms": norms}
        loss = name if name == "label_smoothing" else f"tests.target_losses:{name}"
        own = f"objective={{loss: '{loss}', arguments: {arguments}}}"
        for where, (overrides, ranks) in OWN_RUNS.items():
            if name != "label_smoothing" or where != "tensor":
                train(
                    f"{name} {where}", [*overrides, own], ranks=ranks, accumulation=2, compare=False
                )

    for strategy, ranks in (("ddp", 1), ("ddp", 2), ("fsdp", 2), ("offload", 4)):
        train(
            f"qat {strategy} ranks={ranks}",
            [*STRATEGIES[strategy], "model.qat=int8"],
            ranks=ranks,
            accumulation=2,
            compare=False,
        )

    initial_weights(worker)
    finals = {}
    for strategy in ("ddp", "fsdp"):
        for mode in ("null", *CHECKPOINTING):
            train(
                f"dropout {strategy} {mode}",
                [*STRATEGIES[strategy], f"activation_checkpointing={mode}"],
                ranks=2,
                accumulation=2,
                config=GPT2,
                compare=False,
            )
            if worker.rank == 0 and f"dropout {strategy} {mode}" not in worker.left_out:
                finals[strategy, mode] = worker.last
                same = all(
                    torch.equal(worker.last[k], finals[strategy, "null"][k]) for k in worker.last
                )
                worker.results[f"dropout {strategy} {mode}"]["bit_identical"] = same


PARTS = {
    "strategies": compare_strategies,
    "optimizers": compare_optimizers,
    "precisions and models": compare_precisions_and_models,
}


def main(folder, part, amount):
    # Chunks of 16 vocabulary entries; the plain loop computes the loss from the full logits
    head_module.WIDTH_MULTIPLE = head_module.CHUNK_ELEMENTS = 16
    worker = Worker(folder, amount)
    worker.train("ddp", STRATEGIES["ddp"])  # also the plain loop, on each rank
    PARTS[part](worker)
    end_worker(folder, worker.results)


def initial_weights(worker):
    """Stores digests of the initial weights and the number of collectives of the initialization.

    The model has dimensions that two or three ranks cannot divide evenly.
    """
    from torch.distributed.tensor.debug import CommDebugMode

    cases = {
        f"{strategy} ranks={ranks}": (ranks, options)
        for strategy, options in INITIAL.items()
        for ranks in (1, 2, 3)
    }
    for name, (ranks, options) in (cases | {"hybrid ranks=4": (4, {"replicate": 2})}).items():
        note = {}
        if worker.rank < ranks:
            with torch.device("meta"):
                model = torch.nn.Sequential(Odd((1,)), Odd((1,)))
            blocks = {"0": model[0]}

            def init_fn(model, *devices, note=note):
                with CommDebugMode() as communication:
                    random_weights(model, *devices, seed=3)
                note["collectives"] = communication.get_total_counts()

            data_parallel = RankLayout(
                rank=worker.rank, size=ranks, group=worker.groups[ranks], device=torch.device("cpu")
            )
            strategy = Strategy(**({"kind": "fsdp", "mixed_precision": None} | options))
            wrapped = wrap(
                model,
                Parts(blocks),
                strategy=strategy,
                checkpointing=None,
                ranks=data_parallel,
                init_fn=init_fn,
            )
            digest = hashlib.sha256()
            for _, parameter in sorted(wrapped.module.named_parameters()):
                digest.update(unsharded(parameter).contiguous().numpy().tobytes())
            note["digest"] = digest.hexdigest()
        dist.barrier()
        worker.results[f"initial {name}"] = note


def evaluations(worker):
    """Evaluates the trained weights on the whole file, on 1, 2 and 4 ranks, packed and unpacked."""
    for ranks in (1, 2, 4):
        for packing in (True, False):
            name = f"evaluation ranks={ranks} packing={packing}"
            note = {}
            if worker.rank < ranks:
                data_parallel = RankLayout(
                    rank=worker.rank,
                    size=ranks,
                    group=worker.groups[ranks],
                    device=torch.device("cpu"),
                )
                overrides = [
                    f"data.validation={worker.folder}/train.jsonl",
                    f"data.packing={str(packing).lower()}",
                    "run.max_steps=1",
                ]
                recipe = worker.recipe(["strategy.kind=ddp", *overrides], ranks, 4)
                recipe = dataclasses.replace(
                    recipe,
                    batch=dataclasses.replace(
                        recipe.batch, micro_batch_size=4, global_batch_size=16
                    ),
                )
                training = assemble(recipe, ranks=data_parallel, build_data=worker.rank == 0)
                with torch.no_grad():
                    for key, parameter in training.wrapped.module.named_parameters():
                        dist.broadcast(
                            parameter, src=0, group=worker.groups[ranks]
                        ) if worker.plain is None else parameter.copy_(
                            worker.plain["weights"][clean_name(key)]
                        )
                whole = over_all(training.evaluator.evaluate(training.wrapped))
                note = {
                    "evaluation": [whole.loss, whole.tokens],
                    "sequences": len(training.data.training),
                }
            dist.barrier()
            worker.results[name] = note


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
