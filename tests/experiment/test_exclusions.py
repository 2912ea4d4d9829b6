"""Left-out tokens: each has its reason, sinks are judged over all layers, and padding follows the mask."""

import torch

from deltalens.experiment.corpus import Windows
from deltalens.experiment.exclusions import REASONS, exclude


def windows(lengths: list[int], width: int = 6) -> Windows:
    count = len(lengths)
    return Windows(
        torch.zeros(count, width, dtype=torch.long),
        torch.tensor(lengths),
        torch.arange(count),
        torch.zeros(count, width, dtype=torch.bool),
    )


def reasons(norms: torch.Tensor, given: Windows, **options: float) -> list[list[str]]:
    fields = {"skip_first": 0, "max_norm_multiple": 10.0} | options
    (excluded,) = exclude([given], [norms], **fields)  # type: ignore[arg-type]
    return [[REASONS[r] for r in row] for row in excluded.reason.tolist()]


def test_a_planted_sink_at_any_layer_is_left_out_and_nothing_else() -> None:
    norms = torch.ones(2, 6, 4)
    norms[1, 3, 2] = 10.5
    norms[0, 2, 1] = 9.5
    found = reasons(norms, windows([6, 6]))
    assert found[1][3] == "sink"
    assert sum(reason != "" for row in found for reason in row) == 1


def test_the_median_ignores_padding_and_window_starts() -> None:
    norms = torch.ones(1, 6, 1)
    norms[0, 0] = 1e6
    norms[0, 3:] = 1e6
    assert reasons(norms, windows([3]), skip_first=1)[0] == ["first", "", "", "padding", "padding", "padding"]


def test_non_finite_states_are_left_out_and_do_not_harm_the_median() -> None:
    norms = torch.ones(1, 6, 2)
    norms[0, 1, 0] = torch.nan
    norms[0, 2, 1] = torch.inf
    assert reasons(norms, windows([6]))[0] == ["", "non_finite", "non_finite", "", "", ""]


def test_special_tokens_come_before_other_reasons_and_padding_before_all() -> None:
    given = windows([5])
    given.special[0, 0] = True
    given.special[0, 5] = True
    found = reasons(torch.ones(1, 6, 1), given, skip_first=2)[0]
    assert found == ["special", "first", "", "", "", "padding"]


def test_evaluation_and_pool_share_one_median() -> None:
    small, large = torch.ones(1, 6, 1), torch.full((3, 6, 1), 20.0)
    ours, pool = exclude([windows([6]), windows([6] * 3)], [small, large], skip_first=0, max_norm_multiple=10.0)
    assert ours.included.all()
    assert pool.included.all()
    both = torch.cat([small, torch.full((1, 6, 1), 20.0)])
    (alone,) = exclude([windows([6] * 2)], [both], skip_first=0, max_norm_multiple=1.5)
    assert alone.counts()["sink"] == 6
