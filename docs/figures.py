"""The pictures of the concept pages, in light and dark: ``python docs/figures.py docs/images``."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

import deltalens as dl

LAYER, MAP = 3, "low_rank:8"


@dataclass(frozen=True)
class Ink:
    """Colours of one scheme."""

    scheme: str
    paper: str
    text: str
    faint: str
    blue: str
    orange: str
    green: str


SCHEMES = (
    Ink("light", "#ffffff", "#1c1e21", "#c9ced6", "#0b5cad", "#c85a00", "#2e7d32"),
    Ink("dark", "#131416", "#e4e6ea", "#4a4f57", "#6db3f2", "#ffa657", "#7ee08a"),
)


def arrow(axis: Axes, start: np.ndarray, end: np.ndarray, colour: str, width: float = 2.2, style: str = "-") -> None:
    """A vector."""
    axis.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": width, "ls": style, "shrinkA": 0,
                                    "shrinkB": 0, "mutation_scale": 16},
    )  # fmt: skip


def bare(axis: Axes) -> None:
    """No frame, equal units."""
    axis.set_axis_off()
    axis.set_aspect("equal")


def triangle(tokens: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """T(x) and y in the plane that they span with x, true to scale, of the token with the median relative error."""
    included = tokens[~tokens["excluded"]].sort_values("relative_update_error")
    token = included.iloc[len(included) // 2]
    full, own, rest = (float(token[name]) for name in ("update_norm", "tokenwise_norm", "residual_norm"))
    cosine = (full**2 + own**2 - rest**2) / (2 * full * own)
    return np.array([own, 0.0]) / full, np.array([cosine, np.sqrt(1 - cosine**2)])


def split(tokens: pd.DataFrame, ink: Ink) -> Figure:
    """One update as a triangle."""
    figure, axis = plt.subplots(figsize=(6.4, 4.2))
    bare(axis)
    x = np.zeros(2)
    tokenwise, y = triangle(tokens)
    arrow(axis, x, y, ink.text)
    arrow(axis, x, tokenwise, ink.blue)
    arrow(axis, tokenwise, y, ink.orange)
    labels = (
        (x, "$x = h_l$", (-14, -6), ink.text, "right"),
        (y, "$y = h_{l+1}$", (0, 10), ink.text, "center"),
        (tokenwise, "$T(x)$", (8, -16), ink.blue, "left"),
        (y / 2, r"$\Delta_{full}$", (-14, 8), ink.text, "right"),
        (tokenwise / 2, r"$\Delta_{tok} = T(x) - x$", (0, -22), ink.blue, "center"),
        ((tokenwise + y) / 2, "residual $r = y - T(x)$", (12, 0), ink.orange, "left"),
    )
    for place, text, offset, colour, side in labels:
        axis.annotate(text, place, offset, textcoords="offset points", color=colour, ha=side, fontsize=13)
    axis.set_xlim(-0.25, 1.45)
    axis.set_ylim(-0.2, max(y[1], 0.4) + 0.15)
    return figure


def protocols(_: pd.DataFrame, ink: Ink) -> Figure:
    """Which windows are judged and which are the pool."""
    figure, axis = plt.subplots(figsize=(7.6, 3.7))
    bare(axis)
    documents = (3, 2, 3, 2, 3, 3)
    rows = (
        ("held_out", lambda document, _: "judged" if document < 2 else "pool"),
        ("held_out,\none document", lambda _, window: "judged" if window < 5 else "gap" if window == 5 else "pool"),
        ("leave_one_out", lambda document, _: "both" if document < 2 else "unused"),
        ("in_sample", lambda document, _: "both" if document < 2 else "unused"),
    )
    colours = {"judged": ink.blue, "pool": ink.orange, "unused": ink.paper, "gap": ink.paper}
    for line, (name, role) in enumerate(rows):
        left, window, top = 0.0, 0, -1.35 * line
        axis.text(-0.4, top + 0.4, name, ha="right", va="center", color=ink.text, fontsize=10.5)
        for document, count in enumerate(documents):
            for _ in range(count):
                part = role(document, window)
                axis.add_patch(Rectangle((left, top), 0.8, 0.8, fc=colours.get(part, ink.blue), ec=ink.faint))
                if part == "both":
                    corner = plt.Polygon([(left, top), (left + 0.8, top), (left + 0.8, top + 0.8)], fc=ink.orange)
                    axis.add_patch(corner)
                if part == "both" and name == "leave_one_out":
                    axis.plot(left + 0.4, top + 0.4, "o", ms=6, mfc=ink.paper, mec=ink.text)
                left, window = left + 0.9, window + 1
            left += 0.0 if "one" in name and "\n" in name else 0.45
    legend = ((0.0, ink.blue, "judged"), (4.0, ink.orange, "pool: maps are fitted here"))
    for place, colour, text in legend:
        axis.add_patch(Rectangle((place, -5.75), 0.5, 0.5, fc=colour, ec=ink.faint))
        axis.text(place + 0.75, -5.5, text, va="center", color=ink.text, fontsize=10.5)
    axis.plot(13.6, -5.5, "o", ms=6, mfc=ink.paper, mec=ink.text)
    axis.text(14.05, -5.5, "without the token itself", va="center", color=ink.text, fontsize=10.5)
    axis.set_xlim(-4.2, 21.6)
    axis.set_ylim(-6.2, 1.1)
    return figure


def controls(tokens: pd.DataFrame, ink: Ink) -> Figure:
    """Patches of one size and other directions, and what each of them does."""
    figure, (plane, axis) = plt.subplots(1, 2, figsize=(8.6, 3.7), width_ratios=(1, 1.25))
    bare(plane)
    plane.add_patch(Circle((0, 0), 1, fill=False, ec=ink.faint, lw=1.2))
    patches = ((200, ink.orange, "$T(x) = y - r$"), (285, ink.text, "random $u$"), (150, ink.green, "shuffled $r_j$"))
    for angle, colour, text in patches:
        end = np.array([np.cos(np.radians(angle)), np.sin(np.radians(angle))])
        arrow(plane, np.zeros(2), end, colour)
        side = "right" if end[0] < -0.5 else "center"
        plane.text(*(end * 1.14), text, color=colour, ha=side, va="center", fontsize=11)
    plane.plot(0, 0, "o", color=ink.text, ms=5)
    plane.text(0.08, 0.1, "$y$", color=ink.text, fontsize=12)
    plane.text(0, 1.12, r"all $\|r\|$ from $y$", color=ink.text, fontsize=9.5, ha="center")
    plane.set_xlim(-2.5, 1.25)
    plane.set_ylim(-1.35, 1.35)
    columns = (("kl_single", "residual dropped", ink.orange), ("kl_single_random", "random, same size", ink.text),
               ("kl_single_shuffled", "another token's residual", ink.green))  # fmt: skip
    for column, label, colour in columns:
        values = np.sort(tokens[column].dropna().clip(lower=1e-7))
        axis.plot(values, (np.arange(len(values)) + 0.5) / len(values), color=colour, lw=2, label=label)
    axis.set_xscale("log")
    axis.set_xlabel("KL at the token's own position, nats", color=ink.text)
    axis.set_ylabel("share of tokens at most", color=ink.text)
    axis.legend(frameon=False, fontsize=9, labelcolor=ink.text, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(ink.faint)
    axis.tick_params(colors=ink.text, labelsize=9)
    axis.set_facecolor(ink.paper)
    return figure


def patching(_: pd.DataFrame, ink: Ink) -> Figure:
    """What one position's patch sees, against all of them at once."""
    figure, axis = plt.subplots(figsize=(8.2, 3.9))
    bare(axis)
    size = 6

    def row(left: float, top: float, patched: set[int], read: set[int], known: int) -> None:
        for position in range(size):
            colour = ink.orange if position in patched else ink.blue if position < known else ink.paper
            axis.add_patch(Rectangle((left + position, top), 0.86, 0.86, fc=colour, ec=ink.faint))
            if position in read:
                axis.plot(left + position + 0.43, top + 0.43, "o", ms=9, mfc=ink.paper, mec=ink.text)

    for i in range(size):
        row(0, -i * 1.05, {i}, {i}, i)
    row(9.2, 0, set(range(size)), set(range(size)), size)
    titles = ((3, "one position at a time"), (12.2, "all positions at once"))
    for place, text in titles:
        axis.text(place, 1.35, text, ha="center", color=ink.text, fontsize=12)
    axis.text(-0.4, -2.2, "runs, all served\nby one pass", ha="right", va="center", color=ink.text, fontsize=10)
    key = ((-1.6, ink.orange, "state replaced by $T(x)$"), (-2.65, ink.blue, "original state, seen by it"),
           (-3.7, ink.paper, "later token, not read"))  # fmt: skip
    for top, colour, text in key:
        axis.add_patch(Rectangle((9.2, top), 0.86, 0.86, fc=colour, ec=ink.faint))
        axis.text(10.4, top + 0.43, text, va="center", color=ink.text, fontsize=10.5)
    axis.plot(9.63, -4.3, "o", ms=9, mfc=ink.paper, mec=ink.text)
    axis.text(10.4, -4.3, "prediction read here", va="center", color=ink.text, fontsize=10.5)
    axis.set_xlim(-4.2, 16.4)
    axis.set_ylim(-5.5, 2)
    return figure


PICTURES = {"split": split, "protocols": protocols, "controls": controls, "patching": patching}


def main(folder: str) -> None:
    """Measure one layer of a built-in model and draw every picture in both schemes."""
    with tempfile.TemporaryDirectory() as scratch:
        run = dl.run("tiny-gpt2", layers=[LAYER], maps=[MAP], protocol="held_out", scope="single", out=f"{scratch}/run")
        tokens = run.tokens(layer=LAYER)
    for ink in SCHEMES:
        for name, draw in PICTURES.items():
            with plt.rc_context({"mathtext.fontset": "cm", "figure.facecolor": ink.paper, "text.color": ink.text}):
                figure = draw(tokens, ink)
                figure.savefig(Path(folder) / f"{name}-{ink.scheme}.png", dpi=130, bbox_inches="tight")
                plt.close(figure)


if __name__ == "__main__":
    main(*sys.argv[1:])
