"""The order of a pipeline's passes, and what each rank holds."""

import itertools
from random import Random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.errors import RecipeError
from launcher.models.description import describe
from launcher.models.new_rows import add_new_rows, grow_vocabulary
from launcher.models.pipeline import balanced, chain_of, ranges_of, shared_parameters
from launcher.strategies.pipeline import schedule

SIZES = [
    (ranks, chunks, count)
    for ranks, chunks in ((1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (3, 2), (4, 2), (6, 2))
    for count in (1, 2, 3, 5, 8, 13)
]


def completed(orders, *, ranks, chunks, stop_before=None):
    """Runs the passes of all ranks: a pass begins when what it needs has been sent. Returns the passes
    that each rank has ended. stop_before: ranks end before this forward pass of theirs."""
    sent, ended = set(), [[] for _ in range(ranks)]
    last, waiting = ranks * chunks - 1, [list(order) for order in orders]
    going = True
    while going:
        going = False
        for rank, left in enumerate(waiting):
            while left:
                each = left[0]
                begun = sum(one.forward for one in ended[rank])
                if each.forward and begun == stop_before:
                    left.clear()
                    break
                stage = each.chunk * ranks + rank
                before = stage - 1 if each.forward else stage + 1
                alone = stage == 0 if each.forward else stage == last
                if not alone and (before, each.forward, each.micro_batch) not in sent:
                    break
                ended[rank].append(left.pop(0))
                sent.add((stage, each.forward, each.micro_batch))
                going = True
    return ended


@pytest.mark.parametrize(("ranks", "chunks", "count"), SIZES)
def test_every_pass_runs_once_and_no_rank_waits_for_ever(ranks, chunks, count):
    orders = [schedule(count, rank=rank, ranks=ranks, chunks=chunks) for rank in range(ranks)]
    assert completed(orders, ranks=ranks, chunks=chunks) == orders
    for order in orders:
        every = itertools.product((True, False), range(chunks), range(count))
        assert sorted((e.forward, e.chunk, e.micro_batch) for e in order) == sorted(every)


@pytest.mark.parametrize(("ranks", "count"), [(2, 5), (3, 8), (4, 8), (8, 13)])
def test_all_ranks_can_stop_before_the_same_forward_pass(ranks, count):
    orders = [schedule(count, rank=rank, ranks=ranks) for rank in range(ranks)]
    for stop_before in range(count):
        ended = completed(orders, ranks=ranks, chunks=1, stop_before=stop_before)
        assert [sum(each.forward for each in own) for own in ended] == [stop_before] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_in_flight(ranks):
    """1F1B: as many micro-batches as there are stages from this one on. Interleaved: see Narayanan et
    al., 2021, section 2.2; in halves of a stage."""
    for rank, count in itertools.product(range(ranks), (8, 32)):

        def most(chunks, rank=rank, count=count):
            passes = schedule(count, rank=rank, ranks=ranks, chunks=chunks)
            return max(itertools.accumulate(1 if each.forward else -1 for each in passes))

        assert most(1) == ranks - rank
        assert most(2) == ranks + 2 * (ranks - 1 - rank) + 1


def test_messages_between_two_stages_come_in_the_order_in_which_they_were_sent():
    """Each direction of a pair of stages is a queue."""
    for ranks, chunks, count in SIZES:
        orders = [schedule(count, rank=rank, ranks=ranks, chunks=chunks) for rank in range(ranks)]
        for rank, forward in itertools.product(range(ranks), (True, False)):
            other = (rank + (1 if forward else -1)) % ranks
            around = (rank == ranks - 1) if forward else (rank == 0)
            shift = (1 if forward else -1) if around else 0
            sent = [
                (each.chunk + shift, each.micro_batch)
                for each in orders[rank]
                if each.forward is forward and each.chunk + shift in range(chunks)
            ]
            received = [
                (each.chunk, each.micro_batch) for each in orders[other] if each.forward is forward
            ]
            assert sent == [each for each in received if each in sent]


@pytest.mark.parametrize(
    ("costs", "parts", "expected"),
    [
        ([1, 1, 1, 1], 2, [range(2), range(2, 4)]),
        ([1, 1, 1, 1, 4], 2, [range(4), range(4, 5)]),
        ([1, 1, 1], 3, [range(1), range(1, 2), range(2, 3)]),
        ([5, 1, 1, 1], 2, [range(1), range(1, 4)]),
    ],
)
def test_blocks_are_divided_so_that_the_largest_part_is_as_small_as_possible(
    costs, parts, expected
):
    assert balanced(costs, parts) == expected


def test_parts_are_those_that_are_allowed():
    def short(part, start, end):
        return part > 0 or end - start == 1

    assert balanced([1] * 4, 2, short) == [range(1), range(1, 4)]
    assert balanced([1] * 4, 2, lambda part, start, end: end - start < 2) is None


@pytest.mark.parametrize("seed", range(40))
def test_no_other_division_is_better(seed):
    random = Random(seed)
    costs = [random.choice([1, 1.5, 2, 4]) for _ in range(random.randint(2, 8))]
    parts = random.randint(1, len(costs))
    most = [random.randint(1, 4) for _ in range(parts)]

    def allowed(part, start, end):
        return end - start <= most[part]

    def slowest(ranges):
        return max(sum(costs[index] for index in part) for part in ranges)

    sizes = itertools.product(*(range(1, n + 1) for n in most))
    every = [ranges_of(each) for each in sizes if sum(each) == len(costs)]
    found = balanced(costs, parts, allowed)
    if not every:
        assert found is None
    else:
        assert found in every
        assert slowest(found) == min(map(slowest, every))


_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_GEMMA4 = {
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
_MAMBA = {
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "mamba_d_state": 8,
    "n_mamba_heads": 2,
    "mamba_headdim": 32,
    "mamba_ngroups": 1,
}


def meta_model(model_type, **sizes):
    with torch.device("meta"):
        config = AutoConfig.for_model(model_type, **_SIZES, **sizes)
        return AutoModelForCausalLM.from_config(config)


def chain(model_type, *, frozen, **sizes):
    model = meta_model(model_type, **sizes).requires_grad_(not frozen)
    found = chain_of(model, dict(describe(model).blocks))
    assert all(parameter.requires_grad is not frozen for parameter in model.parameters())
    return found


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("model_type", "sizes", "says"),
    [
        # Each block gets the embeddings of the tokens, too
        ("zamba2", _MAMBA, "passes results of other layers to model.layers.0"),
        (
            "gemma4_text",
            _GEMMA4 | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64},
            "passes results of other layers to model.layers.0",
        ),
        (
            "gemma4_text",
            _GEMMA4 | {"num_kv_shared_layers": 2},
            "has blocks that use the keys and values of earlier blocks",
        ),
    ],
)
def test_a_model_whose_blocks_need_more_than_one_activation_is_refused(
    model_type, sizes, says, frozen
):
    """Also if its embedding is frozen, as with adapters."""
    with pytest.raises(RecipeError, match=says):
        chain(model_type, frozen=frozen, **sizes)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_chain_of_a_model_without_shared_keys(frozen):
    assert len(chain("gemma4_text", frozen=frozen, **_GEMMA4).blocks) == 4


@pytest.mark.parametrize("tied", [False, True])
def test_new_rows_of_a_tied_embedding_are_shared_too(tied):
    model = meta_model("llama", tie_word_embeddings=tied)
    assert shared_parameters(model) == (["weight"] if tied else [])
    grow_vocabulary(model, range(64, 66))
    add_new_rows(model, range(64, 66), saved=())
    assert shared_parameters(model) == (["weight", "new_rows"] if tied else [])
