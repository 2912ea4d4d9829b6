import json

import numpy as np
import pytest

from deltalens.report.encode import ALPHABET, BASE, LEVELS, Quantizer, pack, quantizer_for, rounded, script_json
from deltalens.report.measures import Measure

LINEAR, LOG = Measure("m", "", ""), Measure("m", "", "", scale="log")


def unpack(text: str, digits: int) -> np.ndarray:
    places = np.array([ALPHABET.index(c) for c in text]).reshape(-1, digits)
    return (places * BASE ** np.arange(digits)[::-1]).sum(axis=1)


def test_every_number_survives_packing() -> None:
    numbers = np.arange(LEVELS)
    assert np.array_equal(unpack(pack(numbers), 2), numbers)
    wide = np.array([0, 1, BASE, BASE**3 - 1])
    assert np.array_equal(unpack(pack(wide, 3), 3), wide)


@pytest.mark.parametrize("bad", [[-1], [LEVELS]])
def test_a_number_that_does_not_fit_is_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="2 characters hold"):
        pack(np.array(bad))


def test_packed_text_needs_no_escape_in_json_or_html() -> None:
    assert not set(ALPHABET) & set("\"'&<>\\")
    assert json.dumps(ALPHABET) == f'"{ALPHABET}"'


def test_linear_values_come_back_within_half_a_level() -> None:
    values = np.random.default_rng(0).uniform(-3, 7, 4000)
    quantizer = quantizer_for(LINEAR, values)
    back = quantizer.values(quantizer.levels(values))
    assert np.abs(back - values).max() <= 0.501 * 10 / (LEVELS - 3)


def test_log_values_come_back_with_three_digits_over_nine_decades() -> None:
    values = 10 ** np.random.default_rng(0).uniform(-8, 1, 4000)
    quantizer = quantizer_for(LOG, values)
    back = quantizer.values(quantizer.levels(values))
    assert np.abs(back / values - 1).max() < 2e-3


def test_nan_and_zero_keep_their_meaning() -> None:
    values = np.array([np.nan, 0.0, -1e-9, 1e-6, 2.0, np.inf])
    quantizer = quantizer_for(LOG, values)
    back = quantizer.values(quantizer.levels(values))
    assert np.isnan(back[[0, 5]]).all()
    assert (back[[1, 2]] == 0).all()
    assert back[4] == pytest.approx(2.0)


def test_a_constant_and_an_empty_column_are_defined() -> None:
    assert Quantizer(False, 2.0, 2.0).values(Quantizer(False, 2.0, 2.0).levels(np.array([2.0]))) == 2.0
    empty = quantizer_for(LOG, np.array([np.nan, -1.0]))
    assert empty.levels(np.array([np.nan])).tolist() == [0]


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "]]>", "\u2028\u2029", "\x00\x1b", "\ud800", "a&b<c>d"])
def test_script_json_says_the_same_and_cannot_leave_its_element(text: str) -> None:
    packed = script_json({"t": text})
    assert json.loads(packed) == {"t": text}
    assert not set(packed) & set("<>&\u2028\u2029\x00\ud800")
    packed.encode("utf-8")


def test_numbers_that_are_not_finite_become_null() -> None:
    assert [rounded(v) for v in (float("nan"), float("inf"), np.float32(0.5), np.int64(3), True)] == [
        None,
        None,
        0.5,
        3,
        True,
    ]
