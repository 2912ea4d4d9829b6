"""How each measure is named, drawn and explained to a reader."""

from dataclasses import dataclass
from typing import Literal

Scale = Literal["linear", "log"]
UNIT, SIGNED, RIGHT_ANGLE, CORRELATION = (0.0, 1.0), (-1.0, 1.0), (0.0, 90.0), (-0.2, 1.0)


@dataclass(frozen=True)
class Measure:
    """One column of the tables, as a reader meets it."""

    name: str
    title: str
    definition: str
    unit: str = ""
    scale: Scale = "linear"
    domain: tuple[float, float] | None = None
    group: str = "more"
    reference: float | None = None


SUMMARY_MEASURES: tuple[Measure, ...] = (
    Measure(
        "cos_full_tokenwise", "Alignment", "|cos| of the full and the tokenwise update", "", "linear", UNIT, "main"
    ),
    Measure(
        "relative_update_error",
        "Residual size",
        "‖r‖ / ‖Δ_full‖: share of the update that the map misses",
        "",
        "linear",
        None,
        "main",
    ),
    Measure(
        "share_residual_over_60",
        "Residuals over 60°",
        "share of tokens whose residual is over 60° from Δ_tok",
        "",
        "linear",
        UNIT,
        "main",
    ),
    Measure(
        "cos_residual_tokenwise",
        "Residual's alignment",
        "|cos| of the residual and the tokenwise update",
        "",
        "linear",
        UNIT,
        "main",
    ),
    Measure(
        "proj_full",
        "Projection of the update",
        "share of ‖Δ_full‖² in the dominant tokenwise subspace",
        "",
        "linear",
        UNIT,
        "main",
    ),
    Measure(
        "proj_residual",
        "Projection of the residual",
        "share of ‖r‖² in the dominant tokenwise subspace",
        "",
        "linear",
        UNIT,
        "main",
    ),
    Measure(
        "kl_single",
        "Effect on predictions",
        "KL(P_orig ‖ P_patched) when T(x) replaces one position",
        "nats",
        "log",
        None,
        "main",
    ),
    Measure(
        "spearman",
        "Error predicts effect",
        "Spearman of relative error with single-position KL",
        "ρ",
        "linear",
        CORRELATION,
        "main",
        0.7,
    ),
    Measure(
        "kl_ratio_random",
        "Residual against random",
        "median KL ratio to a random vector of equal norm",
        "×",
        "log",
        None,
        "main",
        1.0,
    ),
    Measure(
        "spearman_minus_random",
        "Beyond size",
        "Spearman minus that of the random control",
        "Δρ",
        "linear",
        None,
        "main",
        0.0,
    ),
    Measure("relative_error", "Relative error", "‖r‖ / ‖y‖", "", "linear", None),
    Measure(
        "kl_all", "Effect, all positions", "KL when all positions of the window are replaced at once", "nats", "log"
    ),
    Measure(
        "spearman_all",
        "Error and effect, all positions",
        "Spearman of relative error with kl_all",
        "ρ",
        "linear",
        CORRELATION,
        "more",
        0.7,
    ),
    Measure("spearman_partial", "Partial Spearman", "given update norm and state norm", "ρ", "linear", CORRELATION),
    Measure(
        "spearman_random",
        "Spearman of the random control",
        "relative error with the random control's KL",
        "ρ",
        "linear",
        CORRELATION,
    ),
    Measure(
        "kl_ratio_shuffled",
        "Residual against others' residuals",
        "median KL ratio to another token's residual direction",
        "×",
        "log",
        None,
        "more",
        1.0,
    ),
    Measure(
        "angle_residual_tokenwise",
        "Residual's angle",
        "between residual and tokenwise update",
        "°",
        "linear",
        RIGHT_ANGLE,
        "more",
        60.0,
    ),
    Measure("angle_full_tokenwise", "Update's angle", "between full and tokenwise update", "°", "linear", RIGHT_ANGLE),
    Measure(
        "proj_tokenwise",
        "Projection of the tokenwise update",
        "share of ‖Δ_tok‖² in its dominant subspace",
        "",
        "linear",
        UNIT,
    ),
    Measure("kl_single_random", "Random control", "KL of a random vector of the residual's norm", "nats", "log"),
    Measure("kl_single_shuffled", "Shuffled control", "KL of another token's residual direction", "nats", "log"),
    Measure(
        "kl_single_covariance",
        "Covariance control",
        "KL of a direction drawn with the residuals' covariance",
        "nats",
        "log",
    ),
    Measure("kl_residual_only", "Residual only", "KL when x + r replaces y (tokenwise part dropped)", "nats", "log"),
    Measure(
        "kl_tokenwise_matched",
        "Tokenwise direction, size matched",
        "KL of a vector along Δ_tok of the residual's norm",
        "nats",
        "log",
    ),
    Measure(
        "swap_log_ratio",
        "Swap",
        "log KL(T(x)) − log KL(x + r): above 0 where dropping the residual hurts more",
        "",
        "linear",
        None,
        "more",
        0.0,
    ),
    Measure(
        "swap_log_ratio_matched",
        "Swap, size matched",
        "log KL(y − r) − log KL of the size-matched tokenwise direction",
        "",
        "linear",
        None,
        "more",
        0.0,
    ),
    Measure("kl_skip", "Layer skipped", "KL when x replaces y", "nats", "log"),
    Measure("kl_in", "Residual inside", "KL when T(x) + r_in replaces y", "nats", "log"),
    Measure("kl_out", "Residual outside", "KL when T(x) + r_out replaces y", "nats", "log"),
    Measure("nll_delta_single", "Loss change", "of the next token, one position replaced", "nats"),
    Measure("nll_delta_all", "Loss change, all positions", "of the next token, all positions replaced", "nats"),
    Measure("state_norm", "State norm", "‖x‖", "", "log"),
    Measure("update_norm", "Update norm", "‖Δ_full‖", "", "log"),
    Measure("tokenwise_norm", "Tokenwise norm", "‖Δ_tok‖", "", "log"),
    Measure("residual_norm", "Residual norm", "‖r‖", "", "log"),
    Measure(
        "cos_full_tokenwise_signed",
        "Signed alignment",
        "cos of the full and the tokenwise update",
        "",
        "linear",
        SIGNED,
    ),
    Measure(
        "cos_residual_tokenwise_signed",
        "Signed residual alignment",
        "cos of the residual and the tokenwise update",
        "",
        "linear",
        SIGNED,
    ),
    Measure("subspace_rank", "Subspace rank", "columns of the dominant subspace"),
    Measure("distinct_neighbors", "Distinct neighbours", "after merging equal inputs"),
    Measure("degrees_of_freedom", "Degrees of freedom", "effective, per output coordinate"),
)

TOKEN_MEASURES: tuple[Measure, ...] = (
    Measure("relative_update_error", "residual size", "‖r‖ / ‖Δ_full‖", "", "log"),
    Measure("kl_single", "effect (KL)", "KL(P_orig ‖ P_patched), this position replaced", "nats", "log"),
    Measure("angle_residual_tokenwise", "residual's angle", "between r and Δ_tok", "°", "linear", RIGHT_ANGLE),
    Measure("kl_single_random", "random control", "KL of a random vector of equal norm", "nats", "log"),
    Measure("relative_error", "relative error", "‖r‖ / ‖y‖", "", "log"),
    Measure("cos_full_tokenwise", "alignment", "|cos(Δ_full, Δ_tok)|", "", "linear"),
    Measure("proj_residual", "residual's projection", "‖Vᵀr‖² / ‖r‖²", "", "linear", UNIT),
    Measure("kl_single_shuffled", "shuffled control", "KL of another token's residual direction", "nats", "log"),
    Measure("kl_all", "effect, all positions", "KL when all positions are replaced", "nats", "log"),
    Measure("proj_full", "update's projection", "‖VᵀΔ_full‖² / ‖Δ_full‖²", "", "linear", UNIT),
    Measure("kl_residual_only", "effect of x + r", "KL when the tokenwise part is dropped", "nats", "log"),
)

DERIVED_TOKEN_MEASURES: tuple[Measure, ...] = (
    Measure("kl_over_random", "effect over random", "kl_single / kl_single_random", "×", "log"),
)

DISTRIBUTIONS: tuple[tuple[str, str, tuple[float, float], int], ...] = (
    ("angle_residual_tokenwise", "angle_full_tokenwise", (0.0, 90.0), 45),
    ("proj_residual", "proj_full", (0.0, 1.0), 50),
)

TABLE_COLUMNS: tuple[str, ...] = (
    "relative_error", "relative_update_error", "cos_full_tokenwise", "cos_residual_tokenwise", "share_residual_over_60",
    "proj_full", "proj_residual", "kl_single", "kl_all", "spearman", "spearman_random", "kl_ratio_random",
)  # fmt: skip


def by_name(name: str) -> Measure:
    """The description of a summary measure; a plain one for a column that nobody described."""
    return next((m for m in SUMMARY_MEASURES if m.name == name), Measure(name, name.replace("_", " "), ""))
