"""Neighbours are exact, ordered, distinct where asked, and never excluded ones."""

import sys
from inspect import unwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import nearest

from deltalens.core.approximate import require_faiss
from deltalens.core.duplicates import group_equal_rows
from deltalens.core.neighbors import PoolIndex, find_neighborhoods
from deltalens.errors import InputError


def exact(anchors, pool, k, forbidden=None):
    forbidden = forbidden or [set()] * len(anchors)
    return [nearest(x, pool, k, barred) for x, barred in zip(anchors, forbidden, strict=True)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_neighbors_are_the_exact_ones(dtype, offset):
    rng = np.random.default_rng(0)
    pool = (rng.normal(size=(500, 12)) + offset).astype(dtype)
    anchors = (rng.normal(size=(40, 12)) + offset).astype(dtype)
    found = find_neighborhoods(torch.tensor(anchors), torch.tensor(pool), neighbors=9)
    assert found.indices.tolist() == exact(anchors, pool, 9)
    wanted = np.linalg.norm(pool[found.indices].astype(np.float64) - anchors[:, None].astype(np.float64), axis=2)
    np.testing.assert_allclose(found.distances, wanted, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 4), st.integers(0, 3), st.integers(0, 10**6), st.booleans(), st.integers(1, 12)
)
def test_ties_go_to_the_lower_index_among_the_usable(p, d, levels, seed, excluding, k):
    rng = np.random.default_rng(seed)
    pool = rng.integers(0, levels + 1, size=(p, d)).astype(np.float32)
    anchors = rng.integers(0, levels + 1, size=(5, d)).astype(np.float32)
    excluded = torch.tensor(rng.integers(-1, p, size=(5, 2))) if excluding else None
    forbidden = [{int(j) for j in row if j >= 0} for row in excluded] if excluding else [set()] * 5
    k = min(k, p - max(len(f) for f in forbidden))
    if k < 1:
        return
    found = find_neighborhoods(
        torch.tensor(anchors), torch.tensor(pool), neighbors=k, distinct=False, excluded=excluded
    )
    assert found.indices.tolist() == exact(anchors, pool, k, forbidden)
    counted = [len(np.unique(pool[row], axis=0)) for row in found.indices.numpy()]
    assert found.distinct_neighbors.tolist() == counted


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40), st.integers(0, 10**6), st.booleans())
def test_merged_neighbors_are_distinct_and_average_only_usable_members(p, seed, leave_out):
    rng = np.random.default_rng(seed)
    pool = rng.integers(0, 3, size=(p, 2)).astype(np.float32)
    updates = rng.normal(size=(p, 3))
    own = torch.arange(p).unsqueeze(1) if leave_out else None
    groups = len(np.unique(pool, axis=0))
    k = groups - 1 if leave_out else groups
    if k < 1:
        return
    found = find_neighborhoods(torch.tensor(pool), torch.tensor(pool), neighbors=k, excluded=own)
    averaged = found.merged.averaged(torch.tensor(updates))
    for i in range(p):
        inputs = pool[found.indices[i].numpy()]
        assert len(np.unique(inputs, axis=0)) == k == found.distinct_neighbors[i]
        for slot in range(k):
            equal = np.flatnonzero((pool == inputs[slot]).all(1))
            usable = [j for j in equal if not (leave_out and j == i)]
            assert found.indices[i, slot] == usable[0]
            np.testing.assert_allclose(averaged[found.rows[i, slot]], updates[usable].mean(0), atol=1e-12)
            assert (found.merged.representative[found.rows[i, slot]] == torch.tensor(equal[0])).all()


def test_cosine_neighbors_ignore_length_and_put_zero_vectors_at_distance_one():
    pool = torch.tensor([[10.0, 0.0], [0.0, 1e-3], [-1.0, 0.0], [0.0, 0.0]])
    found = find_neighborhoods(torch.tensor([[0.1, 0.0]]), pool, neighbors=4, metric="cosine")
    assert found.indices.tolist() == [[0, 1, 3, 2]]
    np.testing.assert_allclose(found.distances, [[0, 1, 1, 2]], atol=1e-12)


def test_distances_survive_tiny_and_huge_states():
    pool = torch.tensor([[3.0], [1.0], [2.0]])
    for scale in (1e-30, 1e30):
        found = find_neighborhoods(torch.tensor([[0.0]]), pool * scale, neighbors=3)
        assert found.indices.tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("exponent", [-1040, -600, 600, 1015])
def test_float64_states_have_the_same_neighbours_at_every_scale(metric, exponent):
    # Powers of two, and integers that stay exact where floats are subnormal.
    rng = np.random.default_rng(3)
    pool, anchors = (torch.tensor(rng.integers(-99, 100, size=(n, 5)), dtype=torch.float64) for n in (200, 20))
    plain = find_neighborhoods(anchors, pool, neighbors=7, metric=metric)
    scale = 2.0**exponent
    scaled = find_neighborhoods(anchors * scale, pool * scale, neighbors=7, metric=metric)
    assert torch.equal(scaled.indices, plain.indices)
    expected = plain.distances * (1.0 if metric == "cosine" else scale)
    torch.testing.assert_close(scaled.distances / scale, expected / scale, rtol=1e-12, atol=0.0)


def test_groups_are_numbered_by_their_lowest_member():
    groups = group_equal_rows(torch.tensor([[2.0], [1.0], [2.0], [0.5]]))
    assert groups.of_row.tolist() == [0, 1, 0, 2]
    assert groups.representative.tolist() == [0, 1, 3]
    assert groups.size.tolist() == [2, 1, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"neighbors": 0}, "at least 1"),
        ({"neighbors": 4}, "only 3 distinct inputs"),
        ({"neighbors": 5, "distinct": False}, "only 4 inputs"),
        ({"neighbors": 3, "excluded": torch.tensor([[2], [-1]])}, "only 2 distinct inputs"),
        ({"metric": "manhattan"}, "metric"),
        ({"excluded": torch.tensor([[9], [0]])}, "pool row 9"),
        ({"excluded": torch.tensor([[0]])}, "1 rows"),
        ({"pool_inputs": torch.zeros(0, 2)}, "empty"),
        ({"pool_inputs": torch.zeros(3, 5)}, "width 5"),
        ({"anchors": torch.tensor([[0.0, 0.0], [float("nan"), 0.0]])}, "row 1"),
        ({"anchors": torch.zeros(2)}, "shape"),
        ({"anchors": torch.zeros(2, 2, dtype=torch.long)}, "floating"),
    ],
)
def test_impossible_requests_say_what_to_change(change, words):
    request = {
        "anchors": torch.zeros(2, 2),
        "pool_inputs": torch.tensor([[0.0, 1.0], [0.0, 1.0], [5.0, 0.0], [1.0, 1.0]]),
        "neighbors": 2,
    } | change
    with pytest.raises(InputError, match=words) as raised:
        # Without the tests' own shape checks, as users call it.
        unwrap(find_neighborhoods)(request.pop("anchors"), request.pop("pool_inputs"), **request)
    assert "\n" not in str(raised.value)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(3, 40), st.integers(0, 10**6), st.booleans(), st.booleans(), st.sampled_from(["euclidean", "cosine"])
)
def test_the_nearest_of_many_neighbors_are_those_of_a_search_for_few(p, seed, leave_out, distinct, metric):
    """Ties, merged duplicates and excluded members included: what is read from a prefix is what is searched for."""
    rng = np.random.default_rng(seed)
    pool = torch.tensor(rng.integers(0, 3, size=(p, 2)).astype(np.float32))
    updates = torch.tensor(rng.normal(size=(p, 3)))
    own = torch.arange(p).unsqueeze(1) if leave_out else None
    most = (len(torch.unique(pool, dim=0)) if distinct else p) - leave_out
    if most < 2:
        return
    options = {"metric": metric, "distinct": distinct, "excluded": own}
    many = find_neighborhoods(pool, pool, neighbors=most, **options)
    for k in range(1, most + 1):
        few, prefix = find_neighborhoods(pool, pool, neighbors=k, **options), many.nearest(k)
        assert torch.equal(prefix.indices, few.indices)
        assert torch.equal(prefix.distances, few.distances)
        assert torch.equal(prefix.distinct_neighbors, few.distinct_neighbors)
        averaged = [found.merged.averaged(updates)[found.rows] for found in (prefix, few)]
        assert torch.equal(*averaged)
        inputs = [pool[found.merged.representative[found.rows]] for found in (prefix, few)]
        assert torch.equal(*inputs)


@pytest.mark.parametrize("k", [0, 6])
def test_no_more_neighbors_are_read_than_were_found(k):
    found = find_neighborhoods(torch.randn(3, 2), torch.randn(20, 2), neighbors=5)
    with pytest.raises(InputError, match=f"{k} neighbors were asked of 5"):
        found.nearest(k)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("leave_out", [False, True])
def test_approximate_neighbours_are_near_ordered_usable_and_their_recall_is_the_share_found(metric, leave_out):
    pytest.importorskip("faiss")
    rng = np.random.default_rng(6)
    centres = rng.normal(size=(40, 12)) * 4
    pool = torch.tensor(centres[rng.integers(0, 40, 3000)] + rng.normal(size=(3000, 12)), dtype=torch.float32)
    own = torch.arange(200).unsqueeze(1) if leave_out else None
    exact = PoolIndex.of(pool, metric=metric).neighborhoods(pool[:200], neighbors=20, excluded=own)
    index = PoolIndex.of(pool, metric=metric, search="faiss")
    found = index.neighborhoods(pool[:200], neighbors=20, excluded=own)
    assert (found.distances[:, 1:] >= found.distances[:, :-1]).all()
    assert (found.distances >= exact.distances - 1e-12).all()
    shares = [len(set(a) & set(b)) / 20 for a, b in zip(exact.indices.tolist(), found.indices.tolist(), strict=True)]
    recall = index.recall(pool[:200], found, excluded=own)
    np.testing.assert_allclose(recall, shares, rtol=1e-12)
    assert 0.8 < recall.mean() <= 1
    if leave_out:
        assert (found.indices != own).all()


def test_approximate_search_widens_until_every_anchor_has_its_neighbours():
    pytest.importorskip("faiss")
    rng = np.random.default_rng(7)
    pool = torch.tensor(rng.normal(size=(900, 3)), dtype=torch.float32)
    whole = PoolIndex.of(pool, search="faiss").neighborhoods(pool[:5], neighbors=900)
    assert whole.indices.sort(1).values.tolist() == [list(range(900))] * 5
    barred = torch.arange(890).expand(5, -1)
    left = PoolIndex.of(pool, search="faiss").neighborhoods(pool[:5], neighbors=10, excluded=barred)
    assert left.indices.sort(1).values.tolist() == [list(range(890, 900))] * 5


def test_faiss_is_asked_for_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match="deltalens\\[faiss\\]"):
        require_faiss()
