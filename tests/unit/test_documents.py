import contextlib
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import ManifestUnreadable
from muster.manifests import documents
from muster.manifests.documents import Document


def parse(text: str) -> tuple[Document, ...]:
    return documents.parse(text, "job.yaml")


def refused(text: str) -> str:
    with pytest.raises(ManifestUnreadable) as caught:
        parse(text)
    return caught.value.what


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ---- lines --------------------------------------------------------------------------------------

TEXT = """\
# a comment
apiVersion: v1
kind: Service
metadata:
  name: one
---
---
kind: Job
spec:
  list:
  - a
  -
    key: {inner: 1}
  script: |
    first
    second
  flow: [1,
    2]
"""


def test_documents_are_counted_without_the_empty_ones() -> None:
    service, job = parse(TEXT)
    assert (service.index, service.kind, service.name, service.api_version) == (
        0,
        "Service",
        "one",
        "v1",
    )
    assert (job.index, job.kind, job.name, job.namespace) == (1, "Job", "", "default")


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ((), 8),
        (("spec",), 9),
        (("spec", "list"), 10),
        (("spec", "list", 0), 11),
        (("spec", "list", 1, "key", "inner"), 13),
        (("spec", "script"), 14),
        (("spec", "flow", 1), 18),
        (("spec", "nothing", "here"), 9),
        (("spec", "list", 7), 10),
        (("spec", "flow", "name"), 17),
    ],
)
def test_a_value_is_found_by_its_path(path: documents.KeyPath, line: int) -> None:
    assert parse(TEXT)[1].line(*path) == line


def test_the_lines_of_a_script_count_from_its_first() -> None:
    job = parse(TEXT)[1]
    assert [job.line("spec", "script", row=row) for row in (0, 1)] == [15, 16]
    assert job.line("spec", "flow", 0, row=0) == 17
    assert job.where("spec", "script", row=1) == "job.yaml:16"


# ---- scalars ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", True),
        ("y", True),
        ("N", False),
        ("off", False),
        ("1", 1),
        ("0644", 420),
        ("0x1F", 31),
        ("1_000", 1000),
        ("09", 9.0),
        ("1e-4", 1e-4),
        ("1.5", 1.5),
        ("'1'", "1"),
        ("22:30", "22:30"),
        ("2026-01-01", "2026-01-01"),
        ("=", "="),
        ("1Gi", "1Gi"),
        ("!!str 1", "1"),
    ],
)
def test_scalars_are_what_kubectl_takes_them_for(text: str, value: object) -> None:
    found = parse(f"a: {text}")[0].data["a"]
    assert (found, type(found)) == (value, type(value))


def test_null_is_absent_and_keys_are_text() -> None:
    assert parse("a: ~\nb:\nc: null\n1: x\ntrue: z\nd: [~]")[0].data == {
        "1": "x",
        "true": "z",
        "d": [None],
    }


def test_anchors_and_merge_keys_are_followed() -> None:
    text = "base: &base\n  a: 1\n  b: 2\nnew:\n  <<: *base\n  b: 3\n"
    (document,) = parse(text)
    assert document.data["new"] == {"a": 1, "b": 3}
    assert document.line("new", "a") == 2
    assert document.line("new", "b") == 6


def test_the_items_of_a_list_are_objects_of_their_own() -> None:
    text = "kind: List\nitems:\n- kind: Service\n- kind: Job\n  metadata: {name: j}\n---\nkind: Pod"
    found = parse(text)
    assert [(each.index, each.kind) for each in found] == [(0, "Service"), (1, "Job"), (2, "Pod")]
    assert found[1].line("metadata", "name") == 5


@pytest.mark.parametrize(
    ("api_version", "kind", "expected"),
    [
        ("batch/v1", "Job", "Job"),
        ("batch.volcano.sh/v1alpha1", "Job", "Job.batch.volcano.sh"),
        ("v1", "Service", "Service"),
        ("serving.knative.dev/v1", "Service", "Service.serving.knative.dev"),
        ("kubeflow.org/v1", "PyTorchJob", "PyTorchJob"),
    ],
)
def test_a_kind_that_only_shares_a_name_is_told_apart(
    api_version: str, kind: str, expected: str
) -> None:
    assert parse(f"apiVersion: {api_version}\nkind: {kind}")[0].kind == expected


# ---- what kubectl refuses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a:\n\tb: 1", "job.yaml:2: a tab indents it"),
        ("a: 1\nb: 2\na: 3", "job.yaml:3: the key 'a' stands on line 1 already"),
        ("x: {a: 1, a: 1}", "job.yaml:1: the key 'a' stands on line 1 already"),
        ("a: 1\n---\nb: [1, 2", "job.yaml:4: while parsing a flow sequence"),
        ("", "job.yaml: holds no object"),
        ("---\n# nothing\n---\n", "job.yaml: holds no object"),
        ("a: 1\n---\n- b", "job.yaml:3: a list, where an object must be"),
        ("just text", "job.yaml:1: a plain value, where an object must be"),
        ("a: !!python/name:os.system x", "job.yaml:1: could not determine a constructor"),
        ("a: *nobody", "job.yaml:1: found undefined alias"),
        ("a: &a [*a]", "job.yaml:1: an anchor that holds itself"),
        ("? [a]\n: 1", "job.yaml:1: a key that is no plain value"),
        ("a: 0x_", "job.yaml: invalid literal"),
        ("a: \x07", "job.yaml:1: not text"),
        (f"a: {'[' * 150}{']' * 150}", "job.yaml:1: nested deeper than 100 levels"),
    ],
)
def test_what_kubectl_refuses_is_named_with_its_line(text: str, what: str) -> None:
    assert refused(text).startswith(what)


def test_anchors_that_multiply_are_refused_before_they_do() -> None:
    tens = (f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9))
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]", *tens]
    assert "its anchors make more than 1000000 values" in refused("\n".join(lines))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestUnreadable, match=r"job.yaml: No such file"):
        documents.read(tmp_path / "job.yaml")
    with pytest.raises(ManifestUnreadable, match="Is a directory"):
        documents.read(tmp_path)


def test_a_binary_file_is_named_with_the_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "job.yaml", b"kind: Job\n\x7fELF\xff")
    with pytest.raises(ManifestUnreadable, match=r":2: not text: byte 0xff is not UTF-8"):
        documents.read(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "job.yaml", b"# " + b"x" * documents.MOST_BYTES)
    with pytest.raises(ManifestUnreadable, match="larger than 4 MiB"):
        documents.read(path)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "job.yaml", b"\xef\xbb\xbfkind: Job\n")
    assert documents.read(path)[0].kind == "Job"


@given(st.text(alphabet="ab:-[]{}&*!|>'\"#\n\t 01~?<", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ManifestUnreadable):
        for each in parse(text):
            assert isinstance(each.data, dict)
            assert 1 <= each.line("a", 0) <= text.count("\n") + 1


def test_the_recursion_limit_is_never_reached() -> None:
    depth = sys.getrecursionlimit()
    assert "nested deeper" in refused("\n".join(" " * level + "- " for level in range(depth // 2)))
