"""The picture of the README: ``python docs/depth_figure.py RUN docs/images/smollm2.png``."""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from PIL import Image

import deltalens as dl

BLUE, ORANGE, GREY = "#0b5cad", "#c85a00", "#777777"


def panel(axis: plt.Axes, table: pd.DataFrame, title: str, lines: dict[str, tuple[str, str]]) -> None:
    """One panel: each column with its label and colour, and its interval as a band where it has one."""
    for column, (label, colour) in lines.items():
        axis.plot(table["layer"], table[column], color=colour, lw=1.6, label=label)
        if f"{column}_lo" in table:
            axis.fill_between(
                table["layer"], table[f"{column}_lo"], table[f"{column}_hi"], color=colour, alpha=0.15, lw=0
            )
    axis.set_title(title, fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
    if len(lines) > 1:
        axis.legend(fontsize=7.5, frameon=False)


def main(folder: str, path: str) -> None:
    """Draw the held-out profiles of the run's first map."""
    run = dl.open(folder)
    summary = run.summary()
    table = summary[(summary["map"] == summary["map"].iloc[0]) & (summary["protocol"] == "held_out")]
    figure, axes = plt.subplots(1, 4, figsize=(13, 2.9), constrained_layout=True)
    panel(
        axes[0], table, "alignment |cos(Δ_full, Δ_tok)|",
        {"cos_full_tokenwise": ("held out", BLUE), "cos_full_tokenwise_null": ("shuffled pairs", GREY)},
    )  # fmt: skip
    panel(
        axes[1], table, "share inside the tokenwise subspace",
        {"proj_full": ("full update", BLUE), "proj_residual": ("residual", ORANGE)},
    )  # fmt: skip
    panel(
        axes[2], table, "KL of one replaced position, nats",
        {"kl_single": ("T(x)", BLUE), "kl_single_random": ("random, same size", GREY)},
    )  # fmt: skip
    axes[2].set_yscale("log")
    panel(
        axes[3], table, "Spearman of error and KL",
        {"spearman": ("one position", BLUE), "spearman_all": ("all positions", ORANGE),
         "spearman_random": ("random, same size", GREY)},
    )  # fmt: skip
    for axis in axes:
        axis.set_xlabel("layer", fontsize=8)
    figure.savefig(path, dpi=150)
    Image.open(path).convert("RGB").quantize(96).save(path, optimize=True)  # a third of the size, the same to the eye


if __name__ == "__main__":
    main(*sys.argv[1:])
