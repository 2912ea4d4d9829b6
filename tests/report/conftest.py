"""Synthetic runs, written once for all tests of this room."""

import pytest
from synthetic import Recipe, SyntheticRun, write_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> SyntheticRun:
    return write_run(tmp_path_factory.mktemp("runs") / "plain", Recipe())


@pytest.fixture(scope="session")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> SyntheticRun:
    recipe = Recipe(hostile=True, layers=(0, 1, 2), n_layers=3, model="</script><script>window.pwned=1</script>")
    return write_run(tmp_path_factory.mktemp("runs") / "hostile", recipe)
