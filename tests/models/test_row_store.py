"""One pass of the frozen encoder for each text, whichever vector of it is asked for."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dpfp_ray.data.tokens import TokenTable, tokenise
from dpfp_ray.models import row_store
from dpfp_ray.models.pretrained import load_tokenizer
from dpfp_ray.models.representations import represent
from dpfp_ray.models.row_store import Shard, Work, encode_here, store_of
from tests.support.tiny_runs import tiny_split, tiny_world

VECTORS = ["mean", "cls", "pooler"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tiny_world(tmp_path_factory.mktemp("world")) as folder:
        yield folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(row_store, "SHARD", 8)


def tokens(model: str, rows: list[int]) -> TokenTable:
    return tokenise(tiny_split(40).take(np.array(rows)), load_tokenizer(model), 32)


class Counted:
    """`encode_here`, which counts rows and can be killed after some shards."""

    def __init__(self, most: int = 1000) -> None:
        self.rows, self.most = 0, most

    def __call__(
        self, works: Iterator[Work], model: str, kind: str, precision: str, name: str
    ) -> Iterator[Shard]:
        for shard in encode_here(works, model, kind, precision, name):
            if self.most == 0:
                raise KeyboardInterrupt
            self.most -= 1
            self.rows += len(shard.digests)
            yield shard


@pytest.mark.parametrize("representation", VECTORS)
def test_equal_texts_go_through_the_encoder_once(model: str, representation: str) -> None:
    rows, counted = [3, 1, 3, 2, 1, 3], Counted()
    h = represent(tokens(model, rows), model, representation, encode=counted).h
    assert counted.rows == len({tiny_split(40).texts[row] for row in rows}) < len(rows)
    np.testing.assert_array_equal(h[0], h[2])


@pytest.mark.parametrize("representation", VECTORS)
def test_a_pass_that_was_killed_goes_on_after_its_last_shard(
    model: str, representation: str
) -> None:
    table, killed, again = tokens(model, list(range(40))), Counted(most=2), Counted()
    with pytest.raises(KeyboardInterrupt):
        represent(table, model, representation, encode=killed)
    represent(table, model, representation, encode=again)
    assert killed.rows == 16
    assert again.rows == len(set(tiny_split(40).texts)) - killed.rows


def test_one_kind_of_vector_is_never_taken_for_another(model: str) -> None:
    table = tokens(model, list(range(12)))
    found = [np.array(represent(table, model, name).h) for name in VECTORS]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not np.allclose(found[one], found[other], atol=1e-2)


@pytest.mark.parametrize("representation", ["cls", "pooler"])
def test_one_vector_is_kept_without_layers(model: str, representation: str) -> None:
    represent(tokens(model, [1, 2, 3]), model, representation)
    (shard,) = row_store._kept_shards(store_of(model, representation, "fp32"))
    assert shard.last.shape == (3, 32)
    assert shard.layers.shape == (3, 0, 32)
