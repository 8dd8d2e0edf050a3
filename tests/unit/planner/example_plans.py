"""Hand-written plans and lists of configurations, for tests of the printed output."""

import dataclasses

from launcher.planner.candidates import Configuration
from launcher.planner.machine import Machine, Rates
from launcher.planner.measurement import Measurement
from launcher.planner.memory import COMPONENTS, Components, HostMemory, Moment, Plan, StepMemory
from launcher.planner.search import SearchResult
from launcher.planner.speed import StepTime
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    CpuOffload,
    Data,
    Model,
    Recipe,
    Run,
    Strategy,
)

GIB = 1024**3

RATES = Rates(
    half_flops=600e12,
    float32_flops=300e12,
    memory_bandwidth=2.6e12,
    intra_node_bandwidth=300e9,
    inter_node_bandwidth=40e9,
    host_bandwidth=40e9,
    host_adamw=2e8,
    source="60 % of the data sheet",
)

RECIPE = Recipe(
    run=Run(name="llama_3_1_8b", max_steps=10),
    model=Model(config={"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256}),
    data=Data(train=("a.txt",), sequence_length=4096),
    batch=Batch(global_batch_size=64, micro_batch_size=4),
    strategy=Strategy(kind="fsdp"),
)  # fmt: skip
AUTO_RECIPE = dataclasses.replace(
    RECIPE,
    strategy=Strategy(kind="auto"),
    batch=Batch(global_batch_size=64, micro_batch_size="auto"),
)


def machine(*, memory=80 * GIB, host_memory=None):
    return Machine(
        name="H100",
        device="cuda",
        nodes=1,
        gpus_per_node=8,
        memory=memory,
        host_memory=host_memory,
        rates=RATES,
    )


def components(scale=1.0, **changes):
    """Return Components from sizes in GiB."""
    sizes = dict(
        zip(COMPONENTS, (3.74, 3.74, 7.48, 1.3, 18.0, 7.8, 0.4, 1.1), strict=True), **changes
    )
    return Components(**{name: int(gib * scale * GIB) for name, gib in sizes.items()})


def moment(phase, where, held):
    return Moment(phase=phase, micro_batch=1, where=where, components=held)


def example_plan(
    scale=1.0, *, memory=80 * GIB, host_memory=None, host=12, arithmetic=1.02, notes=()
):
    held = components(scale, gathered=0, activations=0, logits=0, communication=0, temporary=0)
    moments = (
        moment("forward", "lm_head", components(scale, logits=5.0)),
        moment("backward", "model.layers.31", components(scale)),
        moment("backward", "model.layers.0", components(scale, activations=0.6, logits=0)),
        moment("optimizer", "", components(scale, activations=0, logits=0, gathered=0)),
    )
    estimated = dataclasses.replace(moments[-1], components=components(scale * arithmetic))
    after_forward = components(scale, gradients=0)
    step = StepMemory(held=held, after_forward=after_forward, timeline=moments, host=0)
    return Plan(
        machine=machine(memory=memory, host_memory=host_memory),
        step=step,
        arithmetic=dataclasses.replace(step, timeline=(estimated,)),
        context=int(1.2 * GIB),
        margin=int(2.1 * GIB),
        host=HostMemory(processes=host * GIB, offload=0, workers=2 * GIB, staging=90 * GIB),
        checkpoint_bytes=90 * GIB,
        checkpoints=3,
        notes=notes,
    )


def measured_like(plan, scale=1.0, **changes):
    """Return measurements that equal the plan, but the peak is `scale` times the planned one."""
    step = plan.step
    found = {
        "peak": int(step.peak.total * scale),
        "phases": {phase: moment.total for phase, moment in step.phases.items()},
        "step_start": step.held.total,
        "after_forward": step.after_forward.total,
        "parameters": step.held.parameters,
        "gradients": step.phases["optimizer"].components.gradients,
        "optimizer": step.held.optimizer,
        "step_peaks": [],
        "residue": 0,
    }
    return Measurement(**found | changes)


def configuration(overrides, plan, tokens_per_second, *, micro=4, **changes):
    batch, total = Batch(global_batch_size=64, micro_batch_size=micro), 64 * 4096 / tokens_per_second  # fmt: skip
    recipe = dataclasses.replace(RECIPE, batch=batch, **changes)
    parts = {"forward": total * 0.3, "backward": total * 0.6, "communication": total * 0.1}
    seconds = StepTime(recomputation=0.0, offload=0.0, optimizer=0.0, **parts)
    return Configuration(overrides=tuple(overrides), recipe=recipe, plan=plan, seconds=seconds)


SUGGESTIONS = ("16 GPUs instead of 8: gpus_per_node=8 nodes=2", "LoRA: lora={rank: 16}")


def example_search(*, memory=80 * GIB, fits=True):
    """Return four configurations. With fits=False the GPU has 8 GiB and none of them fits."""
    memory = memory if fits else 8 * GIB
    written = configuration((), example_plan(memory=memory), 74_000)
    one = configuration(
        ("strategy.reshard_after_forward=false", "batch.micro_batch_size=8"),
        example_plan(1.9, memory=memory),
        91_000,
        micro=8,
        strategy=Strategy(kind="fsdp", reshard_after_forward=False),
    )
    two = configuration(
        ("batch.micro_batch_size=8", "activation_checkpointing={mode: selective}"),
        example_plan(1.3, memory=memory),
        85_000,
        micro=8,
        activation_checkpointing=ActivationCheckpointing(mode="selective"),
    )
    last = configuration(
        ("strategy.cpu_offload={pin_memory: true}", "activation_checkpointing={mode: full}"),
        example_plan(0.4, memory=memory),
        31_000,
        strategy=Strategy(kind="fsdp", cpu_offload=CpuOffload()),
        activation_checkpointing=ActivationCheckpointing(),
    )
    return SearchResult(
        written=written,
        configurations=(one, two, written, last),
        best=two if fits else None,
        evaluated=96,
        suggestions=() if fits else SUGGESTIONS,
    )
