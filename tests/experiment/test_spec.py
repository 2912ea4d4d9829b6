"""A spec is one thing in Python, on the command line and in YAML; what it can't mean is refused in one line."""

from pathlib import Path

import pytest

from deltalens.errors import InputError
from deltalens.experiment.spec import RunSpec, select_layers


def test_yaml_round_trip_keeps_every_field(tmp_path: Path) -> None:
    spec = RunSpec.parse(model="tiny-neox", maps="linear,low_rank:4", layers="0:6:2", ridge=0.5, scope="single")
    path = tmp_path / "run.yaml"
    path.write_text(spec.to_yaml())
    assert RunSpec.from_yaml(path) == spec


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("neighbors: 12\nridge: 0.5\n")
    spec = RunSpec.from_yaml(path, neighbors=20)
    assert (spec.neighbors, spec.ridge) == (20, 0.5)


def test_comma_separated_text_equals_a_list() -> None:
    assert RunSpec.parse(maps="mean, linear") == RunSpec.parse(maps=["mean", "linear"])


def test_maps_become_canonical() -> None:
    assert RunSpec.parse(maps="low_rank,mlp").maps == ("low_rank:8", "mlp:32")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"maps": "cubic"}, "cubic"),
        ({"maps": "low_rank:0"}, "low_rank"),
        ({"maps": "low_rank:65"}, "65"),
        ({"maps": ""}, "maps"),
        ({"maps": "linear,linear"}, "twice"),
        ({"neighbors": 0}, "neighbors"),
        ({"ridge": 0}, "ridge"),
        ({"ridge": float("nan")}, "ridge"),
        ({"neighbours": 5}, "neighbours"),
        ({"fit": "global", "protocol": "leave_one_out"}, "leave_one_out"),
        ({"text": ["a.txt"], "dataset": "x"}, "one of them"),
        ({"tokens": -1}, "tokens"),
        ({"protocol": "held-out"}, "held_out"),
    ],
)
def test_what_cannot_be_meant_is_one_line(fields: dict[str, object], says: str) -> None:
    with pytest.raises(InputError) as caught:
        RunSpec.parse(**fields)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "\x00", "maps: {a: 1}"])
def test_a_config_that_is_no_mapping_of_fields_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        RunSpec.from_yaml(path)
    assert "\n" not in str(caught.value)


def test_fingerprint_follows_the_numbers_and_nothing_else() -> None:
    base = RunSpec.parse()
    same = base.fingerprint(model="m", corpus="c", version="1")
    assert RunSpec.parse(keep_states=True).fingerprint(model="m", corpus="c", version="1") == same
    others = [
        RunSpec.parse(neighbors=63).fingerprint(model="m", corpus="c", version="1"),
        base.fingerprint(model="n", corpus="c", version="1"),
        base.fingerprint(model="m", corpus="d", version="1"),
        base.fingerprint(model="m", corpus="c", version="2"),
    ]
    assert len({same, *others}) == 5


@pytest.mark.parametrize(
    ("text", "layers"),
    [(None, (0, 1, 2, 3)), ("1:3", (1, 2)), ("::2", (0, 2)), ("3", (3,)), ("0,2:4", (0, 2, 3)), ("0:4:3", (0, 3))],
)
def test_layers_are_zero_based_and_half_open(text: str | None, layers: tuple[int, ...]) -> None:
    assert select_layers(text, 4) == layers


@pytest.mark.parametrize("text", ["4", "0:5", "-1", "a", "2:2", "0:4:0", "1:2:3:4", "", ","])
def test_layers_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="layer"):
        select_layers(text, 4)
