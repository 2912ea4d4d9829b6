"""Measure a built-in model on text that it has never seen and write its card: ``python training/measure.py tiny-neox``.

The card says how well the model predicts, how well a unigram model would, and how much context helps: the loss in the
last half of a window against that at its first positions. ``--steps`` and the like are what ``train.py`` was given;
they are kept from the card that is there if they aren't given.
"""

import argparse
import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from deltalens.experiment.builtin_text import builtin_documents

BUILTIN = Path(__file__).resolve().parents[1] / "src" / "deltalens" / "models" / "builtin"
WINDOW, FIRST, LATE = 128, 8, 64

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A small {architecture} language model that comes with deltalens, so that its main job runs without any download.
It uses context, which is what makes it worth taking apart; it is no good for writing text.

| | |
|---|---|
| layers, width, vocabulary | {layers}, {width}, {vocabulary} |
| parameters | {parameters:,} |
| size | {megabytes:.2f} MB, float16 safetensors |
| trained for | {steps:,} steps of {batch} windows of {window} tokens, seed {seed} |
| cross-entropy, held out | {cross_entropy:.3f} nats per token |
| of a unigram model of the training text | {unigram:.3f} nats per token |
| at positions below {first} of a window | {early:.3f} nats per token |
| at positions from {late} on | {later:.3f} nats per token |

Measured by `training/measure.py` in windows of {window} tokens of the built-in text (sha256 {text_sha256:.12}...,
{tokens:,} predicted tokens, CPython {python}), help topics that were kept out of training. The texts it was trained on:
CPython's own topics and docstrings (PSF licence), those of numpy, scipy and pandas (BSD-3-Clause), and the King James
Bible (public domain); see `training/texts.py`. Train it again with

    python training/train.py {name} --steps {steps} --batch {batch} --seed {seed}
"""


def held_out_windows(tokenizer: Any) -> torch.Tensor:
    """Full windows of the built-in text that never cross documents, ``(n, 128)``."""
    rows = []
    for document in builtin_documents():
        ids = torch.tensor(tokenizer.backend_tokenizer.encode(document).ids)
        rows.extend(ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW))
    return torch.stack(rows)


@torch.no_grad()
def losses(model: Any, windows: torch.Tensor) -> torch.Tensor:
    """Nats at every predicted token, ``(n, 127)``; column p is the loss of the prediction made at position p."""
    rows = []
    for part in windows.split(32):
        logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
        flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        rows.append(flat.view(len(part), -1))
    return torch.cat(rows)


def unigram_loss(counts: torch.Tensor, windows: torch.Tensor) -> float:
    """Mean nats of the predicted tokens under add-one smoothed counts."""
    smoothed = counts.double() + 1
    return float(-(smoothed / smoothed.sum()).log()[windows[:, 1:]].mean())


def summarize(loss: torch.Tensor) -> dict[str, float]:
    """The figures of a card that come from the model alone."""
    return {
        "cross_entropy": float(loss.mean()),
        "early": float(loss[:, :FIRST].mean()),
        "later": float(loss[:, LATE:].mean()),
    }


def folder_bytes(folder: Path) -> int:
    """Size of a model's files, without the card itself."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.name not in ("card.json", "README.md"))


def training_counts(tokenizer: Any, documents: Iterable[str], vocabulary: int) -> torch.Tensor:
    """How often each token stands in the training text, with the end-of-text token after each document."""
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for encoded in tokenizer.backend_tokenizer.encode_batch(list(documents)):
        counts += torch.bincount(torch.tensor([*encoded.ids, 0]), minlength=vocabulary)
    return counts


def measure(name: str, tokenizer: Any, counts: torch.Tensor, training: dict[str, int]) -> dict[str, Any]:
    """All fields of one model's card."""
    model = AutoModelForCausalLM.from_pretrained(BUILTIN / name, dtype=torch.float32).eval()
    windows = held_out_windows(tokenizer)
    figures = {key: round(value, 4) for key, value in summarize(losses(model, windows)).items()}
    size = folder_bytes(BUILTIN / name)
    return {
        "name": name,
        "architecture": type(model).__name__.removesuffix("LMHeadModel").removesuffix("ForCausalLM"),
        "layers": model.config.num_hidden_layers,
        "width": model.config.hidden_size,
        "vocabulary": model.config.vocab_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": size,
        **training,
        **figures,
        "unigram": round(unigram_loss(counts, windows), 4),
        "window": WINDOW,
        "first": FIRST,
        "late": LATE,
        "tokens": windows.shape[0] * (WINDOW - 1),
        "text_sha256": hashlib.sha256("\0".join(builtin_documents()).encode()).hexdigest(),
        "python": platform.python_version(),
    }


def write(card: dict[str, Any]) -> None:
    """Write ``card.json`` and the README of one model."""
    folder = BUILTIN / card["name"]
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf8")
    text = CARD.format(**card, megabytes=card["bytes"] / 1e6)
    (folder / "README.md").write_text(text, encoding="utf8")


def main() -> None:
    """Parse the command line, measure, write."""
    from texts import training_documents

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=sorted(p.parent.name for p in BUILTIN.glob("*/config.json")))
    for option in ("steps", "batch", "seed"):
        parser.add_argument(f"--{option}", type=int)
    arguments = parser.parse_args()

    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUILTIN / "tokenizer")
    counts = training_counts(tokenizer, training_documents(), len(tokenizer))
    for name in arguments.models:
        path = BUILTIN / name / "card.json"
        known = json.loads(path.read_text(encoding="utf8")) if path.is_file() else {"seed": 0, "batch": 16}
        given = {option: getattr(arguments, option) for option in ("steps", "batch", "seed")}
        training = {option: known[option] if value is None else value for option, value in given.items()}
        card = measure(name, tokenizer, counts, training)
        write(card)
        print(json.dumps(card))


if __name__ == "__main__":
    main()
