"""A prompt as evaluation text: all of its tokens, in windows, against a pool from a corpus that leaves it out."""

from typing import Any

import torch

from deltalens.errors import InputError
from deltalens.experiment.corpus import (
    Corpus,
    WindowFormat,
    Windows,
    cut_documents,
    require_enough,
    shortest_piece,
    take_round_robin,
)
from deltalens.experiment.documents import Document, Documents
from deltalens.experiment.spec import RunSpec

#: A prompt's windows are padded to its own length, but not to less: models are fussy about single tokens.
LEAST_LENGTH = 4


def build_prompt_corpus(
    prompt: str,
    documents: Documents,
    tokenizer: Any,
    *,
    window: int,
    pool_tokens: int | None,
    seed: int,
    neighbors: int = 1,
) -> Corpus:
    """The prompt's tokens as evaluation windows, and pool windows of the documents that aren't the prompt.

    Args:
        prompt: one document; longer than a window, it is several windows, the last of any length.
        documents: the text that the pool comes from.
        tokenizer: a Hugging Face tokenizer.
        window: tokens per window, special tokens included.
        pool_tokens: pool tokens, rounded up to whole windows; None where no protocol needs a pool.
        seed: order of the documents.
        neighbors: the neighbourhood size that the pool must hold.

    Raises:
        CorpusError: the text holds too few tokens for the pool.
    """
    form = WindowFormat.of(tokenizer, window)
    others = tuple(document for document in documents.items if document.text.strip() != prompt.strip())
    together = Documents(documents.name, (Document("prompt", prompt), *others))
    evaluation = cut_documents(together.items[:1], tokenizer, form.content, 1)[0]
    if not evaluation:
        raise InputError("the prompt has no token in this model's vocabulary; give at least a few words")
    length = max(LEAST_LENGTH, form.specials + max(len(piece.ids) for piece in evaluation))
    return Corpus(
        name=documents.name,
        hash=together.hash,
        document_names=tuple(document.name for document in together.items),
        evaluation=form.windows(evaluation, min(length, window)),
        pool=None if pool_tokens is None else _pool(together, tokenizer, form, pool_tokens, seed, neighbors),
        document_split="prompt",
    )


def _pool(documents: Documents, tokenizer: Any, form: WindowFormat, tokens: int, seed: int, neighbors: int) -> Windows:
    require_enough("pool_tokens", tokens, neighbors, neighbors)
    cut = cut_documents(documents.items, tokenizer, form.content, shortest_piece(form.content))[1:]
    order = torch.randperm(len(cut), generator=torch.Generator().manual_seed(seed)).tolist()
    pieces = take_round_robin([cut[number] for number in order], tokens, form.specials, "pool")
    return form.windows(pieces, form.window)


def check_prompt(spec: RunSpec, windows: Windows) -> None:
    """Refuse a prompt without tokens to decompose, or that is too short to be its own pool."""
    position = torch.arange(windows.input_ids.shape[1])
    left = int((windows.attention_mask.bool() & ~windows.special & (position >= spec.skip_first)).sum())
    if left == 0:
        raise InputError(
            f"the prompt leaves no token beside special ones and the first {spec.skip_first} of a window; "
            f"give a longer prompt or lower skip_first"
        )
    for protocol in spec.protocol:
        needed = spec.rows_per_fit + (protocol == "leave_one_out")
        if protocol != "held_out" and left < needed:
            raise InputError(
                f"the prompt leaves {left} tokens as the pool of {protocol}, {needed} are needed; "
                f"use protocol held_out, a longer prompt or fewer neighbors"
            )
