"""A tiny random model of every family, from its config alone, with weights large enough for attention to matter."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

LAYERS, WIDTH, HEADS, VOCABULARY, SLIDING = 4, 32, 4, 96, 8

_PLAIN = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 64, "max_position_embeddings": 128,
}  # fmt: skip
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_SLIDING = {**_GROUPED, "sliding_window": SLIDING}
_STATE_SPACE = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    **_PLAIN, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_shared_experts": 1,
}  # fmt: skip
_MAMBA2_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_IDS = {"bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Family:
    """One row of the matrix: a title, the model type, its config and the kinds of its four blocks."""

    title: str
    model_type: str
    config: dict[str, Any]
    kinds: tuple[str, ...] = ("attention",) * LAYERS
    ids: dict[str, Any] = field(default_factory=lambda: dict(_IDS))


_LOCAL = ("sliding_attention",) * LAYERS

FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT-2", "gpt2", {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": WIDTH, "n_layer": LAYERS,
                                     "n_head": HEADS}),
    "gptj": Family("GPT-J", "gptj", {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": WIDTH, "n_layer": LAYERS,
                                     "n_head": HEADS, "rotary_dim": 4}),
    "gpt_neo": Family("GPT-Neo", "gpt_neo",
                      {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "hidden_size": WIDTH,
                       "num_layers": LAYERS, "num_heads": HEADS, "attention_types": [[["global", "local"], 2]],
                       "window_size": SLIDING},
                      ("attention", "sliding_attention") * 2),
    "gpt_neox": Family("GPT-NeoX (Pythia)", "gpt_neox", _PLAIN),
    "gpt_bigcode": Family("GPT-BigCode", "gpt_bigcode",
                          {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": WIDTH, "n_layer": LAYERS,
                           "n_head": HEADS}),
    "opt": Family("OPT", "opt", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
                                 "num_attention_heads": HEADS, "ffn_dim": 64, "max_position_embeddings": 128,
                                 "word_embed_proj_dim": WIDTH}),
    "bloom": Family("BLOOM", "bloom", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": LAYERS,
                                       "n_head": HEADS}),
    "falcon": Family("Falcon", "falcon", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
                                          "num_attention_heads": HEADS}),
    "falcon-alibi": Family("Falcon with ALiBi", "falcon",
                           {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
                            "num_attention_heads": HEADS, "alibi": True}),
    "mpt": Family("MPT", "mpt", {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS,
                                 "max_seq_len": 128}),
    "llama": Family("Llama", "llama", _GROUPED),
    "mistral": Family("Mistral", "mistral", _SLIDING, _LOCAL),
    "mixtral": Family("Mixtral", "mixtral", {**_GROUPED, "num_local_experts": 4}),
    "qwen2": Family("Qwen 2", "qwen2", _GROUPED),
    "qwen2_moe": Family("Qwen 2 MoE", "qwen2_moe",
                        {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3": Family("Qwen 3", "qwen3", {**_GROUPED, "head_dim": 8}),
    "qwen3_moe": Family("Qwen 3 MoE", "qwen3_moe", {**_GROUPED, **_EXPERTS, "head_dim": 8}),
    "gemma": Family("Gemma 1", "gemma", {**_GROUPED, "head_dim": 8}),
    "gemma2": Family("Gemma 2", "gemma2", {**_SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8},
                     ("sliding_attention", "attention") * 2),
    "gemma3": Family("Gemma 3", "gemma3_text",
                     {**_SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8,
                      "layer_types": ["sliding_attention", "full_attention"] * 2},
                     ("sliding_attention", "attention") * 2),
    "phi": Family("Phi 1", "phi", _PLAIN),
    "phi3": Family("Phi 3", "phi3", {**_SLIDING, "pad_token_id": 0}, _LOCAL),
    "stablelm": Family("StableLM", "stablelm", _GROUPED),
    "olmo": Family("OLMo", "olmo", _GROUPED),
    "olmo2": Family("OLMo 2", "olmo2", _GROUPED),
    "cohere": Family("Cohere", "cohere", _GROUPED),
    "cohere2": Family("Cohere 2", "cohere2", {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2},
                      ("sliding_attention", "attention") * 2),
    "granite": Family("Granite", "granite", {**_GROUPED, "logits_scaling": 4.0, "residual_multiplier": 0.7}),
    "starcoder2": Family("StarCoder 2", "starcoder2", _SLIDING, _LOCAL),
    "smollm3": Family("SmolLM 3", "smollm3", {**_GROUPED, "pad_token_id": 0}),
    "deepseek_v2": Family("DeepSeek V2", "deepseek_v2", {**_LATENT, "topk_method": "greedy"}),
    "deepseek_v3": Family("DeepSeek V3", "deepseek_v3", _LATENT),
    "mamba": Family("Mamba", "mamba", _STATE_SPACE, ("mamba",) * LAYERS),
    "mamba2": Family("Mamba 2", "mamba2",
                     {**_STATE_SPACE, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
                     ("mamba2",) * LAYERS),
    "falcon_mamba": Family("Falcon-Mamba", "falcon_mamba", _STATE_SPACE, ("mamba",) * LAYERS),
    "rwkv": Family("RWKV", "rwkv", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
                                    "context_length": 128, "rescale_every": 2}, ("rwkv",) * LAYERS),
    "recurrent_gemma": Family("RecurrentGemma", "recurrent_gemma",
                              {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
                               "num_attention_heads": HEADS, "num_key_value_heads": 1, "lru_width": WIDTH,
                               "intermediate_size": 64, "attention_window_size": SLIDING,
                               "block_types": ["recurrent", "attention"]},
                              ("recurrent", "sliding_attention") * 2),
    "jamba": Family("Jamba", "jamba",
                    {**_GROUPED, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                     "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
                    ("mamba", "attention") * 2),
    "bamba": Family("Bamba", "bamba",
                    {**_GROUPED, **_MAMBA2_HEADS, "mamba_chunk_size": 16, "attn_layer_indices": [1, 3]},
                    ("mamba2", "attention") * 2),
    "zamba2": Family("Zamba 2", "zamba2",
                     {**_PLAIN, "num_key_value_heads": 4, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
                      "mamba_ngroups": 1, "n_mamba_heads": 8, "chunk_size": 16, "num_mem_blocks": 1,
                      "layers_block_type": ["mamba", "hybrid"] * 2, "use_mem_rope": True, "adapter_rank": 4},
                     ("mamba2", "hybrid") * 2),
    "nemotron_h": Family("Nemotron-H", "nemotron_h",
                         {**_GROUPED, "head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
                          "n_groups": 2, "chunk_size": 16, "hybrid_override_pattern": "M*-M"},
                         ("mamba2", "attention", "mlp", "mamba2")),
}  # fmt: skip


#: Config of `gemma3n_text`, whose blocks carry several streams at once.
MULTI_STREAM: dict[str, Any] = {
    **_SLIDING, **_IDS, "head_dim": 8, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * LAYERS,
}  # fmt: skip


def tiny_model(name: str, *, seed: int = 0, gain: float = 1.0, **changes: Any) -> Any:
    """The transformers model of a family, in eval mode; `changes` go into its config."""
    family = FAMILIES[name]
    return from_config(family.model_type, {**family.config, **family.ids, **changes}, seed=seed, gain=gain)


def from_config(model_type: str, config: dict[str, Any], *, seed: int = 0, gain: float = 1.0) -> Any:
    """A random model of any type that transformers knows."""
    transformers_logging.set_verbosity_error()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config), dtype=torch.float32)
    enliven(hf, seed=seed, gain=gain)
    return hf.eval()


@torch.no_grad()
def enliven(hf: Any, *, seed: int, gain: float) -> None:
    """Redraw matrices with standard deviation gain / sqrt(fan in) and jitter vectors, so that no part is idle."""
    generator = torch.Generator().manual_seed(seed)
    keep = ("A_log", "dt_", "conv", "recurrent_param", "time_", "sinks")
    for name, parameter in hf.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2 and not any(part in name for part in keep):
            parameter.copy_(noise * gain / math.sqrt(min(parameter.shape[-2:])))
        elif parameter.dim() == 1 and not any(part in name for part in keep):
            parameter.add_(0.1 * noise)


def token_ids(windows: int = 2, tokens: int = 33, *, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Seeded random windows that avoid the special ids 0 to 2."""
    return torch.randint(3, vocabulary, (windows, tokens), generator=torch.Generator().manual_seed(seed))
