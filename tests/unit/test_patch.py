"""A patch over a document: what merges, what is replaced, and where the comments go."""

import copy
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from muster import patch

BASE = """\
# heading
metadata:
  name: demo
spec:
  # nothing is asked of the API server
  automountServiceAccountToken: false # no token
  annotations: {}
  containers:
    # the one that trains
    - name: train # the container
      args: []
      command:
        - python # the interpreter
      resources:
        limits: # no cpu
          memory: 4Gi # in all
      volumeMounts:
        - name: dshm
          mountPath: /dev/shm
      script: |
        # not a comment
        exec true
      # after the script
      tty: false
  volumes:
    - name: dshm # in memory
      emptyDir: {medium: Memory}
# the end
"""


def yaml() -> YAML:
    settings = YAML()
    settings.preserve_quotes = True
    settings.width = 4096
    settings.indent(mapping=2, sequence=4, offset=2)
    return settings


def load(text: str) -> Any:  # noqa: ANN401 - a document has any shape
    return yaml().load(text)


def dump(document: object) -> str:
    stream = io.StringIO()
    yaml().dump(document, stream)
    return stream.getvalue()


def written(base: str, over: str) -> str:
    return dump(patch.merged(load(base), load(over)))


# ---- values -------------------------------------------------------------------------------------


def test_maps_merge_key_by_key_and_the_patch_wins() -> None:
    base = {"a": 1, "b": {"c": 2, "d": 3}}
    assert patch.merged(base, {"b": {"d": 4, "e": 5}}) == {"a": 1, "b": {"c": 2, "d": 4, "e": 5}}


@pytest.mark.parametrize(
    ("base", "over", "result"),
    [
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"b": 2}, {"a": None}, {"b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
        # what is not there to be removed is not brought as null either
        ({}, {"a": {"b": None, "c": [{"d": None}]}}, {"a": {"c": [{}]}}),
    ],
)
def test_null_removes_a_key(base: object, over: object, result: object) -> None:
    assert patch.merged(base, over) == result


@pytest.mark.parametrize(
    ("base", "over"),
    [({"a": 1}, {"a": [2]}), ({"a": [1]}, {"a": {"b": 2}}), ({"a": {"b": 1}}, {"a": "text"})],
)
def test_what_is_of_another_kind_is_replaced(base: object, over: object) -> None:
    assert patch.merged(base, over) == over


def test_lists_of_named_things_merge_by_name() -> None:
    base = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
    over = {"env": [{"name": "C", "value": "3"}, {"name": "A", "value": "4"}]}
    assert patch.merged(base, over)["env"] == [
        {"name": "A", "value": "4"},
        {"name": "B", "value": "2"},
        {"name": "C", "value": "3"},
    ]


def test_a_volume_is_mounted_twice_and_a_place_once() -> None:
    base = {"volumeMounts": [{"name": "data", "mountPath": "/a"}]}
    over = {
        "volumeMounts": [{"name": "data", "mountPath": "/b"}, {"name": "own", "mountPath": "/a"}]
    }
    assert patch.merged(base, over)["volumeMounts"] == [
        {"name": "own", "mountPath": "/a"},
        {"name": "data", "mountPath": "/b"},
    ]


def test_items_without_a_name_are_appended() -> None:
    base = {"tolerations": [{"key": "a"}], "args": ["x"]}
    assert patch.merged(base, {"tolerations": [{"key": "a"}], "args": ["y"]}) == {
        "tolerations": [{"key": "a"}, {"key": "a"}],
        "args": ["x", "y"],
    }


def test_a_list_can_be_patched_by_itself() -> None:
    assert patch.merged([{"name": "a", "x": 1}], [{"name": "a", "y": 2}]) == [
        {"name": "a", "x": 1, "y": 2}
    ]


def test_a_map_is_not_laid_over_a_list() -> None:
    with pytest.raises(TypeError, match="dict over list"):
        patch.merged([1], {"a": 1})


def test_the_result_is_of_the_bases_kind() -> None:
    assert type(patch.merged({"a": 1}, load("b: 2"))) is dict
    assert type(patch.merged(load("a: 1"), {"b": 2})) is CommentedMap


# ---- comments ------------------------------------------------------------------------------------


def test_what_is_settled_is_written_as_it_was_read() -> None:
    document = load(BASE)
    patch.settle(document)
    assert dump(document) == BASE


def test_an_empty_patch_changes_nothing() -> None:
    assert written(BASE, "{}") == BASE


def test_a_part_keeps_its_own_comments_and_not_the_next_ones() -> None:
    document = load("a:\n  # about b\n  b: 1 # one\n# about c\nc: 2\n")
    patch.settle(document)
    lines = dump(patch.merged(CommentedMap(), document["a"])).splitlines()
    assert [line.strip() for line in lines] == ["# about b", "b: 1 # one"]


def test_a_patchs_comments_show_where_its_values_are() -> None:
    over = """\
# why a patch
spec:
  # why the host's network
  hostNetwork: true # with its ports
  containers:
    - name: train
      resources: # what it gets
        limits:
          # why so many
          rdma/ib: 8 # one a GPU
        # why requests
        requests:
          - first # of all
          # why two
          - second
      volumeMounts:
        # why mounted
        - name: gib # the plugin
          # where
          mountPath: /gib
"""
    result = written(BASE, over)
    lines = [line.strip() for line in result.splitlines()]
    for line in over.splitlines():
        assert "#" not in line or line.strip() in lines, line
    assert load(result) == patch.merged(load(BASE), load(over))


def test_comment_lines_are_indented_as_deep_as_their_key() -> None:
    over = """\
spec:
  containers:
    - name: train
      env:
        # about the first
        - name: A
      limits:
        deep:
          # about the value
          value: 1
"""
    lines = written(BASE, over).splitlines()
    for number, line in enumerate(lines):
        if line.strip().startswith("# about"):
            below = lines[number + 1]
            assert len(line) - len(line.lstrip()) == len(below) - len(below.lstrip()), line


def test_a_patch_from_another_depth_is_indented_as_its_new_place() -> None:
    container = load("container:\n  # about limits\n  limits:\n    # about cpu\n    cpu: 1\n")
    patch.settle(container)
    base = load(BASE)
    patch.settle(base)
    train = base["spec"]["containers"][0]
    base["spec"]["containers"][0] = patch.merged(train, container["container"])
    result = dump(base)
    assert "\n      # about limits\n      limits:\n        # about cpu\n        cpu: 1\n" in result


def test_the_bases_comments_stay_where_the_patch_says_nothing() -> None:
    result = written(BASE, "spec:\n  containers:\n    - name: train\n      tty: true\n  new: 1\n")
    for comment in (line.partition("#")[2] for line in BASE.splitlines() if "#" in line):
        assert comment in result, comment
    assert "new: 1\n# the end\n" in result


def test_a_value_set_by_the_program_keeps_the_bases_comment() -> None:
    base = load("retries: 3 # every pod that follows\n")
    assert dump(patch.merged(base, {"retries": 5})) == "retries: 5 # every pod that follows\n"


def test_the_patchs_comment_takes_the_place_of_the_bases() -> None:
    result = written("# was\na: 1 # old\nb: 2\n", "# is\na: 3 # new\n")
    assert "a: 3 # new\nb: 2\n" in result
    assert "old" not in result


def test_a_key_that_is_removed_takes_its_comments_along() -> None:
    result = written("a: 1\n# about b\nb: 2 # two\n# about c\nc: 3\n", "b: null\n")
    assert result == "a: 1\n# about c\nc: 3\n"


def test_what_stands_below_a_patch_is_not_brought() -> None:
    assert written("a: 1\n", "b: 2\n# the end of the patch\n") == "a: 1\nb: 2\n"


def test_a_comment_is_not_written_into_braces() -> None:
    result = written("a: {}\nb: {c: [1]}\n", "a:\n  x: 1 # one\nb:\n  c:\n    # two\n    - 2\n")
    assert load(result) == {"a": {"x": 1}, "b": {"c": [1, 2]}}
    assert "# one" in result
    assert "# two" in result


def test_a_block_of_text_keeps_what_looks_like_a_comment() -> None:
    result = written(
        "a: 1\n", "script: | # to be run\n  # not a comment\n  true\n# about z\nz: 1\n"
    )
    assert load(result) == {"a": 1, "script": "# not a comment\ntrue\n", "z": 1}
    assert "script: | # to be run\n  # not a comment\n  true\n# about z\nz: 1\n" in result


def test_quotes_are_kept() -> None:
    assert written("a: 'x'\n", 'b: "1"\n') == "a: 'x'\nb: \"1\"\n"


# ---- any values ----------------------------------------------------------------------------------

KEYS = st.sampled_from(["a", "b", "spec", "env"])
SCALARS = st.one_of(st.booleans(), st.integers(), st.text("xyz#: -'\"", max_size=4))


def named(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists of maps, each with a name of its own."""
    items = st.dictionaries(KEYS, values, max_size=3)
    return st.dictionaries(st.sampled_from(["n1", "n2", "n3"]), items, max_size=3).map(
        lambda by_name: [{"name": name, **item} for name, item in by_name.items()]
    )


def maps(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    values = st.recursive(
        leaves, lambda inner: st.dictionaries(KEYS, inner, max_size=3) | named(inner), max_leaves=12
    )
    return st.dictionaries(KEYS, values, max_size=4)


BASES = maps(SCALARS)
PATCHES = maps(SCALARS | st.none())


@given(BASES, PATCHES)
def test_merging_is_idempotent_and_leaves_both_as_they_are(
    base: dict[str, Any], over: dict[str, Any]
) -> None:
    before = copy.deepcopy((base, over))
    once = patch.merged(base, over)
    assert patch.merged(once, over) == once
    assert (base, over) == before


@given(BASES, PATCHES)
def test_documents_merge_as_plain_values_do(base: dict[str, Any], over: dict[str, Any]) -> None:
    documents = load(dump(base)), load(dump(over))
    texts = [dump(document) for document in documents]
    merged = patch.merged(*documents)
    assert merged == patch.merged(base, over)
    assert load(dump(merged)) == merged
    assert [dump(document) for document in documents] == texts
