import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_toy import ARCH

from sesa_jax.policy.sharding import make_mesh
from sesa_jax.rollout.cache import LENGTH_BUCKETS, RowCache, Shapes, bucket


@pytest.mark.parametrize(('size', 'expected'), [(1, 8), (8, 8), (9, 16), (80, 80)])
def test_a_bucket_is_the_smallest_that_holds(size, expected):
    assert bucket(size, (8, 16, 80)) == expected


def test_a_size_beyond_the_table_is_an_error():
    with pytest.raises(ValueError, match='81 does not fit into the largest bucket, 80'):
        bucket(81, (8, 16, 80))


def test_length_buckets_rise_and_waste_at_most_half():
    assert list(LENGTH_BUCKETS) == sorted(set(LENGTH_BUCKETS))
    assert all(after <= 2 * before for before, after in itertools.pairwise(LENGTH_BUCKETS))


@pytest.mark.parametrize('seed', range(4))
def test_rows_keep_their_contents_whatever_is_worked_on(seed):
    """Random walks over row sets and sizes, with a write after each move, against a plain list of row values."""
    draw, total = random.Random(seed), 8  # a full bucket: a padding row that is written back would hit a real one
    cache = RowCache(total, (2, 4, 8), arch=ARCH, mesh=make_mesh(1), dtype=jnp.float32, shapes=Shapes())
    value, slots = [(0.0, 0)] * total, 20  # what each row was filled with, and how many slots of it
    for move in range(1, 15):
        slots = min(120, slots + draw.choice((0, 0, 40)))
        rows = sorted(draw.sample(range(total), draw.randint(1, total)))
        if move > 1 and draw.random() < 0.2:
            source = np.array([draw.randrange(total) for _ in range(total)], np.int32)
            cache.spread(source)
            value = [value[i] for i in source]
        cache.focus(rows, slots, size=draw.choice((None, 8)))
        assert cache.work.slots >= slots
        places = np.array([list(cache.index).index(row) for row in rows])
        for leaf in map(np.asarray, jax.tree.leaves(cache.work)):
            for place, row in zip(places, rows, strict=True):
                number, filled = value[row]
                np.testing.assert_array_equal(leaf[place, :, :filled], number)
        cache.work = jax.tree.map(lambda leaf, p=places, m=move, s=slots: leaf.at[p, :, :s].set(m), cache.work)
        for row in rows:
            value[row] = (float(move), slots)


def test_rows_that_are_there_already_do_not_move():
    cache = RowCache(4, (2, 4), arch=ARCH, mesh=make_mesh(1), dtype=jnp.float32, shapes=Shapes())
    cache.focus([0, 1, 2, 3], 20)
    before = cache.work
    cache.focus([1, 2, 3], 20)
    assert cache.work is before
    cache.focus([1, 3], 20)
    assert cache.index.tolist() == [1, 3]


def test_every_shape_is_noted_once():
    shapes = Shapes()
    for _ in range(2):
        cache = RowCache(4, (2, 4), arch=ARCH, mesh=make_mesh(1), dtype=jnp.float32, shapes=shapes)
        cache.focus([0, 1, 2, 3], 20, size=4)
        cache.focus([1, 3], 20, size=2)
    assert shapes == {('empty', 4, 32), ('put', 4, 32, 4, 32), ('take', 4, 32, 2, 32)}
