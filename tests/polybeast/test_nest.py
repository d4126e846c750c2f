"""The module nest: tuples, lists and dicts of any leaf."""

import collections
import gc
import itertools
import operator
import sys
import types
from typing import NamedTuple

import pytest

nest = pytest.importorskip("nest", reason="nest is not installed: pip install nest/")
if not hasattr(nest, "map"):  # the folder nest/ itself, as a namespace package
    pytest.skip("nest is not installed: pip install nest/", allow_module_level=True)

MAX_DEPTH = 64


class Point(NamedTuple):
    x: object
    y: object


class Leaf:
    """Something that can be counted by its references."""


def example():
    """Every kind of container; the keys are not given in order."""
    return {"b": (4, []), "a": [1, Point(2, {"z": 3})], "c": {}}


def same(a, b):
    """Equality that distinguishes list and tuple, and the order of dicts."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def nested(depth):
    """A leaf in `depth` lists."""
    result = 1
    for _ in range(depth):
        result = [result]
    return result


def test_map_keeps_containers_and_sorts_keys():
    visited = []
    result = nest.map(lambda x: visited.append(x) or 10 * x, example())
    assert same(result, {"a": [10, Point(20, {"z": 30})], "b": (40, []), "c": {}})
    assert visited == [1, 2, 3, 4]


def test_map_many_gives_a_list_of_the_leaves():
    tens = nest.map(lambda x: 10 * x, example())
    seen = []
    result = nest.map_many(
        lambda leaves: seen.append(leaves) or sum(leaves), example(), tens, example()
    )
    assert seen == [[1, 10, 1], [2, 20, 2], [3, 30, 3], [4, 40, 4]]
    assert same(result, {"a": [12, Point(24, {"z": 36})], "b": (48, []), "c": {}})
    assert same(nest.map_many(operator.itemgetter(0), (1, [2])), (1, [2]))


def test_flatten_pack_as_front():
    leaves = nest.flatten(example())
    assert leaves == [1, 2, 3, 4]
    assert nest.front(example()) == 1
    assert nest.front(([], {"a": ((),), "b": 5}, 6)) == 5
    packed = {"a": ["p", Point("q", {"z": "r"})], "b": ("s", []), "c": {}}
    for sequence in ("pqrs", list("pqrs"), tuple("pqrs"), collections.deque("pqrs")):
        assert same(nest.pack_as(example(), sequence), packed)


@pytest.mark.parametrize(
    "leaf",
    [7, None, "text", {1, 2}, collections.deque([1]), types.MappingProxyType({"a": 1})],
)
def test_all_else_is_a_leaf(leaf):
    assert nest.flatten(leaf) == [leaf]
    assert nest.front((leaf,)) is leaf
    assert nest.map(lambda x: x, leaf) is leaf
    assert nest.pack_as(0, [leaf]) is leaf


@pytest.mark.parametrize("n", [(), [], {}, ([], {"a": ()}), Point([], {})])
def test_empty_nests(n):
    assert nest.flatten(n) == []
    assert same(nest.map(pytest.fail, n), n)
    assert same(nest.map_many(pytest.fail, n, n), n)
    assert same(nest.map_many2(pytest.fail, n, n), n)
    assert same(nest.pack_as(n, []), n)
    with pytest.raises(ValueError, match="without leaves"):
        nest.front(n)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (1, [1], "at the root: a leaf in the first, a vector of 1 in the second"),
        (
            [{"reward": 1}],
            [{"reward": (1, 2)}],
            'at [0]["reward"]: a leaf in the first, a vector of 2 in the second',
        ),
        ({"a": {}}, {"a": 1}, 'at ["a"]: a dict of 0 in the first, a leaf in'),
        ([{"a": 1}], [{"b": 1}], 'only the first has "a"; only the second has "b"'),
    ],
)
@pytest.mark.parametrize("map_two", [nest.map_many, nest.map_many2])
def test_structures_that_differ(map_two, first, second, text):
    with pytest.raises(ValueError, match="at ") as error:
        map_two(pytest.fail, first, second)
    assert text in str(error.value)


def test_containers_that_hold_themselves():
    loop: list = [1]
    loop.append(loop)
    mapping: dict = {}
    mapping["a"] = (mapping,)
    uses = (lambda n: nest.map_many2(max, n, n), nest.flatten, nest.front)
    for n, use in itertools.product((loop, mapping, nested(100_000)), uses):
        with pytest.raises(ValueError, match=r"nested more than 64 deep"):
            use(n)
    assert nest.flatten(nested(MAX_DEPTH)) == [1]


def test_exceptions_of_f_pass_through():
    error = KeyError("mine")

    def fail_at_3(*leaves):
        if 3 in leaves or [3] in leaves:
            raise error

    for call in (nest.map, nest.map_many):
        with pytest.raises(KeyError) as caught:
            call(fail_at_3, example())
        assert caught.value is error


def fail(*_):
    raise RuntimeError


def each_use(n, leaves):
    """Every function of the module, successful and not."""
    nest.map(lambda x: x, n)
    nest.map_many(operator.itemgetter(0), n, n)
    nest.map_many2(lambda x, _: x, n, n)
    assert nest.flatten(nest.pack_as(n, leaves))[0] is nest.front(n)
    for f in (
        lambda: nest.map(fail, n),
        lambda: nest.map_many2(fail, n, n),
        lambda: nest.map_many(fail, n, [n]),
        lambda: nest.pack_as(n, leaves[1:]),
        lambda: nest.flatten((n, nested(MAX_DEPTH))),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            f()


def test_no_reference_is_leaked():
    leaf = Leaf()
    n = {"a": [[leaf], (leaf,), {"key": leaf}], "b": Point(leaf, leaf)}
    leaves = nest.flatten(n)
    objects = [leaf, leaves, n, n["a"], n["b"], *n["a"]]
    each_use(n, leaves)  # fills what is made once
    before = [sys.getrefcount(x) for x in objects]
    for _ in range(50):
        each_use(n, leaves)
    gc.collect()
    assert [sys.getrefcount(x) for x in objects] == before
