"""Train one built-in model: ``python training/train.py tiny-neox --steps 2400``.

The tokenizer is trained first, once, and shared by the three models. Each model is saved in float16 as an ordinary
Hugging Face folder below ``src/deltalens/models/builtin``.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from texts import training_documents

BUILTIN = Path(__file__).resolve().parents[1] / "src" / "deltalens" / "models" / "builtin"
TOKENIZER = BUILTIN / "tokenizer"
END_OF_TEXT = "<|endoftext|>"
VOCABULARY, LAYERS, WIDTH, WINDOW = 2048, 6, 128, 128

CONFIGS: dict[str, PreTrainedConfig] = {
    "tiny-gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_positions=WINDOW, n_embd=WIDTH, n_layer=LAYERS, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
    "tiny-neox": GPTNeoXConfig(
        vocab_size=VOCABULARY, max_position_embeddings=WINDOW, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=4, intermediate_size=4 * WIDTH, bos_token_id=0, eos_token_id=0,
    ),
    "tiny-mamba": MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=8, expand=2,
        use_mambapy=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    ),
}  # fmt: skip


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 2,048 pieces, saved beside the models."""
    model = ByteLevelBPETokenizer()
    model.train_from_iterator(documents, vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=WINDOW,
    )
    tokenizer.save_pretrained(TOKENIZER)
    return tokenizer


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    """All documents in one row, an end-of-text token after each."""
    encoded = tokenizer.backend_tokenizer.encode_batch(documents)
    return torch.tensor([token for document in encoded for token in (*document.ids, 0)], dtype=torch.long)


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def train(
    model: PreTrainedModel, stream: torch.Tensor, *, steps: int, batch: int, peak: float, seed: int, minutes: float
) -> None:
    """AdamW on random windows; stops early at ``minutes`` of wall time, with the schedule following the clock."""
    generator = torch.Generator().manual_seed(seed)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    model.train()
    began, smooth = time.monotonic(), float("nan")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        starts = torch.randint(0, len(stream) - WINDOW, (batch,), generator=generator)
        windows = torch.stack([stream[s : s + WINDOW] for s in starts.tolist()])
        loss = model(input_ids=windows, labels=windows, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
        if step % 20 == 0:
            print(f"step {step} loss {smooth:.3f} {(time.monotonic() - began) / (step + 1):.2f} s/step", flush=True)
        if time.monotonic() - began > 60 * minutes:
            raise SystemExit(f"stopped after {minutes} minutes at step {step}: lower --steps so that the schedule ends")


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=[*CONFIGS, "tokenizer"])
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=240.0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)

    documents = training_documents()
    if arguments.model == "tokenizer":
        train_tokenizer(documents)
        return
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    stream = token_stream(tokenizer, documents)
    print(f"{len(documents)} documents, {len(stream)} tokens", flush=True)
    model = AutoModelForCausalLM.from_config(CONFIGS[arguments.model], dtype=torch.float32)
    train(
        model, stream, steps=arguments.steps, batch=arguments.batch, peak=arguments.learning_rate,
        seed=arguments.seed, minutes=arguments.minutes,
    )  # fmt: skip
    if arguments.model == "tiny-mamba":
        model.config.use_mambapy = False
    model.half().save_pretrained(BUILTIN / arguments.model)


if __name__ == "__main__":
    main()
