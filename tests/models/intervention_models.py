"""Tiny random models of many families whose weights are large enough that attention and recurrence matter."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from deltalens.models.discovery import find_blocks
from deltalens.models.model import Model, ModelIdentity

_LLAMA = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=640, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_GPT2 = dict(vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=640, bos_token_id=1, eos_token_id=2)
_MAMBA = dict(vocab_size=97, hidden_size=32, num_hidden_layers=4, state_size=8, pad_token_id=0, eos_token_id=2)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _GPT2),
    "gpt_neox": ("GPTNeoX", _LLAMA),
    "llama": ("Llama", _LLAMA),
    "gemma": ("Gemma", _LLAMA | dict(head_dim=8)),
    "gemma2": ("Gemma2", _LLAMA | dict(head_dim=8, sliding_window=8, final_logit_softcapping=3.0, attn_logit_softcapping=5.0)),
    "gemma3": ("Gemma3Text", _LLAMA | dict(head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)),
    "mistral": ("Mistral", _LLAMA | dict(sliding_window=8)),
    "mixtral": ("Mixtral", _LLAMA | dict(sliding_window=8, num_local_experts=4)),
    "qwen2": ("Qwen2", _LLAMA | dict(use_sliding_window=True, sliding_window=8, max_window_layers=2)),
    "qwen3": ("Qwen3", _LLAMA | dict(head_dim=8)),
    "qwen2_moe": ("Qwen2Moe", _LLAMA | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)),
    "bloom": ("Bloom", dict(vocab_size=97, hidden_size=32, n_layer=4, n_head=4)),
    "mpt": ("Mpt", dict(vocab_size=97, d_model=32, n_heads=4, n_layers=4, max_seq_len=640)),
    "gpt_neo": ("GPTNeo", dict(vocab_size=97, hidden_size=32, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=8, max_position_embeddings=640, intermediate_size=64)),
    "gptj": ("GPTJ", _GPT2 | dict(rotary_dim=4)),
    "codegen": ("CodeGen", _GPT2 | dict(rotary_dim=4)),
    "gpt_bigcode": ("GPTBigCode", _GPT2),
    "opt": ("OPT", dict(vocab_size=97, hidden_size=32, ffn_dim=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=640, word_embed_proj_dim=32)),
    "falcon": ("Falcon", dict(vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, alibi=False, max_position_embeddings=640)),
    "falcon_alibi": ("Falcon", dict(vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, alibi=True)),
    "phi": ("Phi", _LLAMA | dict(num_key_value_heads=4)),
    "phi3": ("Phi3", _LLAMA | dict(sliding_window=8)),
    "stablelm": ("StableLm", _LLAMA),
    "cohere": ("Cohere", _LLAMA),
    "cohere2": ("Cohere2", _LLAMA | dict(sliding_window=8)),
    "olmo2": ("Olmo2", _LLAMA),
    "granite": ("Granite", _LLAMA | dict(logits_scaling=2.0, residual_multiplier=0.5)),
    "gpt_oss": ("GptOss", _LLAMA | dict(head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2)),
    "openai_gpt": ("OpenAIGPT", dict(vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=640)),
    "mamba": ("Mamba", _MAMBA),
    "mamba2": ("Mamba2", _MAMBA | dict(num_heads=8, head_dim=8, n_groups=2, chunk_size=16)),
    "falcon_mamba": ("FalconMamba", _MAMBA),
    "jamba": ("Jamba", _LLAMA | dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=2, num_experts_per_tok=1, use_mamba_kernels=False, mamba_d_state=8, mamba_dt_rank=4)),
    "zamba2": ("Zamba2", _LLAMA | dict(num_key_value_heads=4, mamba_d_state=8, mamba_headdim=8, n_mamba_heads=8, mamba_ngroups=1, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], hybrid_layer_ids=[1, 3], num_mem_blocks=1, chunk_size=16, adapter_rank=8)),
    "bamba": ("Bamba", _LLAMA | dict(attn_layer_indices=[1, 3], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16, attn_rotary_emb=4)),
    "nemotron_h": ("NemotronH", _LLAMA | dict(head_dim=8, layers_block_type=["mamba", "attention", "moe", "mamba", "attention"], mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=1, chunk_size=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, n_group=1, topk_group=1)),
    "falcon_h1": ("FalconH1", _LLAMA | dict(mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16)),
    "rwkv": ("Rwkv", dict(vocab_size=97, hidden_size=32, attention_hidden_size=32, num_hidden_layers=4, context_length=640, rescale_every=0)),
    "recurrent_gemma": ("RecurrentGemma", _LLAMA | dict(lru_width=32, attention_window_size=8, block_types=["recurrent", "attention"], head_dim=8, num_key_value_heads=1)),
    "lfm2": ("Lfm2", _LLAMA | dict(layer_types=["conv", "full_attention"] * 2)),
    "qwen3_next": ("Qwen3Next", _LLAMA | dict(head_dim=8, layer_types=["linear_attention", "full_attention"] * 2, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)),
}  # fmt: skip


def family_model(family: str, *, seed: int = 0, **changes: Any) -> Model:
    """Build a tiny random model of a family."""
    name, fields = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")
    kind = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    hf = kind(config(**fields | changes)).eval()
    sharpen(hf, seed)
    return as_model(hf)


def sharpen(hf: torch.nn.Module, seed: int) -> None:
    """Give matrices a gain at which attention and recurrence move the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if parameter.dim() == 2 and "A_log" not in name and "embed" not in name and "wte" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.2 / parameter.shape[-1] ** 0.5)


def as_model(hf: Any) -> Model:
    """Wrap a transformers model as `load` would, without its checks."""
    found = find_blocks(hf)
    identity = ModelIdentity(
        name=hf.config.model_type, source="object", revision=None, weight_hash="", model_type=hf.config.model_type,
        architecture=type(hf).__name__, parameters=0, dtype="float32", attention=None, quantization=None,
    )  # fmt: skip
    return Model(hf, None, found.blocks, identity, found.architecture, found.kinds)
