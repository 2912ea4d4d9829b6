import json

import numpy as np
import pandas as pd
import pytest
from memory import MemoryRun, around, run_of, summary_rows
from synthetic import SyntheticRun

from deltalens.errors import InputError
from deltalens.report import claims_for
from deltalens.report.logic import above, both, either, holm, in_share

UNKNOWN = float("nan")


def verdict(claim: int, *runs: MemoryRun) -> str:
    return claims_for(list(runs))[claim - 1].verdict


def held_out(layers: int = 10, **columns: object) -> pd.DataFrame:
    return summary_rows("held_out", layers, **columns)


def in_sample(layers: int = 10, **columns: object) -> pd.DataFrame:
    return summary_rows("in_sample", layers, **columns)


def aligned(value: object, null: float, half: float = 0.005) -> dict[str, object]:
    return around("cos_full_tokenwise", value, half) | {"cos_full_tokenwise_null": null}


@pytest.mark.parametrize(
    ("held", "sampled", "expected"),
    [
        (aligned(0.97, 0.3), aligned(0.99, 0.98), "supported"),
        (aligned(0.953, 0.3), aligned(0.90, 0.3), "partly"),  # the interval's lower end is under 0.95
        (aligned([0.97] * 8 + [0.5] * 2, 0.3), {}, "supported"),
        (aligned([0.97] * 7 + [0.5] * 3, 0.3), {}, "not supported"),
        (aligned(0.97, 0.9), aligned(0.5, 0.1), "not supported"),  # a null almost as high
        (aligned(0.97, 0.9), aligned(0.99, 0.98), "partly"),
        (aligned(0.6, 0.3), aligned(0.99, 0.98), "partly"),
        (aligned(0.6, 0.3), aligned(0.9, 0.8), "not supported"),
        (aligned(0.97, UNKNOWN), {}, "not measured"),
        (aligned(0.97, 0.3, UNKNOWN), {}, "not measured"),
    ],
)
def test_claim_1_follows_its_rule(held: dict[str, object], sampled: dict[str, object], expected: str) -> None:
    tables = [held_out(**held)] + ([in_sample(**sampled)] if sampled else [])
    assert verdict(1, run_of(*tables)) == expected


def test_claim_1_is_at_most_partly_without_a_held_out_protocol() -> None:
    assert verdict(1, run_of(in_sample(**aligned(0.99, 0.2)))) == "partly"


def angles(share: float, cos: float, chance: float) -> dict[str, object]:
    return around("share_residual_over_60", share) | around("cos_residual_tokenwise", cos) | {
        "cos_residual_tokenwise_chance": chance
    }  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (angles(0.9, 0.2, 0.06), "supported"),
        (angles(0.9, 0.02, 0.06), "supported"),
        (angles(0.9, 0.06, 0.06), "partly"),
        (angles(0.9, 0.2, UNKNOWN), "partly"),
        (angles(0.505, 0.2, 0.06), "not supported"),
        (angles(UNKNOWN, 0.2, 0.06), "not measured"),
    ],
)
def test_claim_2_follows_its_rule(columns: dict[str, object], expected: str) -> None:
    assert verdict(2, run_of(held_out(**columns))) == expected


def projections(residual: float, full: float, null: float) -> dict[str, object]:
    return around("proj_residual", residual) | around("proj_full", full) | {"proj_full_null": null}


@pytest.mark.parametrize(
    ("held", "sampled", "expected"),
    [
        (projections(0.1, 0.6, 0.2), {}, "supported"),
        (projections(0.295, 0.6, 0.2), {}, "not supported"),  # the interval's upper end is over half
        (projections(0.1, 0.6, 0.7), {}, "not supported"),
        (projections(0.5, 0.6, 0.2), projections(0.1, 0.6, 0.2), "partly"),
        (projections(0.1, 0.6, UNKNOWN), {}, "not measured"),
    ],
)
def test_claim_3_follows_its_rule(held: dict[str, object], sampled: dict[str, object], expected: str) -> None:
    tables = [held_out(**held)] + ([in_sample(**sampled)] if sampled else [])
    assert verdict(3, run_of(*tables)) == expected


def association(spearman: object, beyond: float, ratio: float, half: float = 0.01) -> dict[str, object]:
    return (
        around("spearman", spearman, half)
        | around("spearman_minus_random", beyond, half)
        | around("kl_ratio_shuffled", ratio, half)
    )


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (association(0.8, 0.05, 0.9), "supported"),
        (association(0.8, 0.0, 1.2), "supported"),
        (association([0.8] * 5 + [0.2] * 5, 0.05, 0.9), "supported"),
        (association([0.8] * 4 + [0.2] * 6, 0.05, 0.9), "not supported"),
        (association(0.8, 0.005, 1.005), "partly"),
        (association(0.705, 0.5, 2.0), "not supported"),
        (association(0.8, 0.05, 1.2, UNKNOWN), "not measured"),
    ],
)
def test_claim_4_follows_its_rule(columns: dict[str, object], expected: str) -> None:
    assert verdict(4, run_of(held_out(**columns))) == expected


@pytest.mark.parametrize(
    ("swap", "matched", "expected"),
    [(0.3, 0.3, "supported"), (-0.3, 0.3, "partly"), (-0.3, -0.3, "not supported"), (UNKNOWN, 0.3, "not measured")],
)
def test_claim_5_follows_its_rule(swap: float, matched: float, expected: str) -> None:
    columns = around("swap_log_ratio", swap) | around("swap_log_ratio_matched", matched)
    assert verdict(5, run_of(held_out(**columns))) == expected


@pytest.mark.parametrize(
    ("error", "cosine", "expected"),
    [
        ([0.2, 0.2, 0.5, 0.5, 0.3, 0.3], [0.9, 0.9, 0.7, 0.7, 0.8, 0.8], "supported"),
        ([0.2, 0.2, 0.5, 0.5, 0.6, 0.6], [0.9, 0.9, 0.7, 0.7, 0.8, 0.8], "partly"),
        ([0.2, 0.2, 0.5, 0.5, 0.6, 0.6], [0.9, 0.9, 0.7, 0.7, 0.6, 0.6], "not supported"),
        ([0.2, 0.5, 0.3], [0.9, 0.7, 0.8], "not measured"),
    ],
)
def test_claim_6_compares_the_middle_third_with_both_others(
    error: list[float], cosine: list[float], expected: str
) -> None:
    table = held_out(len(error), relative_update_error=error, cos_full_tokenwise=cosine)
    assert verdict(6, run_of(table)) == expected


def test_the_best_map_is_chosen_per_layer_and_never_a_trivial_one() -> None:
    good = held_out(4, map="linear", relative_update_error=[0.1, 0.1, 0.9, 0.9], **aligned([0.99, 0.99, 0.1, 0.1], 0.1))
    other = held_out(4, map="diagonal", relative_update_error=0.5, **aligned([0.1, 0.1, 0.99, 0.99], 0.1))
    trivial = [
        held_out(4, map=m, relative_update_error=0.0, **aligned(0.0, 0.0)) for m in ("identity", "mean", "scalar")
    ]
    assert verdict(1, run_of(good, other, *trivial)) == "supported"


def classes(parameters: int, **errors: float) -> MemoryRun:
    tables = [held_out(2, map=m.replace("_8", ":8"), relative_update_error=e) for m, e in errors.items()]
    return run_of(*tables, name=f"m{parameters}", parameters=parameters, weight_hash=str(parameters))


def test_claim_7_is_supported_when_the_needed_class_grows_with_the_model() -> None:
    small = classes(1, diagonal=0.30, low_rank_8=0.29)
    middle = classes(2, diagonal=0.30, low_rank_8=0.28)
    large = classes(3, diagonal=0.60, low_rank_8=0.30)
    assert verdict(7, large, small, middle) == "supported"
    assert verdict(7, classes(9, diagonal=0.30, low_rank_8=0.29), large, small) == "not supported"
    assert verdict(7, small, large) == "not measured"
    assert verdict(7, small, small, small) == "not measured"


def test_claim_7_takes_the_runs_of_one_model_together() -> None:
    small, middle = classes(1, diagonal=0.30, low_rank_8=0.29), classes(2, diagonal=0.30, low_rank_8=0.28)
    large = classes(3, diagonal=0.60, low_rank_8=0.30)
    odd = classes(1, diagonal=0.60, low_rank_8=0.29)  # one seed of the smallest model that says otherwise
    assert verdict(7, small, small, middle, large) == "supported"
    for runs in (
        (odd, small, small, middle, large),
        (small, small, odd, middle, large),
        (large, middle, small, small, odd),
    ):
        assert verdict(7, *runs) == "supported"
    assert verdict(7, small, odd, odd, middle, large) == "not supported"


def test_claim_8_needs_both_regimes() -> None:
    def run(easy: float, gain: float, mlp_error: float) -> MemoryRun:
        errors = [0.1, 0.1, 0.5, 0.5]
        linear = held_out(4, map="linear", relative_update_error=errors, **around("spearman", [easy, easy, 0.4, 0.4]))
        small = [0.2, 0.2, mlp_error, mlp_error]
        mlp = held_out(
            4, map="mlp:32", relative_update_error=small, **around("spearman", [0.6, 0.6, 0.4 + gain, 0.4 + gain])
        )
        return run_of(linear, mlp)

    assert verdict(8, run(0.8, 0.2, 0.4)) == "supported"
    assert verdict(8, run(0.5, 0.2, 0.4)) == "partly"
    assert verdict(8, run(0.8, -0.2, 0.4)) == "partly"
    assert verdict(8, run(0.8, 0.2, 0.6)) == "partly"
    assert verdict(8, run(0.5, -0.2, 0.4)) == "not supported"
    assert verdict(8, run_of(held_out(4, map="linear", **around("spearman", 0.9)))) == "not measured"
    rising = {"relative_update_error": [0.1, 0.1, 0.5, 0.5]} | around("spearman", 0.9)
    without_network = run_of(held_out(4, map="linear", **rising), held_out(4, map="diagonal", **rising))
    assert verdict(8, without_network) == "not measured"


def full_run(kind: str, cosine: float = 0.97, share: float = 0.9) -> MemoryRun:
    columns = (
        aligned(cosine, 0.3) | angles(share, 0.2, 0.06) | projections(0.1, 0.6, 0.2) | association(0.8, 0.1, 1.2)
        | around("swap_log_ratio", 0.3) | around("swap_log_ratio_matched", 0.3)
    )  # fmt: skip
    return run_of(held_out(6, **columns), name=kind, block_kinds=[kind] * 6)


def test_claim_9_compares_a_state_space_model_with_a_transformer() -> None:
    assert verdict(9, full_run("attention"), full_run("mamba")) == "supported"
    assert verdict(9, full_run("attention"), full_run("mamba", cosine=0.5)) == "partly"
    assert verdict(9, full_run("attention")) == "not measured"
    assert verdict(9, full_run("attention"), full_run("attention")) == "not measured"
    assert verdict(9, full_run("sliding_attention"), full_run("mamba2")) == "supported"
    assert verdict(9, full_run("hybrid"), full_run("mamba")) == "not measured"


def test_claim_9_pairs_the_models_that_are_nearest_in_size() -> None:
    far = full_run("attention", cosine=0.5)
    far.manifest["model"]["parameters"] = 1_000_000
    assert verdict(9, far, full_run("mamba")) == "partly"
    assert verdict(9, far, full_run("mamba"), full_run("attention")) == "supported"


def test_runs_that_disagree_give_partly_and_name_each_run() -> None:
    claim = claims_for([full_run("attention"), full_run("mamba", cosine=0.5)])[0]
    assert claim.verdict == "partly"
    assert "attention: supported" in claim.evidence
    assert "mamba: not supported" in claim.evidence
    twice = claims_for([full_run("mamba"), full_run("mamba", cosine=0.5)])[0].evidence
    assert "mamba (memory) #1: supported" in twice
    assert "mamba (memory) #2: not supported" in twice


def test_claims_are_nine_objects_of_five_fields_for_json(run: SyntheticRun) -> None:
    found = json.loads(json.dumps([claim.to_dict() for claim in claims_for([run])]))
    assert [c["id"] for c in found] == list(range(1, 10))
    assert {tuple(sorted(c)) for c in found} == {("evidence", "id", "rule", "title", "verdict")}
    assert {c["verdict"] for c in found} <= {"supported", "partly", "not supported", "not measured"}


def test_no_run_is_a_usage_error() -> None:
    with pytest.raises(InputError, match="at least one run"):
        claims_for([])


def test_only_trivial_maps_leave_everything_unmeasured() -> None:
    assert {c.verdict for c in claims_for([run_of(held_out(map="identity"))])} == {"not measured"}


def test_unknown_layers_decide_only_when_they_could() -> None:
    holds, fails, unknown = 1.0, 0.0, UNKNOWN
    assert in_share(np.array([holds] * 8 + [unknown] * 2), 0.8) is True
    assert in_share(np.array([holds] * 7 + [unknown] * 3), 0.8) is None
    assert in_share(np.array([holds] * 2 + [fails] * 3 + [unknown] * 5), 0.8) is False
    assert np.array_equal(both(np.array([fails]), np.array([unknown])), [0.0])
    assert np.array_equal(either(np.array([holds]), np.array([unknown])), [1.0])
    assert np.isnan(above(np.array([unknown]), 0.0)).all()


def test_holm_is_stricter_than_each_interval_alone() -> None:
    values = np.full(30, 0.71)
    low = np.full(30, 0.701)
    assert (above(low, 0.7) == 1).all()
    assert (holm(values, low, 0.7) == 0).all()
    assert (holm(values[:1], low[:1], 0.7) == 1).all()
