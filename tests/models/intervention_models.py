"""Models for the intervention tests: the families of `tiny_models`, a few more, and any window length."""

import functools
from typing import Any

import torch
from tiny_models import FAMILIES as COMMON
from tiny_models import from_config, tiny_model

from deltalens.models.blocks import watch_blocks
from deltalens.models.load import load
from deltalens.models.model import Model

_PLAIN = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT = {"vocab_size": 96, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128}

#: Families with a trait that the common ones lack: no cache at all, sinks, both mixers in a block, convolutions only.
MORE: dict[str, dict[str, Any]] = {
    "openai-gpt": _GPT,
    "codegen": {**_GPT, "rotary_dim": 4},
    "gpt_oss": {**_PLAIN, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {**_PLAIN, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
                  "mamba_n_groups": 1, "mamba_chunk_size": 16},
    "lfm2": {**_PLAIN, "layer_types": ["conv", "full_attention"] * 2},
    "qwen3_next": {**_PLAIN, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2,
                   "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}  # fmt: skip

FAMILIES = (*COMMON, *MORE)

#: What each family's structure asks for, where it isn't cached keys.
OTHER_SCHEMES = {
    "openai-gpt": "doubled_length",
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "bamba", "zamba2", "nemotron_h",
         "falcon_h1", "lfm2", "qwen3_next"),
        "state_bank",
    ),
}  # fmt: skip

#: A scan that errs between its chunks differs from single steps; far below it, chunks differ by rounding alone.
ROUNDING = 1e-6

_LENGTHS = ("n_positions", "max_position_embeddings", "max_seq_len", "context_length")


@functools.cache
def family_model(family: str, *, tokens: int = 64, dtype: torch.dtype = torch.float32, **changes: Any) -> Model:
    """A tiny random model of a family for windows of up to so many tokens, loaded as any model in memory is."""
    config = COMMON[family].config if family in COMMON else MORE[family]
    longer = {name: 2 * tokens for name in _LENGTHS if name in config}
    if scan_error(family) > ROUNDING:
        longer["chunk_size"] = 2 * tokens
    if family in COMMON:
        hf = tiny_model(family, **longer, **changes)
    else:
        hf = from_config(family, {**config, **longer, **changes})
    return load(hf.to(dtype))


@functools.cache
def scan_error(family: str) -> float:
    """How far the logits of transformers' own scan depend on its chunks, which they shouldn't, relative to their range.

    On 5.9 the scans of Zamba 2 and Nemotron-H do, in float64 too; there they get one chunk, so that tests see the
    intervention's error and not the scan's.
    """
    if family not in COMMON or "chunk_size" not in COMMON[family].config:
        return 0.0
    ids = windows(2, 33)
    with torch.no_grad():
        chunked, whole = (
            tiny_model(family, **changes)(ids, use_cache=False).logits for changes in ({}, {"chunk_size": 64})
        )
    return float((chunked - whole).abs().max() / (whole.max() - whole.min()))


def windows(count: int, tokens: int, *, seed: int = 1) -> torch.Tensor:
    """Seeded random windows that avoid the special ids 0 to 2."""
    return torch.randint(3, 96, (count, tokens), generator=torch.Generator().manual_seed(seed))


def other_states(model: Model, input_ids: torch.Tensor, layer: int) -> torch.Tensor:
    """Block outputs of the neighbouring tokens: natural states, far from the true ones."""
    outputs: list[torch.Tensor] = []
    with torch.no_grad(), watch_blocks([model.blocks[layer]], on_output=lambda _, states: outputs.append(states)):
        model.hf(input_ids=input_ids, use_cache=False)
    return outputs[0].roll(1, dims=1)
