"""NCCL's own choice of interfaces, HCAs and GIDs."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.doctor import matching
from muster.doctor.facts import Address, Gid, Hca, Port
from muster.doctor.matching import Selection

NAMES = st.text("ab1_:,^=", max_size=6)
LISTS = st.text("ab1_:,", max_size=12)
PORTS = st.none() | st.integers(0, 3)
INTERFACES = st.lists(
    st.tuples(
        st.sampled_from(["lo", "eth0", "eth1", "eth10", "ib0", "docker0", "virbr0", "veth1"]),
        st.sampled_from(["10.0.0.1", "127.0.0.1", "fe80::1", "::1", "fd00::1"]),
        st.booleans(),
    ).map(lambda three: Address(three[0], three[1], 24, three[2])),
    max_size=12,
)


def read_by_character(value: str) -> list[tuple[str, int | None]]:
    """The list as NCCL's parseStringList takes it in, one character after the other."""
    found: list[tuple[str, int | None]] = []
    name, port, in_port = "", "", False
    for each in f"{value},":
        if each == ",":
            if name:
                # atoi stops at the first that is no digit
                digits = re.match("[0-9]*", port)
                found.append((name, int(digits[0] or "0") if digits and in_port else None))
            name, port, in_port = "", "", False
        elif in_port:
            port += each
        elif each == ":":
            in_port = True
        else:
            name += each
    return found


# ---- lists of names -----------------------------------------------------------------------------


@given(st.text("a1,:", max_size=12) | st.from_regex(r"(a|b)*(:[0-9]{1,3})?(,b:1)?", fullmatch=True))
def test_a_list_is_read_as_nccl_reads_it(value: str) -> None:
    parsed = Selection.parse(value)
    assert [(each.name, each.port) for each in parsed.wanted] == read_by_character(value)[:16]


@given(LISTS, NAMES, PORTS)
def test_a_caret_selects_all_that_the_list_does_not(
    value: str, name: str, port: int | None
) -> None:
    selected = Selection.parse(value).matches(name, port)
    assert Selection.parse(f"^{value}").matches(name, port) is not selected
    exact = Selection.parse(f"={value}").matches(name, port)
    assert Selection.parse(f"^={value}").matches(name, port) is not exact


@given(st.text("ab1,", min_size=1, max_size=12), NAMES)
def test_whole_names_select_no_more_than_their_beginnings(value: str, name: str) -> None:
    if Selection.parse(f"={value}").matches(name):
        assert Selection.parse(value).matches(name)


@given(st.lists(st.text("ab1", min_size=1, max_size=4), min_size=1, max_size=16))
def test_a_list_of_whole_names_selects_these_alone(names: list[str]) -> None:
    selection = Selection.parse("=" + ",".join(names))
    assert all(map(selection.matches, names))
    assert not selection.matches("".join(names) + "x")


@given(LISTS, st.permutations(["eth0", "eth1:1", "ib0"]))
def test_the_order_of_a_list_does_not_matter(name: str, words: list[str]) -> None:
    one, other = Selection.parse(",".join(words)), Selection.parse(",".join(reversed(words)))
    assert one.matches(name) is other.matches(name)


@given(st.text())
def test_no_text_is_refused(value: str) -> None:
    Selection.parse(value).matches("eth0", 1)


@pytest.mark.parametrize(
    ("value", "name", "port", "matches"),
    [
        ("eth", "eth0", None, True),
        ("eth0", "eth0", None, True),
        ("eth0", "eth01", None, True),
        ("=eth0", "eth01", None, False),
        ("^eth0", "eth01", None, False),
        ("^=eth0", "eth01", None, True),
        ("=^eth0", "eth1", None, False),
        ("eth0,ib", "ib3", None, True),
        ("eth0, ib", "ib3", None, False),
        ("mlx5_1", "mlx5_10", 1, True),
        ("=mlx5_1", "mlx5_10", 1, False),
        ("mlx5_0:1", "mlx5_0", 1, True),
        ("mlx5_0:1", "mlx5_0", 2, False),
        ("=mlx5_0:1,mlx5_3", "mlx5_3", 2, True),
        ("^mlx5_0:1", "mlx5_0", 2, True),
        ("mlx5_0:x", "mlx5_0", 1, False),
        ("", "anything", None, True),
        ("^", "anything", None, False),
    ],
)
def test_a_value_matches_as_in_nccl(
    value: str, name: str, port: int | None, *, matches: bool
) -> None:
    assert Selection.parse(value).matches(name, port) is matches


def test_what_stands_behind_the_16th_name_is_not_read() -> None:
    words = [f"eth{index}" for index in range(20)]
    assert not Selection.parse("=" + ",".join(words)).matches("eth16")
    assert Selection.parse("=" + ",".join(words), matching.MOST_HCAS).matches("eth16")


# ---- interfaces ---------------------------------------------------------------------------------


def at(*pairs: tuple[str, str]) -> list[Address]:
    return [Address(name, address, 24, True) for name, address in pairs]


HOST = at(("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("docker0", "172.17.0.1"), ("lo", "::1"))


@given(INTERFACES, st.none() | st.text("^=abdehilotv01,", max_size=8))
def test_what_is_selected_runs_and_has_an_address(
    addresses: list[Address], value: str | None
) -> None:
    found = matching.interfaces(addresses, value)
    assert len(set(found)) == len(found) <= matching.MOST_INTERFACES
    assert set(found) <= {each.ifname for each in addresses if each.running}


@given(INTERFACES, st.sampled_from(["eth", "eth1", "=eth1", "lo", "ib,veth", "docker", "zz"]))
def test_a_value_and_its_caret_share_the_interfaces_out(
    addresses: list[Address], value: str
) -> None:
    selected = set(matching.interfaces(addresses, value))
    others = set(matching.interfaces(addresses, f"^{value}"))
    usable = {each.ifname for each in addresses if each.running and each.address != "::1"}
    assert selected | others == usable
    assert not selected & others


@pytest.mark.parametrize(
    ("more", "value", "selected"),
    [
        ((), None, ("eth0",)),
        ((("ib0", "10.1.0.1"),), None, ("ib0",)),
        ((("ibp24s0", "10.1.0.1"), ("ib1", "10.2.0.1")), None, ("ibp24s0", "ib1")),
        ((("veth1", "fe80::1%veth1"),), None, ("eth0", "veth1")),
        ((), "docker", ("docker0",)),
        ((), "^docker", ("lo", "eth0")),
        ((), "e", ("eth0",)),
        ((), "", ("eth0",)),
        ((), "zz", ()),
    ],
)
def test_interfaces_are_taken_in_nccls_order(
    more: tuple[tuple[str, str], ...], value: str | None, selected: tuple[str, ...]
) -> None:
    assert matching.interfaces([*HOST, *at(*more)], value) == selected


@pytest.mark.parametrize(
    ("left", "selected"), [(("docker0", "lo"), ("docker0",)), (("lo",), ("lo",)), ((), ())]
)
def test_docker_and_the_loopback_are_what_is_left(
    left: tuple[str, ...], selected: tuple[str, ...]
) -> None:
    addresses = [replace(each, running=each.ifname in left) for each in HOST]
    assert matching.interfaces(addresses, None) == selected


def test_the_family_that_is_asked_for_decides() -> None:
    both = [*HOST, *at(("eth1", "fd00::1"))]
    assert matching.interfaces(both, None, "AF_INET6") == ("eth1",)
    assert matching.interfaces(both, None, "AF_INET") == ("eth0",)
    assert matching.interfaces(both, None, "banana") == ("eth0", "eth1")


# ---- HCAs ---------------------------------------------------------------------------------------


def hca(name: str, *states: str, device_file: bool = True) -> Hca:
    ports = tuple(
        Port(number, state, "LinkUp", "InfiniBand", 400.0) for number, state in enumerate(states, 1)
    )
    return Hca(name, device_file=device_file, ports=ports)


def test_ports_that_are_active_and_have_a_device_file_are_used() -> None:
    found = [
        hca("mlx5_0", "ACTIVE", "DOWN"),
        hca("mlx5_1", "INIT"),
        hca("mlx5_2", "ACTIVE", device_file=False),
        hca("mlx5_10", "ACTIVE"),
    ]

    def names(value: str | None) -> list[str]:
        return [f"{each.name}:{port.number}" for each, port in matching.ports(found, value)]

    assert names(None) == names("") == names("mlx5") == ["mlx5_0:1", "mlx5_10:1"]
    assert names("mlx5_1") == ["mlx5_10:1"]
    assert names("=mlx5_1") == []
    assert names("mlx5_0:2") == []
    assert names("^mlx5_0") == ["mlx5_10:1"]


# ---- GIDs ---------------------------------------------------------------------------------------

LINK_LOCAL = "fe80:0000:0000:0000:a088:c2ff:fe00:0001"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0001"
GLOBAL6 = "fd00:0000:0000:0000:0000:0000:0000:0001"
TABLE = (
    Gid(0, LINK_LOCAL, "IB/RoCE v1"),
    Gid(1, LINK_LOCAL, "RoCE v2"),
    Gid(2, MAPPED, "IB/RoCE v1"),
    Gid(3, MAPPED, "RoCE v2"),
    Gid(4, GLOBAL6, "IB/RoCE v1"),
    Gid(5, GLOBAL6, "RoCE v2"),
)


@pytest.mark.parametrize(
    ("gids", "ipv6", "index"),
    [
        (TABLE, False, 3),
        (TABLE, True, 5),
        (TABLE[:3], False, 2),
        (TABLE[:2], False, 0),
        (TABLE[2:4], False, 3),
        ((), False, None),
    ],
)
def test_the_gid_is_the_one_that_nccl_finds(
    gids: tuple[Gid, ...], *, ipv6: bool, index: int | None
) -> None:
    found = matching.roce_gid(Port(1, "ACTIVE", "LinkUp", "Ethernet", 100.0, "e", gids), ipv6=ipv6)
    assert (None if found is None else found.index) == index


@given(st.text(max_size=40))
def test_an_odd_gid_is_neither_routable_nor_an_address(text: str) -> None:
    odd = Gid(0, f"x{text}", "RoCE v2")
    assert not matching.is_routable(odd)
    assert not matching.is_ipv4(odd)
