"""What sentence-transformers computes with an export: a program that test_sentence_transformers.py runs.

    python sentence_vectors.py REQUEST.json

The request has the folder of the packages, of the export, its kind and the validation rows. Prints JSON.
"""

import json
import sys
from pathlib import Path

request = json.loads(Path(sys.argv[1]).read_text())
sys.path.insert(0, request["packages"])

import torch  # noqa: E402
from sentence_transformers import CrossEncoder, SentenceTransformer  # noqa: E402
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy  # noqa: E402


def vectors(folder, rows, *, temperature):
    """Loss and metrics of queries among all documents."""
    model = SentenceTransformer(folder, device="cpu")
    queries = model.encode_query([row["query"] for row in rows], convert_to_tensor=True)
    documents = [row["positive"] for row in rows]
    documents += [text for row in rows for text in row["negatives"]]
    similarities = queries @ model.encode_document(documents, convert_to_tensor=True).T
    right = torch.arange(len(rows))
    place = (similarities >= similarities[right, right][:, None]).sum(1)
    return {
        "eval_loss": cross_entropy(similarities / temperature, right).item(),
        "eval_recall@10": (place <= 10).double().mean().item(),
        "eval_mrr@10": torch.where(place <= 10, 1 / place.double(), 0.0).mean().item(),
    }


def scores(folder, rows):
    """Loss and metrics of the documents of each query."""
    model = CrossEncoder(folder, device="cpu")
    loss, count, places = 0.0, 0, []
    for row in rows:
        pairs = [(row["query"], text) for text in (row["positive"], *row["negatives"])]
        identity = torch.nn.Identity()
        found = model.predict(pairs, activation_fn=identity, convert_to_tensor=True).float()
        wanted = torch.zeros(len(pairs)).index_fill(0, torch.tensor(0), 1.0)
        loss += binary_cross_entropy_with_logits(found, wanted, reduction="sum").item()
        count += len(pairs)
        places.append(1 + int((found[1:] >= found[0]).sum()))
    return {"eval_loss": loss / count, "eval_mrr@10": sum(1 / p for p in places) / len(places)}


kind, options = request["kind"], request["options"]
found = {"vectors": vectors, "scores": scores}[kind](request["folder"], request["rows"], **options)
print("\n" + json.dumps(found))
