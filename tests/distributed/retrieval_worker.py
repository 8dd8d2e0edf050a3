"""Trains tiny models of vectors and rerankers on one rank and on two, and a plain loop.

    torchrun --nproc-per-node 2 retrieval_worker.py FOLDER quick|all

Writes to results.json, for each case: the largest relative differences of losses, of norms of gradients,
and of the metrics and scores of an evaluation from those of the first case of its group.
"""

import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.distributed.rank_layout import RankLayout
from launcher.recipe.load import load_recipe
from launcher.training.setup import assemble
from tests.distributed.launching import end_worker
from tests.run_files import write_lines

STEPS, BATCH, TEMPERATURE = 4, 12, 0.05
LLAMA = (
    "model_type: llama, vocab_size: 257, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 512, pad_token_id: 256"
)
BERT = (
    "model_type: bert, vocab_size: 257, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, max_position_embeddings: 64, attention_probs_dropout_prob: 0.0"
)
MOE = (
    "model_type: qwen3_moe, vocab_size: 257, hidden_size: 32, intermediate_size: 64, "
    "moe_intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, "
    "head_dim: 16, num_experts: 4, num_experts_per_tok: 2, max_position_embeddings: 512"
)
RECIPE = f"""
run: {{name: texts, max_steps: {STEPS}, seed: 7}}
model: {{task: embedding, config: {{CONFIG}}}}
data: {{train: FOLDER/rows.jsonl, validation: FOLDER/rows.jsonl, tokenizer: bytes, sequence_length: 48, documents: 4,
  workers: 0, cache: FOLDER/cache}}
batch: {{global_batch_size: {BATCH}, micro_batch_size: 12}}
strategy: {{mixed_precision: null, kind: ddp}}
optimizer: {{learning_rate: 2.0e-3}}
schedule: {{warmup_steps: 2}}
"""
SCORED = ["data.train=FOLDER/scored.jsonl", "data.validation=FOLDER/scored.jsonl"]
RERANKED = ["model.task=reranker", "data.kind=reranking", "data.sequence_length=96"]
ANSWERED = [
    "data.kind=reranking",
    "data.sequence_length=96",
    "reranker={positive_answer: a, negative_answer: b}",
]
ONE = ["batch.micro_batch_size=2"]
FSDP = ["strategy.kind=fsdp", "batch.micro_batch_size=2"]
# By group: the config, further keys, and the cases: name, ranks, keys. The first one is the reference
GROUPS = {
    "vectors": (
        LLAMA,
        [],
        [
            ("one micro-batch", 1, []),
            ("micro-batches", 1, ONE),
            ("padded", 1, ["data.packing=false", "batch.micro_batch_size=3"]),
            ("ddp", 2, ONE),
            ("fsdp", 2, FSDP),
            ("checkpointed", 2, [*FSDP, "activation_checkpointing={}", "data.packing=false"]),
            ("offloaded", 2, [*FSDP, "strategy.cpu_offload={}", "data.packing=false"]),
            ("gathered", 2, [*FSDP, "strategy.reshard_after_backward=false"]),
        ],
    ),
    "encoder with dropout": (
        BERT,
        [],
        [
            ("one micro-batch", 1, []),
            ("micro-batches", 1, ["batch.micro_batch_size=1"]),
            ("checkpointed", 2, [*FSDP, "activation_checkpointing={}"]),
        ],
    ),
    "adapters with dropout": (
        LLAMA,
        ["lora={rank: 2, dropout: 0.2}", "optimizer.learning_rate=1e-3"],
        [("one micro-batch", 1, []), ("padded", 2, [*FSDP, "data.packing=false"])],
    ),
    "experts": (
        MOE,
        ["strategy.kind=fsdp"],
        [
            ("one rank", 1, []),
            ("divided", 2, [*FSDP, "strategy.expert_parallel_size=2"]),
        ],
    ),
    "both ways": (
        LLAMA,
        ["model.bidirectional=true", "embedding.matryoshka=[32, 8]"],
        [("one micro-batch", 1, []), ("fsdp", 2, FSDP)],
    ),
    **{
        loss: (
            LLAMA,
            [f"embedding.loss={loss}", *SCORED],
            [("one micro-batch", 1, []), ("fsdp", 2, FSDP)],
        )
        for loss in ("cosine", "cosent", "triplet", "margin_mse", "kl")
    },
    "list of a classifier": (
        LLAMA,
        [*RERANKED, "reranker.loss=list"],
        [("one micro-batch", 1, []), ("fsdp", 2, FSDP)],
    ),
    "answers": (
        LLAMA,
        ["model.task=causal_lm", *ANSWERED],
        [("one micro-batch", 1, []), ("padded", 2, [*FSDP, "data.packing=false"])],
    ),
}
QUICK = ("vectors", "encoder with dropout")


def rows():
    """Queries with documents that share words, some with others; and the same with scores."""
    generator = random.Random(3)
    words = [f"{a}{b}" for a in "bdfgk" for b in "aeiou"]
    plain, scored = [], []
    for number in range(31):
        topic = generator.sample(words, 3)
        document = " ".join([*topic, *generator.choices(words, k=number % 7)])
        others = [" ".join(generator.choices(words, k=3 + number % 4)) for _ in range(number % 4)]
        plain.append({"query": " ".join(topic), "positive": document, "negatives": others})
        others = others or [" ".join(generator.choices(words, k=4))]
        scores = [round(generator.random(), 3) for _ in range(1 + len(others))]
        scored.append(
            {"query": " ".join(topic), "pos": [document], "neg": others, "scores": scores}
        )
    plain[5]["positive"] = plain[6]["positive"]  # no negative of each other
    return plain, scored


class Worker:
    def __init__(self, folder):
        dist.init_process_group("gloo")
        self.folder, self.rank = folder, dist.get_rank()
        self.groups = {size: dist.new_group(list(range(size))) for size in (1, 2)}
        if self.rank == 0:
            plain, scored = rows()
            write_lines(folder / "rows.jsonl", plain)
            write_lines(folder / "scored.jsonl", scored)
        dist.barrier()

    def assembled(self, config, ranks, overrides):
        file = self.folder / f"recipe_{self.rank}.yaml"
        file.write_text(RECIPE.replace("CONFIG", config).replace("FOLDER", str(self.folder)))
        words = [word.replace("FOLDER", str(self.folder)) for word in overrides]
        recipe = load_recipe([f"recipe={file}", *words], ranks=ranks).recipe
        layout = RankLayout(
            rank=self.rank, size=ranks, group=self.groups[ranks], device=torch.device("cpu")
        )
        return assemble(recipe, ranks=layout, build_data=self.rank == 0)

    def train(self, config, ranks, overrides):
        """Losses with metrics, norms, and the scores after the steps; None on other ranks."""
        if self.rank >= ranks:
            return None
        training = self.assembled(config, ranks, overrides)
        losses, norms = [], []
        for step in training.all_steps:
            assert step.metrics is not None
            found = torch.cat([step.loss.view(1), step.metrics]).detach().clone()
            dist.all_reduce(found, group=self.groups[ranks])
            losses.append(found.tolist())
            norms.append(step.grad_norm.item())
        evaluated = next(iter(training.evaluator.evaluate(training.wrapped).values()))
        # Rounding may exchange the ranks of similarities that are almost equal
        scores = {name: value for name, value in evaluated.scores.items() if name != "spearman"}
        return losses, norms, [evaluated.loss, *scores.values()]

    def plain_loop(self):
        """Losses and norms of InfoNCE by autograd alone: each text by itself, all of a step at once."""
        training = self.assembled(LLAMA, 1, [])
        module = training.wrapped.module
        recipe = training.recipe
        parameters = [p for p in module.parameters() if p.requires_grad]
        losses, norms = [], []
        with_decay = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": with_decay, "weight_decay": recipe.optimizer.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            betas=recipe.optimizer.betas,
            eps=recipe.optimizer.eps,
        )
        from launcher.optimizers.optimizer import learning_rate

        rate = learning_rate(recipe.schedule, peak=recipe.optimizer.learning_rate, steps=STEPS)
        no = lambda: False  # noqa: E731
        sampler = training.data.batches(ranks=training.ranks, stop_requested=no, save_requested=no)
        for batch in sampler:
            vectors, roles, examples, hashes = [], [], [], []
            for micro_batch in batch.micro_batches:
                ids, extra = micro_batch.inputs["input_ids"].flatten(), micro_batch.extra
                for last, length in zip(extra["lasts"], extra["lengths"], strict=True):
                    text = ids[last - length + 1 : last + 1]
                    hidden = module(input_ids=text[None]).last_hidden_state[0, -1]
                    vectors.append(torch.nn.functional.normalize(hidden, dim=0))
                offset = len({*examples})
                roles += extra["roles"].tolist()
                examples += [offset + number for number in extra["examples"].tolist()]
                hashes += extra["hashes"].tolist()
            unit, terms = torch.stack(vectors), []
            documents = [n for n, role in enumerate(roles) if role]
            for query in (n for n, role in enumerate(roles) if not role):
                own = next(n for n in documents if roles[n] == 1 and examples[n] == examples[query])
                used = [n for n in documents if n == own or hashes[n] != hashes[own]]
                logits = unit[used] @ unit[query] / TEMPERATURE
                terms.append(logits.logsumexp(0) - logits[used.index(own)])
            loss = torch.stack(terms).mean()
            optimizer.zero_grad()
            loss.backward()
            norms.append(
                torch.nn.utils.clip_grad_norm_(parameters, recipe.optimizer.max_grad_norm).item()
            )
            for group in optimizer.param_groups:
                group["lr"] = rate(batch.step)
            optimizer.step()
            losses.append([loss.item()])
        return losses, norms, []


def largest(some, others):
    """The largest relative difference of numbers in lists of the same form."""
    pairs = zip(torch.tensor(some).flatten(), torch.tensor(others).flatten(), strict=True)
    return max((float(abs(a - b) / max(abs(float(b)), 1e-2)) for a, b in pairs), default=0.0)


def main():
    folder, amount = Path(sys.argv[1]), sys.argv[2]
    worker, results = Worker(folder), {}
    for group, (config, keys, cases) in GROUPS.items():
        if amount == "quick" and group not in QUICK:
            continue
        reference = None
        for name, ranks, overrides in cases:
            found = worker.train(config, ranks, [*keys, *overrides])
            reference = reference or found
            if found is not None and reference is not None:
                results[f"{group}: {name}"] = [
                    largest(one, other) for one, other in zip(found, reference, strict=True)
                ]
            if group == "vectors" and name == "one micro-batch" and worker.rank == 0:
                losses, norms, _ = worker.plain_loop()
                results["plain loop"] = [
                    largest(losses, [row[:1] for row in found[0]]),
                    largest(norms, found[1]),
                ]
                results["range of losses"] = [losses[0][0], losses[-1][0]]
    end_worker(folder, results)


if __name__ == "__main__":
    main()
