"""What a loaded model is here: the transformers model, its blocks in order, and who it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from deltalens.models.architectures import Architecture

Source = Literal["hub", "folder", "gguf", "built-in", "named", "object"]


@dataclass(frozen=True)
class ModelIdentity:
    """Everything that two runs must share before their figures may be compared.

    Attributes:
        name: As it was asked for.
        source: Where it came from.
        revision: Commit of the hub, or None.
        weight_hash: sha256 over the names, shapes, dtypes and bytes of all weights.
        model_type: `config.model_type`.
        architecture: Class of the transformers model.
        parameters: How many, tied ones once.
        dtype: Of the embedding, such as `float32`.
        attention: Kernel that transformers uses, such as `sdpa`.
        quantization: Method and width, or None.
    """

    name: str
    source: Source
    revision: str | None
    weight_hash: str
    model_type: str
    architecture: str
    parameters: int
    dtype: str
    attention: str | None
    quantization: str | None


def input_device(embedding: nn.Module) -> torch.device:
    """Return where a token embedding takes its ids, also when accelerate keeps its weights elsewhere."""
    execution = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    if execution is not None:
        return torch.device(execution if not isinstance(execution, int) else f"cuda:{execution}")
    device: torch.device = embedding.weight.device  # type: ignore[assignment]
    return device


@dataclass(frozen=True)
class Model:
    """A causal language model whose blocks are known to form one residual stream.

    Attributes:
        hf: The transformers model, in eval mode.
        tokenizer: Its tokenizer, or None if it came with none.
        blocks: The blocks in the order in which the forward pass calls them.
        identity: Who it is.
        architecture: The row that located its parts.
        block_kinds: Token mixing of each block: `attention`, `sliding_attention`, `mamba`, `mamba2`, `rwkv`,
            `recurrent`, `hybrid`, `mlp`, ...

    Example:
        >>> import deltalens as dl
        >>> model = dl.load("tiny-neox")
        >>> model.n_layers == len(model.blocks) == len(model.block_kinds)
        True
    """

    hf: Any
    tokenizer: Any
    blocks: tuple[nn.Module, ...]
    identity: ModelIdentity
    architecture: Architecture
    block_kinds: tuple[str, ...]

    @property
    def n_layers(self) -> int:
        """How many blocks there are."""
        return len(self.blocks)

    @property
    def embedding(self) -> nn.Module:
        """The module that turns token ids into states."""
        module: nn.Module = self.hf.get_submodule(self.architecture.embedding)
        return module

    @property
    def width(self) -> int:
        """Components of a state."""
        config = self.hf.config.get_text_config()
        return int(config.hidden_size)

    @property
    def vocabulary(self) -> int:
        """Token ids that the embedding knows."""
        return int(self.embedding.weight.shape[0])  # type: ignore[index]

    @property
    def longest_window(self) -> int | None:
        """The most tokens that the model was built for; None where its config sets no limit."""
        config = self.hf.config.get_text_config()
        found = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        return int(found) if isinstance(found, int) else None

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return input_device(self.embedding)

    @property
    def dtype(self) -> torch.dtype:
        """The embedding's dtype, which the residual stream starts in."""
        dtype: torch.dtype = self.embedding.weight.dtype  # type: ignore[assignment]
        return dtype

    def __repr__(self) -> str:
        """One line, not the module tree."""
        identity = self.identity
        return (
            f"Model({identity.name}: {identity.architecture}, {self.n_layers} layers, width {self.width}, "
            f"{identity.parameters:,} parameters, {identity.dtype})"
        )
