"""Names of leaves determine the tree again, and a name that could leave its directory is refused."""

import pytest

from sharding.weights.format import journal, tree


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"a/b": 1}, "key 'a/b'"),
        ({"..": 1}, r"key '\.\.'"),
        ({".a": 1}, r"key '\.a'"),
        ({"": 1}, "key ''"),
        ({1: 1}, "key 1"),
        ({"x" * 201: 1}, "rename it"),
        (1, "wrap it in a dict"),
    ],
)
def test_keys_that_cannot_be_names_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        tree.flatten(params, lambda name, leaf: None)


def test_deep_trees_are_refused():
    params = 1
    for _ in range(500):
        params = {"a": params}
    with pytest.raises(ValueError, match="nest less deeply"):
        tree.flatten(params, lambda name, leaf: None)


@pytest.mark.parametrize("leaves", [{"a": 1, "a/b": 2}, {"a/b": 2, "a": 1}])
def test_a_tensor_inside_a_tensor(leaves):
    with pytest.raises(journal.CorruptSource, match="inside another tensor|also a container"):
        tree.unflatten(leaves, {})
