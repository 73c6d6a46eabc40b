"""YAML text that ruamel would write, and that YAML 1.1 reads as what was meant."""

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as with_settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.scalarstring import (
    DoubleQuotedScalarString,
    LiteralScalarString,
    SingleQuotedScalarString,
)

from muster import patch
from muster.manifests import documents
from muster.manifests.emitter import emitted

EXAMPLES = Path(__file__).resolve().parents[2] / "k8s/examples"


def ruamel() -> YAML:
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 2**16
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def settled(text: str) -> list[CommentedMap]:
    found = list(ruamel().load_all(text))
    for each in found:
        patch.settle(each)
    return found


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_written_as_ruamel_writes_it(path: Path) -> None:
    text = path.read_text()
    by_ruamel = io.StringIO()
    ruamel().dump_all(list(ruamel().load_all(text)), by_ruamel)
    assert emitted(settled(text)) == by_ruamel.getvalue() == text


@pytest.mark.parametrize(
    "text",
    [
        "a: 1 # end\n",
        "a:\n  # above\n  b: 1\n# above, further out\nc: 2\n",
        "a: # on a map\n  b: 1\n",
        "a:\n  - 1 # on an item\n  # above an item\n  - b: 2 # in an item\n    c: 3\n",
        "a: | # on a block\n  text\n\n  more\nb: 1\n",
        "a: |-\n  no end\nb: |+\n  more ends\n\n",
        "# a heading\na: {}\nb: []\n",
        "a: ''\nb: 'it''s'\nc: \"\"\n",
        "a: 1\n# below the last\n",
        "a:\n  b:\n    - 1\n  # below a list\n  c: 1.5\nd: null\n",
        "a: 1\n---\n# the second\nb: true\n",
    ],
)
def test_comments_and_styles_come_out_as_they_went_in(text: str) -> None:
    assert emitted(settled(text)) == text


texts = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30),
    st.text(st.sampled_from(["a", " ", "\n", "\t", ":", "#", "-", "'", '"', "\\"]), max_size=8),
    st.sampled_from(["y", "NO", "null", "~", "1", "0x1f", "1e3", ".5", "=", "<<", "2024-01-01"]),
)
styles = st.sampled_from([str, DoubleQuotedScalarString, SingleQuotedScalarString])
scalars = st.one_of(
    st.builds(lambda style, text: style(text), styles, texts),
    st.integers(-(2**40), 2**40),
    st.booleans(),
    # what YAML holds in a block: render puts other code in quotes
    st.lists(st.text("ab :#-'\"é", max_size=6)).map(
        lambda lines: LiteralScalarString("\n".join(lines))
    ),
)
values = st.recursive(
    scalars,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(texts, inside, max_size=3),
    max_leaves=8,
)


@with_settings(max_examples=300)
@given(st.dictionaries(texts, values, min_size=1, max_size=4))
def test_what_is_written_is_read_as_it_was(content: dict[str, Any]) -> None:
    (found,) = documents.parse(emitted([CommentedMap(content)]), "demo.yaml")
    assert found.data == content
