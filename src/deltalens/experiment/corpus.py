"""Documents to windows: tokenised, never crossing a document, split into evaluation and pool."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from deltalens.errors import CorpusError
from deltalens.experiment.documents import Document, Documents

#: A trailing window shorter than this share of the window is dropped: its tokens would see too little context.
SHORTEST_WINDOW_SHARE = 1 / 8

#: Evaluation windows spread over at least this many documents where the text has them: intervals need clusters.
DOCUMENTS_FOR_INTERVALS = 8

DocumentSplit = Literal["by_document", "contiguous", "prompt", "none"]


@dataclass(frozen=True)
class Windows:
    """Right-padded windows: ids (W, S), real lengths (W,), document (W,) and the special tokens (W, S)."""

    input_ids: Int[Tensor, "windows length"]
    lengths: Int[Tensor, " windows"]
    documents: Int[Tensor, " windows"]
    special: Bool[Tensor, "windows length"]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def attention_mask(self) -> Int[Tensor, "windows length"]:
        """One where a token is real."""
        return (torch.arange(self.input_ids.shape[1]) < self.lengths[:, None]).long()

    @property
    def tokens(self) -> int:
        """Real tokens in all windows."""
        return int(self.lengths.sum())

    @property
    def next_tokens(self) -> Int[Tensor, "windows length"]:
        """The token that follows each one; -1 where the window has none."""
        following = torch.full_like(self.input_ids, -1)
        following[:, :-1] = self.input_ids[:, 1:]
        following[torch.arange(self.input_ids.shape[1]) >= self.lengths[:, None] - 1] = -1
        return following

    def rows(self, start: int, stop: int) -> "Windows":
        """Windows ``start`` to ``stop``, half-open."""
        return self.take(torch.arange(start, min(stop, len(self))))

    def take(self, chosen: Int[Tensor, " chosen"]) -> "Windows":
        """The windows at the given indices."""
        return Windows(self.input_ids[chosen], self.lengths[chosen], self.documents[chosen], self.special[chosen])

    def nested(self, tokens: int) -> Bool[Tensor, " windows"]:
        """Whole windows, one from each document in turn, until there are as many tokens; fewer are among more."""
        turn = torch.arange(len(self)) - torch.searchsorted(self.documents, self.documents)  # documents ascend
        order = torch.argsort(turn, stable=True)
        before = self.lengths[order].cumsum(0) - self.lengths[order]
        chosen = torch.zeros(len(self), dtype=torch.bool)
        chosen[order[before < tokens]] = True
        return chosen


@dataclass(frozen=True)
class Corpus:
    """Evaluation and pool windows with the identity of their text. ``pool`` is None where no protocol needs one."""

    name: str
    hash: str
    document_names: tuple[str, ...]
    evaluation: Windows
    pool: Windows | None
    document_split: DocumentSplit


@dataclass(frozen=True)
class Piece:
    """The ids of one window without special tokens, and the document that they are of."""

    ids: tuple[int, ...]
    document: int


@dataclass(frozen=True)
class WindowFormat:
    """How a tokenizer's ids become windows: special tokens around each piece, padding on the right."""

    window: int
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    special_ids: frozenset[int]
    pad: int

    @classmethod
    def of(cls, tokenizer: Any, window: int) -> "WindowFormat":
        """The format of one tokenizer.

        Raises:
            CorpusError: the window has no room beside the special tokens.
        """
        prefix, suffix = special_affixes(tokenizer)
        special_ids = frozenset(getattr(tokenizer, "all_special_ids", None) or ())
        found = cls(window, prefix, suffix, special_ids, getattr(tokenizer, "pad_token_id", None) or 0)
        if found.content < 2:
            raise CorpusError(
                f"a window of {window} tokens leaves no room beside the special tokens; use a larger window"
            )
        return found

    @property
    def specials(self) -> int:
        """Special tokens of each window."""
        return len(self.prefix) + len(self.suffix)

    @property
    def content(self) -> int:
        """Tokens of text in a full window."""
        return self.window - self.specials

    def windows(self, pieces: Sequence[Piece], length: int) -> Windows:
        """The pieces with their special tokens, padded to a length."""
        input_ids = torch.full((len(pieces), length), self.pad, dtype=torch.long)
        special = torch.zeros((len(pieces), length), dtype=torch.bool)
        for row, piece in enumerate(pieces):
            ids = (*self.prefix, *piece.ids, *self.suffix)
            input_ids[row, : len(ids)] = torch.tensor(ids)
            marks = [token in self.special_ids for token in ids]
            marks[: len(self.prefix)] = [True] * len(self.prefix)
            marks[len(ids) - len(self.suffix) :] = [True] * len(self.suffix)
            special[row, : len(ids)] = torch.tensor(marks)
        lengths = torch.tensor([self.specials + len(piece.ids) for piece in pieces], dtype=torch.long)
        documents = torch.tensor([piece.document for piece in pieces], dtype=torch.long)
        return Windows(input_ids, lengths, documents, special)


def build_corpus(
    documents: Documents,
    tokenizer: Any,
    *,
    window: int,
    tokens: int,
    pool_tokens: int | None,
    seed: int,
    neighbors: int = 1,
) -> Corpus:
    """Tokenise, cut into windows and split by document; a single document is split contiguously with a gap.

    Args:
        documents: the text.
        tokenizer: a Hugging Face tokenizer; the special tokens that it adds are added once per window.
        window: tokens per window, special tokens included.
        tokens: evaluation tokens, rounded up to whole windows.
        pool_tokens: pool tokens, rounded up to whole windows; None where no protocol needs a pool.
        seed: order of the documents.
        neighbors: the neighbourhood size that the pool must hold.

    Raises:
        CorpusError: the text holds too few tokens; the message says how many it has.
    """
    require_enough("tokens", tokens, neighbors + 1 if pool_tokens is None else 1, neighbors)
    if pool_tokens is not None:
        require_enough("pool_tokens", pool_tokens, neighbors, neighbors)
    form = WindowFormat.of(tokenizer, window)
    pieces = cut_documents(documents.items, tokenizer, form.content, shortest_piece(form.content))
    if not any(pieces):
        raise CorpusError(
            f"the text is too short: no document has {shortest_piece(form.content)} tokens for a window of {window}; "
            f"give longer documents or a smaller window"
        )
    evaluation, pool, split = _split(pieces, tokens, pool_tokens, seed, form.specials)
    return Corpus(
        name=documents.name,
        hash=documents.hash,
        document_names=tuple(document.name for document in documents.items),
        evaluation=form.windows(evaluation, window),
        pool=form.windows(pool, window) if pool_tokens is not None else None,
        document_split=split,
    )


def special_affixes(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens that the tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    raise CorpusError("the tokenizer changes a text when it adds special tokens; windows of its ids can't be cut")


def shortest_piece(content: int) -> int:
    """The fewest tokens of text that make a window."""
    return max(2, int(content * SHORTEST_WINDOW_SHARE))


def require_enough(field: str, asked: int, least: int, neighbors: int) -> None:
    """Refuse a number of tokens that no neighbourhood could be found in."""
    if asked < least:
        raise CorpusError(f"{field} is {asked}, but {neighbors} neighbors need at least {least}; raise {field}")


def cut_documents(documents: Sequence[Document], tokenizer: Any, content: int, shortest: int) -> list[list[Piece]]:
    """Cut each document into pieces of ``content`` tokens; shorter ones than ``shortest`` are dropped."""
    pieces = []
    for number, document in enumerate(documents):
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        starts = range(0, len(ids), content)
        cut = [Piece(tuple(ids[start : start + content]), number) for start in starts]
        pieces.append([piece for piece in cut if len(piece.ids) >= shortest])
    return pieces


def _split(
    pieces: list[list[Piece]], tokens: int, pool_tokens: int | None, seed: int, specials: int
) -> tuple[list[Piece], list[Piece], DocumentSplit]:
    filled = [document for document in pieces if document]
    random.Random(seed).shuffle(filled)
    if pool_tokens is None:
        return take_round_robin(filled, tokens, specials, "evaluation"), [], "none"
    if len(filled) == 1:
        return *_split_contiguously(filled[0], tokens, pool_tokens, specials), "contiguous"
    ours, others = _assign_documents(filled, tokens, pool_tokens, specials)
    evaluation = take_round_robin(ours, tokens, specials, "evaluation")
    return evaluation, take_round_robin(others, pool_tokens, specials, "pool"), "by_document"


def _assign_documents(
    documents: list[list[Piece]], tokens: int, pool_tokens: int, specials: int
) -> tuple[list[list[Piece]], list[list[Piece]]]:
    """Give each document to the side that is filled less; then spare ones of the pool until evaluation has enough."""
    sides: tuple[list[list[Piece]], list[list[Piece]]] = ([], [])
    filled = [0, 0]
    for document in documents:
        side = 0 if filled[0] * pool_tokens <= filled[1] * tokens else 1
        sides[side].append(document)
        filled[side] += _size(document, specials)
    ours, others = sides
    for document in sorted(others, key=lambda document: _size(document, specials)):
        if len(ours) >= DOCUMENTS_FOR_INTERVALS or filled[1] - _size(document, specials) < pool_tokens:
            break
        others.remove(document)
        ours.append(document)
        filled[1] -= _size(document, specials)
    return ours, others


def _split_contiguously(
    document: list[Piece], tokens: int, pool_tokens: int, specials: int
) -> tuple[list[Piece], list[Piece]]:
    evaluation = take_round_robin([document], tokens, specials, "evaluation")
    rest = document[len(evaluation) + 1 :]  # one window of gap, so that the pool doesn't continue the evaluation text
    return evaluation, take_round_robin([rest], pool_tokens, specials, "pool")


def take_round_robin(documents: Sequence[list[Piece]], tokens: int, specials: int, what: str) -> list[Piece]:
    """Whole windows, one from each document in turn, until there are as many tokens as asked for."""
    taken: list[Piece] = []
    total = 0
    for turn in range(max((len(document) for document in documents), default=0)):
        for document in documents:
            if turn < len(document) and total < tokens:
                taken.append(document[turn])
                total += len(document[turn].ids) + specials
    if total < tokens:
        flag = "--tokens" if what == "evaluation" else "--pool-tokens"
        raise CorpusError(
            f"the text leaves {total} tokens for the {what}, {tokens} were asked for; lower {flag} or give more text"
        )
    return sorted(taken, key=lambda piece: piece.document)


def _size(document: list[Piece], specials: int) -> int:
    return sum(len(piece.ids) + specials for piece in document)
