"""Windows never cross documents, evaluation and pool share none, and short text is refused with its size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deltalens.errors import CorpusError
from deltalens.experiment.corpus import Corpus, build_corpus, shortest_piece
from deltalens.experiment.documents import Document, Documents, built_in_documents, read_paths, read_source


class Words:
    """A tokenizer of white-space words; ids are the words' own numbers. Adds 901 before and 902 after a text."""

    all_special_ids = (901, 902, 903)
    pad_token_id = 901

    def __init__(self, affixes: bool = True) -> None:
        self.affixes = affixes

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
        ids = [int(word) if word.isdigit() else 900 for word in text.split()]
        return {"input_ids": [901, *ids, 902] if add_special_tokens and self.affixes else ids}


def documents(*sizes: int) -> Documents:
    texts = (" ".join(str(number * 100 + i % 100) for i in range(size)) for number, size in enumerate(sizes))
    return Documents("made", tuple(Document(f"d{number}", text) for number, text in enumerate(texts)))


def build(sizes: tuple[int, ...], **options: Any) -> Corpus:
    fields: dict[str, Any] = {"window": 12, "tokens": 24, "pool_tokens": 48, "seed": 0}
    return build_corpus(documents(*sizes), options.pop("tokenizer", Words()), **(fields | options))


def test_a_window_holds_one_document_and_the_special_tokens_once() -> None:
    corpus = build((40, 40, 40, 40))
    assert corpus.pool is not None
    for windows in (corpus.evaluation, corpus.pool):
        for ids, length, document in zip(windows.input_ids, windows.lengths, windows.documents, strict=True):
            assert ids[0] == 901
            assert ids[length - 1] == 902
            assert set((ids[1 : length - 1] // 100).tolist()) == {int(document)}


def test_evaluation_and_pool_share_no_document() -> None:
    corpus = build((30, 30, 30, 30, 30, 30))
    assert corpus.pool is not None
    assert not set(corpus.evaluation.documents.tolist()) & set(corpus.pool.documents.tolist())
    assert corpus.document_split == "by_document"


def test_a_single_document_is_split_contiguously_with_a_gap_of_one_window() -> None:
    corpus = build((200,), tokenizer=Words(affixes=False))
    assert corpus.pool is not None
    assert corpus.document_split == "contiguous"
    last, first = corpus.evaluation.input_ids[-1, -1], corpus.pool.input_ids[0, 0]
    assert int(first - last) == 12 + 1


def test_tokens_round_up_to_whole_windows() -> None:
    corpus = build((100, 100, 100), tokens=25, tokenizer=Words(affixes=False))
    assert corpus.evaluation.tokens == 36


def test_evaluation_spreads_over_eight_documents_where_it_can() -> None:
    corpus = build((200,) * 16, tokens=96, pool_tokens=96, tokenizer=Words(affixes=False))
    assert len(corpus.evaluation.documents.unique()) == 8


def test_padding_follows_the_length_and_never_the_token_id() -> None:
    corpus = build((15, 15, 15, 15, 15), tokens=40, pool_tokens=20)
    short = corpus.evaluation.lengths.min()
    assert short < 12
    assert torch.equal(corpus.evaluation.attention_mask.sum(dim=1), corpus.evaluation.lengths)
    assert not corpus.evaluation.special[corpus.evaluation.attention_mask == 0].any()


def test_special_tokens_are_marked() -> None:
    corpus = build((40, 40, 40))
    real = corpus.evaluation.attention_mask.bool()
    marked = corpus.evaluation.special[real]
    ids = corpus.evaluation.input_ids[real]
    assert torch.equal(marked, (ids == 901) | (ids == 902))


def test_the_same_seed_gives_the_same_windows_and_another_one_others() -> None:
    sizes = (30,) * 12
    first, again, other = build(sizes), build(sizes), build(sizes, seed=1)
    assert torch.equal(first.evaluation.input_ids, again.evaluation.input_ids)
    assert not torch.equal(first.evaluation.input_ids, other.evaluation.input_ids)


@pytest.mark.parametrize(
    ("sizes", "options", "says"),
    [
        ((30, 30), {"tokens": 500}, "--tokens"),
        ((30, 30), {"pool_tokens": 500}, "--pool-tokens"),
        ((1,), {}, "too short"),
        ((30, 30), {"window": 3}, "larger window"),
        ((30, 30), {"neighbors": 64}, "raise pool_tokens"),
        ((30, 30), {"neighbors": 64, "pool_tokens": None}, "raise tokens"),
    ],
)
def test_a_text_that_is_too_small_says_what_to_change(sizes: tuple[int, ...], options: Any, says: str) -> None:
    with pytest.raises(CorpusError) as caught:
        build(sizes, **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_protocol_that_needs_a_pool_leaves_none() -> None:
    assert build((60,), pool_tokens=None).pool is None


def test_trailing_windows_below_an_eighth_are_dropped() -> None:
    assert shortest_piece(128) == 16
    corpus = build((12 * 8 + 1,), window=12, tokens=96, pool_tokens=None, tokenizer=Words(affixes=False))
    assert len(corpus.evaluation) == 8


def test_files_folders_and_json_lines_become_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    lines = [json.dumps({"text": "second"}), "", json.dumps({"text": "third\u2028x"}), ""]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert [d.text for d in read_paths([tmp_path]).items] == ["first", "second", "third\u2028x"]


def test_a_string_is_content_and_a_path_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("content of the file")
    assert read_source(str(file)).items[0].text == str(file)
    assert read_source(file).items[0].text == "content of the file"
    assert [d.text for d in read_source([file, "more"]).items] == ["content of the file", "more"]


def test_a_text_that_comes_twice_counts_once_and_equal_names_are_told_apart() -> None:
    found = read_source(["same text", "another", "same text"])
    assert [document.text for document in found.items] == ["same text", "another"]


def test_files_of_one_name_in_several_folders_have_names_of_their_own(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(f"in {folder}")
    found = read_paths([tmp_path / "a" / "text.txt", tmp_path / "b" / "text.txt"])
    assert len({document.name for document in found.items}) == 2


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"\xff\xfe", "UTF-8"),
        ("a.txt", b" \n", "empty"),
        ("a.jsonl", b"{", "isn't JSON"),
        ("a.jsonl", b'{"text": "half \\ud800"}', "surrogate"),
        ("a.jsonl", b"[1]", "'text'"),
        ("a.jsonl", b'{"text": 3}', "'text'"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CorpusError) as caught:
        read_paths([path])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_empty_folders_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="does not exist"):
        read_paths([tmp_path / "none.txt"])
    with pytest.raises(CorpusError, match="holds no text file"):
        read_paths([tmp_path])


def test_the_hash_follows_text_and_the_boundaries_of_documents() -> None:
    hashes = {
        Documents("n", tuple(Document("d", text) for text in texts)).hash
        for texts in (("ab", "c"), ("a", "bc"), ("abc",), ("abd",))
    }
    assert len(hashes) == 4


def test_built_in_documents_share_no_long_paragraph() -> None:
    seen: dict[str, str] = {}
    for document in built_in_documents().items:
        for paragraph in {" ".join(p.split()) for p in document.text.split("\n\n")}:
            if len(paragraph) > 60:
                assert seen.setdefault(paragraph, document.name) == document.name
