"""What exact single-position interventions cost, in one table from one run.

For an attention model: the time of all tokens' single-position KL at each layer over that of one plain forward, and the
time of patch-and-rerun over it (timed on a sample of positions and scaled to all). For a Mamba: the cost of its bank of
states in token-by-token passes, and of one layer's KL in plain forwards.

    python benchmarks/interventions.py [MODEL] [--random] [--mamba MODEL] [--tokens 256] [--layers 0:30:5] [--repeats 3]
"""

import argparse
import statistics
from collections.abc import Callable, Iterator

import torch
import transformers
from rows import CLOCKS, Row

from deltalens.core.divergence import kl_divergence
from deltalens.models import InterventionSession, Model, capture, choose_scheme, load
from deltalens.models.blocks import override_output
from deltalens.models.interventions.parity import patch_and_rerun


def smollm2_shape() -> Model:
    """A Llama of SmolLM2-135M's shape with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return load(transformers.LlamaForCausalLM(config))


def tiny_mamba_shape() -> Model:
    """A Mamba of tiny-mamba's shape with random weights."""
    config = transformers.MambaConfig(vocab_size=2048, hidden_size=128, num_hidden_layers=6)
    torch.manual_seed(0)
    return load(transformers.MambaForCausalLM(config))


def fastest(runs: list[Callable[[], object]], *, repeats: int, clock: Callable[[], float]) -> list[float]:
    """The least time of each, taken in turns so that a busy moment hits all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, measured in zip(runs, times, strict=True):
            start = clock()
            run()
            measured.append(clock() - start)
    return [min(measured) for measured in times]


def all_tokens_kl(session: InterventionSession, layer: int, states: torch.Tensor) -> torch.Tensor:
    """KL at every token when its own state alone is replaced."""
    kl = torch.empty(states.shape[:2])
    for chunk in session.stream(layer, [states]):
        kl[chunk.windows, chunk.positions] = kl_divergence(chunk.original, chunk.patched)
    return kl


def outputs_of(model: Model, ids: torch.Tensor) -> list[torch.Tensor]:
    """What each block returned."""
    with capture(model, ids) as states:
        return [states.outputs[layer] for layer in range(model.n_layers)]


def whole_rerun_kl(
    model: Model, session: InterventionSession, ids: torch.Tensor, layer: int, states: torch.Tensor, position: int
) -> torch.Tensor:
    """KL at one token, the obvious way: patch it, run the whole window, read one row."""

    def patch(original: torch.Tensor) -> torch.Tensor:
        changed = original.clone()
        changed[:, position] = states[:, position]
        return changed

    with override_output(model.blocks[layer], patch):
        logits = model.hf(input_ids=ids, use_cache=False).logits
    return kl_divergence(session.logits[0, position], logits[0, position])


def cut_rerun_kl(
    model: Model, session: InterventionSession, ids: torch.Tensor, layer: int, states: torch.Tensor, position: int
) -> torch.Tensor:
    """KL at one token by running the window up to it."""
    positions = torch.zeros(ids.shape, dtype=torch.bool)
    positions[0, position] = True
    logits = patch_and_rerun(model, ids, layer=layer, states=states, positions=positions)
    return kl_divergence(session.logits[0, position], logits[0])


def attention_table(model: Model, layers: range, arguments: argparse.Namespace) -> None:
    """Print a row per layer."""
    clock, tokens = CLOCKS[arguments.clock], arguments.tokens
    ids = torch.randint(3, model.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    sample = torch.linspace(0, tokens - 1, arguments.positions).long().tolist()
    outputs = outputs_of(model, ids)
    threads = torch.get_num_threads()
    print(f"\n{model.identity.name}: {tokens} tokens, scheme {choose_scheme(model)}, {threads} thread(s)")
    print(f"patch-and-rerun: one whole window, and {len(sample)} windows cut after the position, scaled to all\n")
    print("layer  all KLs / plain forward  whole reruns / all KLs  cut reruns / all KLs  largest KL difference (nats)")
    rows: list[tuple[float, float, float, float]] = []
    with torch.no_grad(), InterventionSession(model, ids) as session:
        for layer in layers:
            row = layer_row(model, session, ids, layer, outputs[layer].roll(1, dims=1), sample, clock, arguments)
            print(f"{layer:5d}  {row[0]:23.2f}  {row[1]:22.0f}  {row[2]:20.0f}  {row[3]:28.1e}", flush=True)
            rows.append(row)
    ours, whole, cut, difference = (list(column) for column in zip(*rows, strict=True))
    print(f" mean  {statistics.mean(ours):23.2f}  {statistics.mean(whole):22.0f}  {statistics.mean(cut):20.0f}")
    print(f"worst  {max(ours):23.2f}  {min(whole):22.0f}  {min(cut):20.0f}  {max(difference):28.1e}")


def layer_row(
    model: Model,
    session: InterventionSession,
    ids: torch.Tensor,
    layer: int,
    states: torch.Tensor,
    sample: list[int],
    clock: Callable[[], float],
    arguments: argparse.Namespace,
) -> tuple[float, float, float, float]:
    """Our time over a plain forward, reruns over ours (whole and cut), and the largest difference of a sampled KL."""
    plain, ours = fastest(
        [lambda: model.hf(input_ids=ids, use_cache=False), lambda: all_tokens_kl(session, layer, states)],
        repeats=arguments.repeats,
        clock=clock,
    )
    found: list[torch.Tensor] = []

    def whole() -> None:
        whole_rerun_kl(model, session, ids, layer, states, sample[-1])

    def cut() -> None:
        found[:] = [cut_rerun_kl(model, session, ids, layer, states, position) for position in sample]

    whole_time, cut_time = fastest([whole, cut], repeats=1, clock=clock)
    difference = (all_tokens_kl(session, layer, states)[0, sample] - torch.stack(found)).abs().max()
    tokens = ids.shape[1]
    return ours / plain, whole_time * tokens / ours, cut_time / len(sample) * tokens / ours, float(difference)


def mamba_table(model: Model, arguments: argparse.Namespace) -> None:
    """Print the cost of the bank and of a query."""
    clock, tokens = CLOCKS[arguments.clock], arguments.tokens
    ids = torch.randint(3, model.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    outputs = outputs_of(model, ids)

    def plain() -> None:
        model.hf(input_ids=ids, use_cache=False)

    def token_by_token() -> None:
        output = model.hf(input_ids=ids[:, :1], use_cache=True)
        for token in range(1, tokens):
            output = model.hf(input_ids=ids[:, token : token + 1], cache=output.cache, use_cache=True)

    def bank() -> None:
        with InterventionSession(model, ids, scheme="state_bank"):
            pass

    with torch.no_grad():
        plain_time, step_time, bank_time = fastest(
            [plain, token_by_token, bank], repeats=arguments.repeats, clock=clock
        )
        print(f"\n{model.identity.name}: {tokens} tokens, scheme state_bank")
        print(f"bank, once per window: {bank_time / step_time:.2f} token-by-token passes")
        print(
            f"  ({bank_time / plain_time:.1f} plain forwards; a token-by-token pass takes {step_time / plain_time:.1f})"
        )
        with InterventionSession(model, ids, scheme="state_bank") as session:
            for layer in range(model.n_layers):
                states = outputs[layer].roll(1, dims=1)
                (query,) = fastest(
                    [lambda layer=layer, states=states: all_tokens_kl(session, layer, states)],  # type: ignore[misc]
                    repeats=arguments.repeats,
                    clock=clock,
                )
                print(f"layer {layer}: all tokens' KL takes {query / plain_time:.2f} plain forwards")


def rows(
    repeats: int = 3, clock: str = "wall", layers: int = 4, tokens: int = 256, random: bool = True
) -> Iterator[Row]:
    """The mean over layers of all tokens' KL beside plain hooks; SmolLM2-135M, of random weights unless asked."""
    model = smollm2_shape() if random else load("smollm2-135m")
    ids = torch.randint(3, model.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    outputs, chosen = outputs_of(model, ids), torch.linspace(0, model.n_layers - 1, layers).long().tolist()
    asked = argparse.Namespace(repeats=repeats)
    with torch.no_grad(), InterventionSession(model, ids) as session:
        found = [
            layer_row(model, session, ids, layer, outputs[layer].roll(1, dims=1), [tokens - 1], CLOCKS[clock], asked)
            for layer in chosen
        ]
        (plain,) = fastest([lambda: model.hf(input_ids=ids, use_cache=False)], repeats=repeats, clock=CLOCKS[clock])
    cost, whole, cut, difference = (list(column) for column in zip(*found, strict=True))
    # All layers weigh alike in a run, so times are averaged, not ratios.
    ours = statistics.mean(cost)
    theirs = statistics.mean(ratio * own for ratio, own in zip(whole, cost, strict=True))
    yield Row(
        name=f"KL of all {tokens} tokens, one at a time, {layers} layers",
        ours=ours * plain,
        theirs=theirs * plain,
        unit="s per layer",
        rival=f"patch-and-rerun with hooks (1 of {tokens} positions, scaled)",
        ratio=theirs / ours,
        target=150,
        floor="the remaining layers and the head, once",
        note=f"{ours:.2f} plain forwards; reruns cut after the position: {statistics.mean(cut):.0f} times slower; "
        f"KL differs by {max(difference):.0e} at most; slowest layer {min(whole):.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--random", action="store_true", help="random weights of the same shapes, nothing is fetched")
    parser.add_argument("--mamba", default="tiny-mamba")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", default="", help="start:stop:step")
    parser.add_argument("--positions", type=int, default=6, help="sampled positions of patch-and-rerun")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    arguments = parser.parse_args()
    model = smollm2_shape() if arguments.random else load(arguments.model)
    bounds = [int(part) if part else None for part in arguments.layers.split(":")] if arguments.layers else [None]
    attention_table(model, range(model.n_layers)[slice(*bounds)], arguments)
    mamba_table(tiny_mamba_shape() if arguments.random else load(arguments.mamba), arguments)


if __name__ == "__main__":
    main()
