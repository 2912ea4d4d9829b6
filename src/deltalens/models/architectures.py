"""One declarative row per known model type: where its blocks are and how each of them mixes tokens.

A row only says where to look. That the modules found there form one residual stream is measured on every load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

from deltalens.errors import ModelError

Mixers = tuple[tuple[str, str], ...]

#: What a block's submodules are called when no row says it: part of a class name -> kind of token mixing.
GENERIC_MIXERS: Mixers = (
    ("Mamba2", "mamba2"),
    ("Mamba", "mamba"),
    ("BambaMixer", "mamba2"),
    ("RecurrentBlock", "recurrent"),
    ("Rwkv", "rwkv"),
    ("GatedDelta", "linear_attention"),
    ("LinearAttention", "linear_attention"),
    ("ShortConv", "convolution"),
    ("Attention", "attention"),
)
_ATTENTION: Mixers = (("Attention", "attention"),)


@dataclass(frozen=True)
class Architecture:
    """Where the parts of one model type live.

    Attributes:
        model_type: `config.model_type`.
        blocks: Dotted path from the causal language model to the ordered list of its blocks.
        embedding: Dotted path of the token embedding.
        heads: Dotted path of the output layer; the first that exists, since the name differs between versions.
        returns: What a block's forward returns; `either` where that differs between versions of transformers.
        mixers: Part of a submodule's class name -> kind of token mixing. A block with none of them is an `mlp`, one
            with two kinds a `hybrid`.
        handling: Special handling applied on load, by name; empty for nearly all.
        refused: Why this type can't be measured; None if it can.
        discovered: Found from the forward pass rather than listed here.
    """

    model_type: str
    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    heads: tuple[str, ...] = ("lm_head",)
    returns: Literal["tensor", "tuple", "either"] = "tensor"
    mixers: Mixers = _ATTENTION
    handling: tuple[str, ...] = ()
    refused: str | None = None
    discovered: bool = False


def row_from_mapping(row: Mapping[str, object]) -> Architecture:
    """Build a row from plain data; a key that a row doesn't have is an error, never dropped.

    Args:
        row: Field names and values of `Architecture`.

    Returns:
        The row.

    Raises:
        ModelError: An unknown key, or no `model_type`.

    Example:
        >>> row_from_mapping({"model_type": "llama"}).blocks
        'model.layers'
    """
    known = {field.name for field in fields(Architecture)}
    unknown = sorted(set(row) - known)
    if unknown or "model_type" not in row:
        raise ModelError(
            f"An architecture row has the keys {sorted(row)}; unknown are {unknown}, allowed are {sorted(known)}."
        )
    return Architecture(**row)  # type: ignore[arg-type]


_DECODER_ONLY = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi",
    "phi3", "stablelm", "olmo", "olmo2", "cohere", "cohere2", "granite", "starcoder2", "smollm3", "deepseek_v2",
    "deepseek_v3",
)  # fmt: skip

_MULTI_STREAM = (
    "its blocks carry several residual streams at once (AltUp), so there is no single (B, S, d) stream to decompose"
)

_ROWS: tuple[Architecture, ...] = (
    Architecture("gpt2", "transformer.h", "transformer.wte"),
    Architecture("gptj", "transformer.h", "transformer.wte", returns="either"),
    Architecture("gpt_neo", "transformer.h", "transformer.wte", returns="tuple"),
    Architecture("gpt_bigcode", "transformer.h", "transformer.wte"),
    Architecture("gpt_neox", "gpt_neox.layers", "gpt_neox.embed_in", heads=("lm_head", "embed_out")),
    Architecture("opt", "model.decoder.layers", "model.decoder.embed_tokens"),
    Architecture("bloom", "transformer.h", "transformer.word_embeddings", returns="tuple"),
    Architecture("falcon", "transformer.h", "transformer.word_embeddings", returns="tuple"),
    Architecture("mpt", "transformer.blocks", "transformer.wte", returns="tuple"),
    *(Architecture(name) for name in _DECODER_ONLY),
    Architecture("mamba", "backbone.layers", "backbone.embeddings", mixers=(("MambaMixer", "mamba"),)),
    Architecture("falcon_mamba", "backbone.layers", "backbone.embeddings", mixers=(("FalconMambaMixer", "mamba"),)),
    Architecture("mamba2", "backbone.layers", "backbone.embeddings", mixers=(("Mamba2Mixer", "mamba2"),)),
    Architecture(
        "rwkv", "rwkv.blocks", "rwkv.embeddings", ("head",), returns="tuple",
        mixers=(("RwkvSelfAttention", "rwkv"),), handling=("rwkv_rescaling_off",),
    ),
    Architecture("recurrent_gemma", mixers=(("RecurrentBlock", "recurrent"), ("Attention", "attention"))),
    Architecture("jamba", mixers=(("JambaMambaMixer", "mamba"), ("JambaAttention", "attention"))),
    Architecture("bamba", returns="tuple", mixers=(("BambaMixer", "mamba2"), ("BambaAttention", "attention"))),
    Architecture("zamba2", mixers=(("Zamba2MambaMixer", "mamba2"), ("Zamba2Attention", "attention"))),
    Architecture(
        "nemotron_h", embedding="model.embeddings",
        mixers=(("NemotronHMamba2Mixer", "mamba2"), ("NemotronHAttention", "attention")),
    ),
    Architecture("gemma3n", refused=_MULTI_STREAM),
    Architecture("gemma3n_text", refused=_MULTI_STREAM),
)  # fmt: skip


def _by_type(rows: Iterable[Architecture]) -> Mapping[str, Architecture]:
    table: dict[str, Architecture] = {}
    for row in rows:
        if row.model_type in table:
            raise ModelError(f"The architecture {row.model_type} has two rows; keep one.")
        table[row.model_type] = row
    return MappingProxyType(table)


#: Every known architecture by its `config.model_type`.
ARCHITECTURES: Mapping[str, Architecture] = _by_type(_ROWS)
