"""The token rows of a unit: who each token is, why it is left out, and every measure by its column name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from deltalens.core.decomposition import Decomposition
from deltalens.core.geometry import Geometry
from deltalens.experiment.corpus import Windows
from deltalens.experiment.exclusions import REASONS, Exclusions
from deltalens.experiment.functional import Effect

#: Neighbours of each token that are kept for the report.
NEIGHBORS_KEPT = 8


def token_rows(
    windows: Windows, document_names: tuple[str, ...], exclusions: Exclusions, tokenizer: object
) -> pd.DataFrame:
    """One row per real token: where it stands, which it is, and whether it is excluded."""
    real = windows.attention_mask.bool()
    window, position = torch.nonzero(real, as_tuple=True)
    ids = windows.input_ids[real].numpy()
    reasons = exclusions.reason[real].numpy()
    names = np.array(document_names, dtype=object)
    return pd.DataFrame(
        {
            "window": window.numpy(),
            "position": position.numpy(),
            "document": names[windows.documents[window].numpy()],
            "token_id": ids,
            "token": token_texts(ids, tokenizer),
            "excluded": reasons != 0,
            "reason": np.array(REASONS, dtype=object)[reasons],
        }
    )


def token_texts(ids: np.ndarray, tokenizer: object) -> list[str]:
    """Each token's text; bytes that are no whole character are spelled like ``<0xE2>``."""
    distinct = {int(token): _token_text(int(token), tokenizer) for token in np.unique(ids)}
    return [distinct[int(token)] for token in ids]


def geometry_table(geometry: Geometry) -> pd.DataFrame:
    """The geometric measures of the included tokens, a column each."""
    return pd.DataFrame({name: _array(values) for name, values in vars(geometry).items()})


def measured_rows(
    included: Bool[Tensor, " rows"],
    geometry: Geometry,
    decomposition: Decomposition[Tensor],
    functional: Mapping[str, np.ndarray],
) -> pd.DataFrame:
    """The measures of one unit at some tokens, a row per token; excluded ones have NaN."""
    measured = geometry_table(geometry)
    measured["distinct_neighbors"] = _array(decomposition.distinct_neighbors)
    measured["degrees_of_freedom"] = _array(decomposition.degrees_of_freedom)
    rows = np.flatnonzero(included.numpy())
    columns = {name: _at_rows(measured[name].to_numpy(), rows, len(included)) for name in measured}
    return pd.DataFrame(columns | dict(functional))


def effect_columns(effect: Effect, real: Bool[Tensor, "w s"], suffix: str) -> dict[str, np.ndarray]:
    """The full set of columns of a patch: divergences, change of the loss, agreement of the argmax."""
    columns = {f"{name}_{suffix}": _array(values[real]) for name, values in effect.divergences.items()}
    return columns | {
        f"nll_delta_{suffix}": _array(effect.nll_delta[real]),
        f"top1_agrees_{suffix}": _array(effect.top1_agrees[real]),
    }


def neighbor_rows(
    tokens: pd.DataFrame, pool: pd.DataFrame, neighbors: Tensor, distances: Tensor, columns: Mapping[str, Any]
) -> pd.DataFrame:
    """The nearest pool tokens of each included token, nearest first, below columns that are the same in all rows."""
    kept = min(NEIGHBORS_KEPT, neighbors.shape[1])
    chosen = neighbors[:, :kept].numpy()
    owner = np.repeat(np.arange(len(chosen)), kept)
    own = tokens.iloc[owner]
    other = pool.iloc[chosen.reshape(-1)]
    return pd.DataFrame(
        {
            **columns,
            "window": own["window"].to_numpy(),
            "position": own["position"].to_numpy(),
            "rank": np.tile(np.arange(kept), len(chosen)),
            "pool_window": other["window"].to_numpy(),
            "pool_position": other["position"].to_numpy(),
            "distance": _array(distances[:, :kept]).reshape(-1).astype(np.float32),
        }
    )


def _token_text(token: int, tokenizer: object) -> str:
    text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)  # type: ignore[attr-defined]
    if "\ufffd" not in text and text:
        return text
    piece = str(tokenizer.convert_ids_to_tokens(token))  # type: ignore[attr-defined]
    if not all(character in _BYTE_OF for character in piece):
        return piece
    whole = bytes(_BYTE_OF[character] for character in piece).decode("utf8", "surrogateescape")
    return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in whole)


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level tokenizers spell bytes: printable Latin-1 as itself, the rest from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _at_rows(values: np.ndarray, rows: np.ndarray, length: int) -> np.ndarray:
    column = np.full(length, np.nan)
    column[rows] = values
    return column


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()
