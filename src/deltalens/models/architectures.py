"""One declarative row per known model type: where its blocks are and how each of them mixes tokens.

A row only says where to look. That the modules found there form one residual stream is measured on every load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, TypedDict

from deltalens.errors import ModelError

Mixers = tuple[tuple[str, str], ...]


class Outputs(TypedDict):
    """Where a block's mixer and MLP add to the stream."""

    mixer_outputs: tuple[str, ...]
    mlp_outputs: tuple[str, ...]


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
        mixer_outputs: Dotted paths in a block of the module whose output the mixer adds to the stream, after any norm
            of its own; the first that exists. Empty where no such module is known.
        mlp_outputs: The same for the MLP; a block without one has none of these paths.
        contribution_scale: Attribute of a block that scales both outputs; empty where they are added as they are.
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
    mixer_outputs: tuple[str, ...] = ("self_attn",)
    mlp_outputs: tuple[str, ...] = ("mlp",)
    contribution_scale: str = ""
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
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "phi", "phi3", "stablelm",
    "olmo", "cohere", "cohere2", "starcoder2", "smollm3", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
#: Families that norm what a sub-layer returns before it is added.
_NORM_AFTER = ("gemma2", "gemma3_text", "olmo2")

_MULTI_STREAM = (
    "its blocks carry several residual streams at once (AltUp), so there is no single (B, S, d) stream to decompose"
)
_GPT: Outputs = {"mixer_outputs": ("attn",), "mlp_outputs": ("mlp",)}
# These two add the stream inside attention and MLP, so what they add is the output of the last linear layers.
_BLOOM: Outputs = {"mixer_outputs": ("self_attention.dense",), "mlp_outputs": ("mlp.dense_4h_to_h",)}
_MPT: Outputs = {"mixer_outputs": ("attn",), "mlp_outputs": ("ffn.down_proj",)}
_MIXER_ONLY: Outputs = {"mixer_outputs": ("mixer",), "mlp_outputs": ()}
_HYBRID: Outputs = {"mixer_outputs": ("mamba", "self_attn"), "mlp_outputs": ("feed_forward",)}

_ROWS: tuple[Architecture, ...] = (
    Architecture("gpt2", "transformer.h", "transformer.wte", **_GPT),
    Architecture("gptj", "transformer.h", "transformer.wte", returns="either", **_GPT),
    Architecture("gpt_neo", "transformer.h", "transformer.wte", returns="tuple", **_GPT),
    Architecture("gpt_bigcode", "transformer.h", "transformer.wte", **_GPT),
    Architecture(
        "gpt_neox", "gpt_neox.layers", "gpt_neox.embed_in", heads=("lm_head", "embed_out"),
        mixer_outputs=("attention",),
    ),
    Architecture("opt", "model.decoder.layers", "model.decoder.embed_tokens", mlp_outputs=("fc2",)),
    Architecture("bloom", "transformer.h", "transformer.word_embeddings", returns="tuple", **_BLOOM),
    Architecture(
        "falcon", "transformer.h", "transformer.word_embeddings", returns="tuple", mixer_outputs=("self_attention",)
    ),
    Architecture("mpt", "transformer.blocks", "transformer.wte", returns="tuple", **_MPT),
    *(Architecture(name) for name in _DECODER_ONLY),
    *(
        Architecture(name, mixer_outputs=("post_attention_layernorm",), mlp_outputs=("post_feedforward_layernorm",))
        for name in _NORM_AFTER
    ),
    Architecture("granite", contribution_scale="residual_multiplier"),
    Architecture("mamba", "backbone.layers", "backbone.embeddings", mixers=(("MambaMixer", "mamba"),), **_MIXER_ONLY),
    Architecture(
        "falcon_mamba", "backbone.layers", "backbone.embeddings", mixers=(("FalconMambaMixer", "mamba"),),
        **_MIXER_ONLY,
    ),
    Architecture(
        "mamba2", "backbone.layers", "backbone.embeddings", mixers=(("Mamba2Mixer", "mamba2"),), **_MIXER_ONLY
    ),
    Architecture(
        "rwkv", "rwkv.blocks", "rwkv.embeddings", ("head",), returns="tuple",
        mixers=(("RwkvSelfAttention", "rwkv"),), handling=("rwkv_rescaling_off",),
        mixer_outputs=("attention",), mlp_outputs=("feed_forward",),
    ),
    Architecture(
        "recurrent_gemma", mixers=(("RecurrentBlock", "recurrent"), ("Attention", "attention")),
        mixer_outputs=("temporal_block",), mlp_outputs=("mlp_block",),
    ),
    Architecture("jamba", mixers=(("JambaMambaMixer", "mamba"), ("JambaAttention", "attention")), **_HYBRID),
    Architecture(
        "bamba", returns="tuple", mixers=(("BambaMixer", "mamba2"), ("BambaAttention", "attention")), **_HYBRID
    ),
    Architecture(
        # A hybrid block's shared attention only feeds its Mamba mixer, which alone adds to the stream.
        "zamba2", mixers=(("Zamba2MambaMixer", "mamba2"), ("Zamba2Attention", "attention")),
        mixer_outputs=("mamba_decoder.mamba", "mamba"), mlp_outputs=(),
    ),
    Architecture(
        "nemotron_h", embedding="model.embeddings",
        mixers=(("NemotronHMamba2Mixer", "mamba2"), ("NemotronHAttention", "attention")), **_MIXER_ONLY,
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
