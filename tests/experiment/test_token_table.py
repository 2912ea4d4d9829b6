"""Token text is faithful: spaces, line ends and halves of characters are all told apart."""

import numpy as np
import pytest

from deltalens.experiment.token_table import token_texts
from deltalens.models import load


@pytest.mark.parametrize("text", [" a\n\tb", "naïve café", "“quoted” — dash", "日本語 🙂", "שלום", "\x00\x1b[31m"])
def test_token_texts_spell_the_text_byte_by_byte(text: str) -> None:
    tokenizer = load("tiny-gpt2").tokenizer
    ids = np.array(tokenizer(text)["input_ids"])
    pieces = token_texts(ids, tokenizer)
    assert "\ufffd" not in "".join(pieces)
    assert b"".join(_bytes(piece) for piece in pieces) == text.encode("utf8")


def _bytes(piece: str) -> bytes:
    found, at = b"", 0
    while at < len(piece):
        if piece.startswith("<0x", at) and piece[at + 5 : at + 6] == ">":
            found, at = found + bytes([int(piece[at + 3 : at + 5], 16)]), at + 6
        else:
            found, at = found + piece[at].encode("utf8"), at + 1
    return found
