"""Hours and memory of a default run on large models, from operation counts and a few stated assumptions.

    python benchmarks/scale_up.py [--tokens 100000] [--pool-tokens 400000] [--achieved 0.4]

Nothing here is measured: hours are operation counts divided by what a GPU is assumed to do;
docs/scale.md says where the assumptions come from.
"""

import argparse
from dataclasses import dataclass

WINDOW, NEIGHBORS, BLOCK_TOKENS = 256, 64, 1024
MAPS, PROTOCOLS = 3, 2
#: T(x) alone and with all others, under two protocols, six controls under the first; skipping the layer, once a layer.
PATCHES = MAPS * (2 + 6 + 2) + 1
#: Times that comparing two rows of logits reads or writes a number per token of the vocabulary.
PASSES_OVER_LOGITS = 24
#: Multiplications of a fit, in units of k² d: Gram matrix, subspace, residual, and the null's share.
FIT_PRODUCTS = 4


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes; ``block`` is the weights of all blocks together."""

    name: str
    layers: int
    width: int
    vocabulary: int
    block: float
    kv_width: int

    @property
    def head(self) -> float:
        """Weights of the head."""
        return float(self.width * self.vocabulary)

    def weights(self, bytes_each: int) -> float:
        """Bytes of all weights, with an embedding of the head's size."""
        return (self.block + 2 * self.head) * bytes_each


@dataclass(frozen=True)
class Machine:
    """A GPU: dense bfloat16 operations and memory traffic per second at their peak, and its memory in bytes."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    host_bandwidth: float


SHAPES = [
    Shape("Llama-3-8B", 32, 4096, 128256, 6.98e9, 1024),
    Shape("Llama-3-70B", 80, 8192, 128256, 68.45e9, 1024),
]
H100 = Machine("H100 SXM", 989e12, 3.35e12, 80e9, 50e9)


def forward_flops(shape: Shape, *, head: bool) -> float:
    """Operations of one token's plain forward: two per weight, and attention over half a window on average."""
    attention = 4 * shape.layers * shape.width * WINDOW / 2
    return 2 * shape.block + attention + (2 * shape.head if head else 0)


def suffix_flops(shape: Shape) -> float:
    """Operations of one patched token, summed over all layers; its attention reads cached and new keys, masked."""
    layers_left = shape.layers * (shape.layers - 1) / 2
    block = 2 * shape.block / shape.layers + 4 * shape.width * 2 * WINDOW
    return layers_left * block + shape.layers * 2 * shape.head


def fit_flops(shape: Shape, pool_tokens: int, tokens: int) -> float:
    """Operations of one token's fits, summed over layers: the search in both pools, and every map's products."""
    search = 2 * shape.width * (pool_tokens + tokens)
    products = MAPS * PROTOCOLS * FIT_PRODUCTS * 2 * NEIGHBORS**2 * shape.width
    return shape.layers * (search + products)


def hours(shape: Shape, machine: Machine, tokens: int, pool_tokens: int, achieved: float) -> dict[str, float]:
    """GPU hours of each part of a run."""
    rate = machine.flops * achieved
    base = shape.layers * forward_flops(shape, head=True)
    logits = PATCHES * shape.layers * shape.vocabulary * 4 * PASSES_OVER_LOGITS
    seconds = {
        "capture": (tokens + pool_tokens) * forward_flops(shape, head=False) / rate,
        "base runs": tokens * base / rate,
        "patches": tokens * PATCHES * suffix_flops(shape) / rate,
        "KL": tokens * logits / (machine.bandwidth * achieved),
        "fits": tokens * fit_flops(shape, pool_tokens, tokens) / rate,
    }
    return {part: value / 3600 for part, value in seconds.items()}


def memory(shape: Shape, tokens: int, pool_tokens: int) -> dict[str, float]:
    """Bytes on the device, weights and states in bfloat16 and fits in float32."""
    stream = 2 * shape.layers * shape.width
    keys = 2 * 2 * shape.layers * shape.kv_width
    pairs = 2 * 4 * shape.width
    return {
        "weights": shape.weights(2),
        "base run of a block": BLOCK_TOKENS * (stream + keys),
        "logits of a block": BLOCK_TOKENS * shape.vocabulary * 2.0,
        "fits of a block": BLOCK_TOKENS * 4 * shape.width * 31.0,
        "pools of a layer": 3.0 * pairs * (pool_tokens + tokens),
    }


def proof(shape: Shape) -> float:
    """Bytes of the float32 copy on which a half-precision model's fast path is proven, before a run measures."""
    return shape.weights(4)


def disk(shape: Shape, tokens: int, pool_tokens: int) -> float:
    """Bytes of captured states."""
    return 2.0 * (tokens + pool_tokens) * shape.width * (shape.layers + 1)


def offloaded_hours(shape: Shape, machine: Machine, tokens: int, together: int) -> float:
    """Hours that reading the suffixes' weights from the host takes, ``together`` patches at a time."""
    half = shape.weights(2) / 2
    reads = shape.layers * (tokens / BLOCK_TOKENS) * (PATCHES / together + 2)
    return reads * half / machine.host_bandwidth / 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--pool-tokens", type=int, default=400_000)
    parser.add_argument("--achieved", type=float, default=0.4)
    asked = parser.parse_args()
    print(f"{asked.tokens:,} evaluation and {asked.pool_tokens:,} pool tokens, {MAPS} maps with controls, {H100.name}")
    for shape in SHAPES:
        parts = hours(shape, H100, asked.tokens, asked.pool_tokens, asked.achieved)
        total = sum(parts.values())
        held = memory(shape, asked.tokens, asked.pool_tokens)
        gpus = -(-int(sum(held.values())) // int(H100.memory))
        workers = 8 // gpus
        print(f"\n{shape.name}: {total:.1f} GPU hours; {', '.join(f'{k} {v:.2f}' for k, v in parts.items())}")
        print(f"  memory {sum(held.values()) / 1e9:.0f} GB: {', '.join(f'{k} {v / 1e9:.1f}' for k, v in held.items())}")
        print(f"  {proof(shape) / 1e9:.0f} GB beside the weights while the fast path is proven in float32")
        print(f"  disk {disk(shape, asked.tokens, asked.pool_tokens) / 1e9:.0f} GB of states")
        print(f"  8 GPUs: {workers} workers of {gpus}, {total / workers:.1f} hours")
        if gpus == 1:
            print(f"  1 GPU: {total:.1f} hours")
        else:
            slow = offloaded_hours(shape, H100, asked.tokens, together=8)
            print(f"  1 GPU: at least {max(total, slow):.0f} hours, weights read from the host")


if __name__ == "__main__":
    main()
