"""The page: what stands on it, and that nothing of a run becomes more than text."""

import re
import string
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.dossiers import cluster, dossier, finding, ill, reworded, series, written

from muster import dossier as dossier_
from muster.bandwidth.results import Collective, Tool
from muster.dossier import Dossier
from muster.page import words
from muster.page.page import page

MOST_BYTES = 500_000
VOID = {"br", "meta"}
STRUCTURE = "html head meta title style body main header footer section article figure figcaption"
TEXT = "h1 h2 h3 p b br sup span div dl dt dd table thead tbody tr th td pre code details summary"
DRAWING = "svg g path polyline circle rect text"
TAGS = {tag for tags in (STRUCTURE, TEXT, DRAWING) for tag in tags.split()}
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title></pre><iframe src=//x>",
    "]]><!-- <svg onload=alert(1)>",
    "{{ 7 * 7 }}{% include 'page.py' %}",
    "&lt;script&gt;&#60;b&#62;",
    "javascript:alert(1)",
    "\x1b[31m\0\x0b\u202e\u2066\ud800\uffff\N{GRINNING FACE}",
)


class Parsed(HTMLParser):
    """The elements with their attributes, the text, and whether every element is closed."""

    def __init__(self, html: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.others: list[str] = []
        self.feed(html.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    def handle_comment(self, data: str) -> None:
        self.others.append(data)

    def unknown_decl(self, data: str) -> None:
        self.others.append(data)

    def handle_pi(self, data: str) -> None:
        self.others.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def parsed(found: Dossier) -> Parsed:
    made = Parsed(page(found))
    assert made.open == []
    return made


def test_the_page_holds_all_that_a_ticket_needs() -> None:
    told = parsed(ill()).words
    for text in (
        "NOT READY 1 passed, 1 failed, 1 not run. Node gpu-1 , 143 s.",
        "2026-11-30T00:55:00Z",
        "muster:cu13 sha256:3f3f",
        "error only 64 KiB can be locked where memlock evidence mlock of 32 MiB: Cannot",
        "allocate memory ulimit -l: 64 cause the Engine gives the container the limit",
        "remedy set LimitMEMLOCK=infinity in dockerd's unit",
        "nccl_tests not run it stands on memlock, which failed",
        "nccl-tests: 359.7 GB/s at 8 GiB",
        "floor: 330 GB/s from 1 GiB on (threshold), floors.toml",
        "IB, GPUDirect",
        "P2P/CUMEM x 56, NET/IB/GDRDMA x 16",
        "16 rings, trees, 16 NVLS channels",
        "topology NV18 between all pairs",
        "torch 2.14.1",
        "bom.json 9c9c",
        "shm 1 GiB (docker/pins.toml)",
        "all ./invokew smoke --variant cu13 --json report.json --html report.html",
        "memlock ./invokew smoke --variant cu13 --only memlock",
    ):
        assert text in told, text
    assert told.index("error only") < told.index("warning only")


def test_a_node_that_is_well_has_no_finding() -> None:
    assert "READY 3 passed, 1 not applicable. Node gpu-1" in parsed(dossier()).words
    assert "Nothing wrong was found." in parsed(dossier()).words


def test_a_run_without_an_image_bandwidth_or_nodes_is_a_page_too() -> None:
    bare = replace(dossier(), image=None, bandwidth=(), nodes=(), steps=(), versions={})
    told = parsed(bare).words
    assert "READY no step ran." in told
    assert "Python" in told
    assert "Bandwidth" not in told


def test_the_missing_node_and_the_odd_one_out_are_named() -> None:
    told = parsed(cluster(4)).words
    assert "1 not run. 4 nodes (1 missing), 143 s." in told
    assert "gpu-3 missing: its container ended (137) during ddp_demo" in told
    assert "580.95.05, CUDA 13.0, open kernel modules on gpu-0, gpu-1 570.86.15" in told
    assert "topology NV18 between all pairs shm" in told


def test_a_node_where_no_nccl_ran_says_so_once() -> None:
    silent = replace(dossier(), nodes=(replace(dossier().nodes[0], watched=None),))
    assert parsed(silent).words.count("no NCCL ran here") == 1


def test_figures_that_claim_nothing_say_so() -> None:
    first, *rest = dossier().bandwidth
    none = [replace(each, claimed=False) for each in dossier().bandwidth]
    for bandwidth, times in (([first, *rest], 0), (none, 1), ([first, *none[1:]], 6)):
        told = parsed(replace(dossier(), bandwidth=tuple(bandwidth))).words
        assert told.count("No bandwidth is claimed") == times


def test_a_series_without_a_result_is_said_and_not_drawn() -> None:
    failed = series(Collective.ALLTOALL, Tool.NCCL_TESTS, 1, "gpu-1")
    failed = replace(failed, run=replace(failed.run, rows=(), failure="NCCL error: timeout"))
    told = parsed(replace(dossier(), bandwidth=(failed,))).words
    assert "alltoall gpu-1 ranks 8 no result: NCCL error: timeout nccl-tests" in told


def test_two_series_and_the_floor_are_drawn() -> None:
    drawn = [attrs for tag, attrs in parsed(dossier()).elements if tag == "polyline"]
    assert len(drawn) == 12
    first = dossier().bandwidth[:2]
    found = parsed(replace(dossier(), bandwidth=first)).elements
    assert [dict(attrs)["class"] for tag, attrs in found if tag == "polyline"] == ["tests", "torch"]
    # once in the legend, once in the plot
    assert [attrs[0] for tag, attrs in found if tag == "path"].count(("class", "floor")) == 2


def test_the_page_runs_nothing_and_loads_nothing() -> None:
    for found in (dossier(), ill(), cluster(3)):
        made = parsed(found)
        assert {tag for tag, _ in made.elements} <= TAGS
        names = {name for _, attrs in made.elements for name, _ in attrs}
        assert not {name for name in names if name.startswith("on")}
        assert not names & {"src", "href", "srcset", "action", "style", "xlink:href"}
        html = page(found).decode()
        assert "default-src 'none'" in html
        assert not re.search(r"url\(|@import|https?:", html)


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("found", [ill(), cluster(3)])
def test_no_element_and_no_attribute_comes_from_a_run(found: Dossier, hostile: str) -> None:
    tame = parsed(reworded(found, lambda text: f"x {text}"))
    wild = parsed(reworded(found, lambda text: f"{hostile} {text}"))
    assert wild.elements == tame.elements
    assert wild.others == tame.others == []


@settings(max_examples=30)
@given(st.text(st.characters(codec=None), max_size=60))
def test_no_text_whatever_becomes_an_element(hostile: str) -> None:
    found = replace(ill(), bandwidth=ill().bandwidth[:2])
    wild = parsed(reworded(found, lambda text: f"{hostile}x{text}"))
    assert wild.elements == parsed(found).elements


def test_a_hostile_name_is_still_to_be_read() -> None:
    hostile = "<b>gpu-1</b>"
    found = parsed(reworded(dossier(), lambda text: hostile + text))
    assert f"Node {hostile}gpu-1" in found.words


def test_characters_that_a_terminal_or_a_browser_obeys_are_left_out() -> None:
    html = page(reworded(ill(), lambda text: f"{HOSTILE[-1]}{text}")).decode()
    assert not set(html) & set("\x1b\0\x0b\u202e\u2066\ud800")
    assert set(html) - set(string.printable) == {"\N{GRINNING FACE}", "\uffff"}


def test_a_page_stays_small_whatever_the_run_holds() -> None:
    assert len(page(cluster(64))) < MOST_BYTES
    unlike = [
        replace(each, facts={f"fact {n}": f"{n} {each.host}" for n in range(40)})
        for each in cluster(64).nodes
    ]
    assert len(page(replace(cluster(64), nodes=tuple(unlike)))) < MOST_BYTES
    endless = reworded(ill(), lambda text: text + "<&" * 200_000)
    assert len(page(endless)) < MOST_BYTES


def test_a_pair_that_falls_behind_stands_out_with_its_share_of_the_median() -> None:
    pairs = list(cluster(12).bandwidth)
    slow = next(each for each in pairs if each.nodes == ("gpu-3", "gpu-7"))
    pairs[pairs.index(slow)] = series(
        Collective.ALL_REDUCE, Tool.TORCH, 80, "gpu-3", "gpu-7", nranks=16
    )
    told = parsed(replace(cluster(12), bandwidth=tuple(pairs))).words
    behind = told.index("gpu-3, gpu-7 ranks 16 47% of the median 79.99 GB/s")
    level = told.index("55 no more than 10% behind the median of their kind")
    assert behind < level < told.index("gpu-0, gpu-1 ranks 16 100% of the median")


def test_what_is_left_out_is_counted() -> None:
    many = replace(ill(), findings=tuple(finding(where=str(each)) for each in range(1000)))
    made = parsed(many)
    assert [tag for tag, _ in made.elements].count("article") == 60
    assert "940 more Findings are in the JSON" in made.words
    nodes = cluster(64).nodes
    unlike = [replace(each, facts={"fact": f"of {each.host}"}) for each in nodes]
    told = parsed(replace(cluster(64), nodes=tuple(unlike))).words
    # 2016 pairs and 6 collectives on each of 64 nodes, less 8 of each of these 7 kinds
    assert "2344 more are in the JSON" in told
    assert told.count(" GB/s at 8 GiB torch") == 56
    assert "of gpu-5 on gpu-5 58 other values, in the JSON" in told


def test_a_page_is_the_same_made_from_the_saved_json(tmp_path: Path) -> None:
    saved = written(tmp_path / "report.json", ill())
    assert page(dossier_.read(saved)) == page(ill())


def test_a_command_stands_as_it_must_be_typed() -> None:
    command = f"docker run --env X='a  b' {'--env Y=1 ' * 200}image <in >out 2>&1 && echo \"done\""
    first, *rest = dossier().steps
    found = replace(dossier(), steps=(replace(first, command=command), *rest))
    assert command in "".join(parsed(found).text)


def test_long_texts_keep_what_counts() -> None:
    log = "\n".join(map(str, range(10_000)))
    note, *lines = words.tail(log).split("\n")
    assert note == "[the 48590 characters before this are in the JSON]"
    assert lines == [str(number) for number in range(9940, 10_000)]
    assert words.tail(f"begun {'x' * 4000}\nlast").split("\n")[1:] == ["last"]
    assert words.tail("x" * 5000).endswith(f"]\n{'x' * 4000}")
    assert words.tail("a\nb\n") == "a\nb"
    assert words.block(log).startswith("0\n1\n")
    assert words.block(log).endswith(f"[{len(log) - 4000} more characters]")
    assert words.line("a\n b\t c") == "a b c"


@pytest.mark.parametrize(
    ("names", "total", "told"),
    [
        (("a",), 1, "a"),
        (("a", "b"), 2, "all nodes"),
        (("a", "b"), 5, "a, b"),
        (("a", "b", "c", "d", "e", "f"), 9, "a, b, c, d and 2 more"),
        ((), 0, ""),
    ],
)
def test_nodes_are_named_in_few_words(names: tuple[str, ...], total: int, told: str) -> None:
    assert words.hosts(names, total) == told
