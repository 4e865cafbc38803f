"""Train a vision transformer on real images: scikit-learn's handwritten digits.

    python recipes/train_vision.py --write-plan plan.json --cluster 2xcpu
    bigmodel run recipes/train_vision.py --plan plan.json -- --steps 150

1,797 images of 8 x 8 pixels, a fifth of them held out. Nothing is downloaded.
"""

from __future__ import annotations

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from bigmodel.api.scripts import script_parser, script_plan
from bigmodel.running.progress import Progress
from bigmodel.running.script import run_main
from bigmodel.running.session import prepare

CLASSES = 10
HELD_OUT = 5
"""Every fifth image is held out."""


def make_model(layers: int, hidden: int) -> ViTForImageClassification:
    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            num_labels=CLASSES,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * hidden,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def load_images() -> tuple[Tensor, Tensor]:
    """Return images [samples, 1, 8, 8] of mean 0, and their classes."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return images, torch.tensor(digits.target)


def accuracy(
    weights: dict[str, Tensor], model, images: Tensor, labels: Tensor
) -> float:
    """Return the share of right answers of the gathered weights, in this process."""
    model.load_state_dict(weights)
    with torch.no_grad():
        answers = model.eval()(pixel_values=images).logits.argmax(1)
    return float((answers == labels).float().mean())


def main() -> None:
    parser = script_parser(__doc__, steps=150, learning_rate=2e-3)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=20, help="optimizer steps")
    args = parser.parse_args()
    images, labels = load_images()
    held = torch.arange(len(labels)) % HELD_OUT == 0
    samples = [
        {"pixel_values": image, "labels": label}
        for image, label in zip(images[~held], labels[~held], strict=True)
    ]
    make = partial(make_model, args.layers, args.hidden)
    sample = {"pixel_values": images[:1], "labels": labels[:1]}
    with prepare(
        script_plan(args, make, sample),
        make,
        partial(torch.optim.AdamW, lr=args.learning_rate),
        clip_norm=args.clip_norm,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / args.warm_up)
        ),
        seed=args.seed,
    ) as engine:
        batches = engine.batches(samples, seed=args.seed)
        with Progress(engine, args.steps, file=args.metrics) as progress:
            while engine.steps < args.steps:
                progress.show(engine.step(next(batches)))
        weights = engine.state_dict()
        if engine.is_first:
            right = accuracy(weights, make(), images[held], labels[held])
            print(f"held-out accuracy {right:.3f} after {engine.steps} steps")


if __name__ == "__main__":
    run_main(main)
