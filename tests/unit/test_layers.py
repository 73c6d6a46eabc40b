"""Images compared layer by layer, in archives of both formats that `docker save` has had."""

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from muster import layers
from muster.errors import ArchiveUnreadable
from muster.layers import Chunks, Comparison, Difference, What


@dataclass(frozen=True)
class Member:
    """A member of a layer: a file unless `fields`, those of TarInfo, say otherwise."""

    name: str
    content: bytes
    fields: Mapping[str, Any]


def member(name: str, content: bytes = b"", **fields: object) -> Member:
    return Member(name, content, fields)


def tar(*members: Member) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for each in members:
            info = tarfile.TarInfo(each.name)
            info.size = len(each.content)
            for name, value in each.fields.items():
                setattr(info, name, value)
            archive.addfile(info, io.BytesIO(each.content))
    return target.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def configuration(contents: Sequence[bytes], config: Mapping[str, Any] | None = None) -> bytes:
    """An image's configuration; steps that make no layer stand between those that do."""
    history: list[dict[str, Any]] = []
    for index in range(len(contents)):
        history += [{"created_by": f"RUN {index}"}, {"created_by": "ENV", "empty_layer": True}]
    digests = [f"sha256:{sha256(each)}" for each in contents]
    document = {"rootfs": {"diff_ids": digests}, "history": history, "config": config}
    return json.dumps(document).encode()


Format = Callable[..., bytes]


def engine_20(
    *contents: bytes, config: Mapping[str, Any] | None = None, beside: Member | None = None
) -> bytes:
    """As Engine 20.10 writes it: folders by name and not by place, the manifest behind them."""
    text = configuration(contents, config)
    members, names = [beside] if beside else [], list[str]()
    first: dict[bytes, str] = {}
    chain = ""
    for content in contents:
        chain = sha256(f"{chain}{sha256(content)}".encode())
        names.append(f"{chain}/layer.tar")
        members += [member(chain, type=tarfile.DIRTYPE), member(f"{chain}/VERSION", b"1.0")]
        if content in first:
            target = f"../{first[content]}"
            members.append(member(names[-1], type=tarfile.SYMTYPE, linkname=target))
        else:
            first[content] = names[-1]
            members.append(member(names[-1], content))
    members.append(member(f"{sha256(text)}.json", text))
    manifest = json.dumps([{"Config": f"{sha256(text)}.json", "Layers": names}]).encode()
    members.sort(key=lambda each: each.name)
    return tar(*members, member("manifest.json", manifest), member("repositories", b"{}"))


def blob(content: bytes) -> Member:
    return member(f"blobs/sha256/{sha256(content)}", content)


def oci(*contents: bytes, config: Mapping[str, Any] | None = None, zipped: bool = False) -> bytes:
    """An OCI layout, with an attestation beside the image and an index within the index."""
    stored = [gzip.compress(each, mtime=0) if zipped else each for each in contents]
    text = configuration(contents, config)
    manifest = json.dumps(
        {
            "config": {"digest": f"sha256:{sha256(text)}"},
            "layers": [{"digest": f"sha256:{sha256(each)}"} for each in stored],
        }
    ).encode()
    attestation = {"vnd.docker.reference.type": "attestation-manifest"}
    index = json.dumps(
        {
            "manifests": [
                {"digest": f"sha256:{sha256(manifest)}"},
                {"digest": f"sha256:{'0' * 64}", "annotations": attestation},
            ]
        }
    ).encode()
    top = json.dumps({"manifests": [{"digest": f"sha256:{sha256(index)}"}]}).encode()
    unique = {each.name: each for each in map(blob, [*stored, text, manifest, index])}
    return tar(*sorted(unique.values(), key=lambda each: each.name), member("index.json", top))


def oci_gzip(*contents: bytes, config: Mapping[str, Any] | None = None) -> bytes:
    return oci(*contents, config=config, zipped=True)


def engine_25(*contents: bytes, config: Mapping[str, Any] | None = None) -> bytes:
    """As Engine 25 and newer write it: OCI's blobs, and Docker's manifest beside the index."""
    text = configuration(contents, config)
    names = [blob(each).name for each in contents]
    manifest = json.dumps([{"Config": blob(text).name, "Layers": names}]).encode()
    unique = {each.name: each for each in map(blob, [*contents, text])}
    return tar(*unique.values(), member("manifest.json", manifest))


FORMATS: list[Format] = [engine_20, engine_25, oci, oci_gzip]
EVERY_FORMAT = pytest.mark.parametrize("write", FORMATS, ids=lambda each: str(each.__name__))


def compare(left: bytes, right: bytes, *, ignore_times: bool = True) -> Comparison:
    return layers.compare(io.BytesIO(left), io.BytesIO(right), ignore_times=ignore_times)


BASE = tar(
    member("etc", type=tarfile.DIRTYPE, mode=0o755),
    member("etc/hostname", b"node"),
    member("etc/mtab", type=tarfile.SYMTYPE, linkname="../proc/mounts"),
)


# ---- equal -------------------------------------------------------------------------------------


@EVERY_FORMAT
@pytest.mark.parametrize("other", FORMATS, ids=lambda each: str(each.__name__))
def test_the_same_layers_are_equal_in_every_format(write: Format, other: Format) -> None:
    contents = (BASE, tar(member("a", b"1")), tar())
    assert compare(write(*contents), other(*contents)) == Comparison(
        layers=3, same=3, first=None, paths=0, times=0, config=()
    )


@EVERY_FORMAT
def test_one_changed_file_is_named_in_every_format(write: Format) -> None:
    left = write(BASE, tar(member("a", b"1"), member("b", b"2")))
    right = write(BASE, tar(member("a", b"1"), member("b", b"3")))
    found = compare(left, right)
    assert not found.equal
    assert found.first == Difference(
        1, "RUN 1", "b", What.CONTENT, f"sha256:{sha256(b'2')}", f"sha256:{sha256(b'3')}"
    )
    assert (found.layers, found.same, found.paths) == (2, 1, 1)


@EVERY_FORMAT
def test_two_equal_layers_in_one_image_are_two_layers(write: Format) -> None:
    twice = write(BASE, tar(), tar(), BASE)
    assert compare(twice, twice).same == 4
    found = compare(twice, write(BASE, tar(), tar(member("a")), BASE))
    assert found.first == Difference(2, "RUN 2", "a", What.PRESENCE, "absent", "file")
    assert (found.same, found.paths) == (3, 1)


def test_an_image_without_layers_equals_itself() -> None:
    assert compare(engine_20(), oci()).equal


# ---- what differs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "what", "texts"),
    [
        (member("x", mode=0o755), member("x", mode=0o4755), What.MODE, ("0755", "4755")),
        (member("x", uid=0), member("x", uid=1000), What.OWNER, ("0:0", "1000:0")),
        (member("x", gid=0), member("x", gid=5), What.OWNER, ("0:0", "0:5")),
        (
            member("x", type=tarfile.SYMTYPE, linkname="a"),
            member("x", type=tarfile.SYMTYPE, linkname="b"),
            What.TARGET,
            ("a", "b"),
        ),
        (
            member("x", type=tarfile.LNKTYPE, linkname="a"),
            member("x", type=tarfile.SYMTYPE, linkname="a"),
            What.TYPE,
            ("hard link", "symlink"),
        ),
        (
            member("x", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
            member("x", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
            What.TARGET,
            ("1:3", "1:5"),
        ),
        (
            member("x", pax_headers={"SCHILY.xattr.security.capability": "a"}),
            member("x"),
            What.ATTRIBUTES,
            ("security.capability='a'", ""),
        ),
        (member("x"), member("x", type=tarfile.DIRTYPE), What.TYPE, ("file", "directory")),
        # the first of two facets alone
        (member("x", b"1"), member("x", b"2", mode=0o600), What.MODE, ("0644", "0600")),
    ],
)
def test_what_differs_is_named_with_both_sides(
    left: Member, right: Member, what: What, texts: tuple[str, str]
) -> None:
    before, after = member("w", b"before"), member("y", b"after")
    found = compare(engine_20(tar(before, left, after)), engine_20(tar(before, right, after)))
    assert found.first == Difference(0, "RUN 0", "x", what, *texts)
    assert found.paths == 1


@pytest.mark.parametrize("names", ["acd", "abcd", "abd"])
def test_a_path_of_one_image_alone_is_named(names: str) -> None:
    here, there = (engine_20(tar(*map(member, each))) for each in ("abc", names))
    missing = sorted(set("abc") ^ set(names))
    found = compare(here, there)
    assert found.first is not None
    assert (found.first.path, found.first.what) == (missing[0], What.PRESENCE)
    assert (found.first.left == "absent") is (missing[0] not in "abc")
    assert found.paths == len(missing)


def test_the_first_in_the_archives_order_is_named_and_all_are_counted() -> None:
    left = tar(member("c", b"1"), member("b", b"1"), member("a", b"1"))
    right = tar(member("c", b"1"), member("b", b"2"), member("a", b"2"), member("new"))
    found = compare(engine_20(BASE, left), engine_20(tar(), right))
    assert found.first is not None
    assert (found.first.layer, found.first.path) == (0, "etc")
    assert found.paths == 3 + 3
    found = compare(engine_20(left), engine_20(right))
    assert found.first is not None
    assert found.first.path == "b"


def test_another_order_is_a_difference_of_no_path() -> None:
    left, right = (engine_20(tar(*map(member, order))) for order in ("abc", "acb"))
    found = compare(left, right)
    assert found.first == Difference(0, "RUN 0", "b", What.ORDER, "b", "c")
    assert found.paths == 0


def test_a_layer_of_one_image_alone_is_named_with_its_step() -> None:
    extra = tar(member("a"), member("b"))
    found = compare(engine_20(BASE), engine_20(BASE, extra))
    assert found.first == Difference(
        1, "RUN 1", "", What.LAYER, "absent", f"sha256:{sha256(extra)}"
    )
    assert (found.layers, found.same, found.paths) == (2, 1, 2)


def test_owners_names_and_the_dialect_of_tar_are_no_difference() -> None:
    right = tar(member("./a", b"1", uname="root", pax_headers={"comment": "x"}))
    found = compare(engine_20(tar(member("a", b"1"))), engine_20(right))
    assert (found.equal, found.same) == (True, 0)


# ---- times -------------------------------------------------------------------------------------

TIMES = (
    engine_20(tar(member("a", b"1", mtime=1), member("b", b"1", mtime=1.5))),
    engine_20(tar(member("a", b"1", mtime=1), member("b", b"1", mtime=1.25))),
)


def test_times_are_counted_and_no_difference_unless_asked_for() -> None:
    assert compare(*TIMES) == Comparison(layers=1, same=0, first=None, paths=0, times=1, config=())
    found = compare(*TIMES, ignore_times=False)
    assert not found.equal
    assert found.first == Difference(0, "RUN 0", "b", What.TIME, "@1.5", "@1.25")
    assert (found.paths, found.times) == (0, 1)


def test_times_do_not_hide_another_difference() -> None:
    left = engine_20(tar(member("a", mtime=1), member("b", b"1", mtime=1)))
    right = engine_20(tar(member("a", mtime=2), member("b", b"2", mtime=2)))
    found = compare(left, right)
    assert found.first is not None
    assert (found.first.path, found.first.what) == ("b", What.CONTENT)
    assert (found.paths, found.times) == (1, 2)


# ---- the configuration -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Env", ["A=1"]),
        ("User", "1000:1000"),
        ("Entrypoint", ["/bin/sh"]),
        ("Labels", {"io.muster.variant": "cpu"}),
    ],
)
def test_a_configuration_that_differs_is_named_by_its_key(key: str, value: object) -> None:
    found = compare(engine_20(BASE, config={key: value}), engine_20(BASE, config={"Cmd": None}))
    assert found.config == (key,)
    assert found.first is None
    assert not found.equal


def test_what_is_not_set_is_equal_however_it_is_written() -> None:
    left = engine_20(BASE, config={"Env": None, "User": "", "Labels": {}, "Image": "sha256:1"})
    assert compare(left, engine_20(BASE, config={"Image": "sha256:2"})).equal
    assert compare(left, engine_20(BASE)).equal


# ---- how it is read -----------------------------------------------------------------------------


@EVERY_FORMAT
def test_a_layer_that_both_have_by_name_is_read_once(write: Format) -> None:
    archive = write(BASE)
    stored = gzip.compress(BASE, mtime=0) if write is oci_gzip else BASE
    garbage = archive.replace(stored, b"\xff" * len(stored))
    assert len(garbage) == len(archive)
    assert garbage != archive
    assert compare(archive, garbage).same == 1
    with pytest.raises(ArchiveUnreadable):
        compare(garbage, archive)


def plain(content: bytes, **config: object) -> bytes:
    """As other tools write it: a layer's name does not tell what is in it."""
    text = json.loads(configuration([content])) | config
    manifest = json.dumps([{"Config": "config.json", "Layers": ["layer.tar"]}]).encode()
    return tar(
        member("layer.tar", content),
        member("config.json", json.dumps(text).encode()),
        member("manifest.json", manifest),
    )


def test_a_layer_of_the_same_name_alone_is_read() -> None:
    left, right = plain(tar(member("a", b"1"))), plain(tar(member("a", b"2")))
    assert compare(left, left).same == 1
    assert compare(left, right).paths == 1


@pytest.mark.parametrize("history", [None, [], [{"created_by": "RUN 1"}] * 2])
def test_a_history_that_does_not_fit_is_left_out(history: object) -> None:
    left, right = (plain(tar(member(name)), history=history) for name in "ab")
    found = compare(left, right)
    assert found.first == Difference(0, "", "a", What.PRESENCE, "file", "absent")


def test_a_pipe_will_do(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(engine_20(BASE, tar(member("a", b"1" * 5000))))
    with (
        subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as one,
        subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as other,
    ):
        assert one.stdout is not None
        assert other.stdout is not None
        assert layers.compare(one.stdout, other.stdout).same == 2
    assert layers.compare(path, path).same == 2


@pytest.mark.parametrize("size", [1, 511, 10**6])
def test_chunks_of_any_size_will_do(size: int) -> None:
    archive = oci_gzip(BASE, tar(member("a", b"1" * 5000)))
    pieces = [archive[at : at + size] for at in range(0, len(archive), size)]
    pieces.insert(1, b"")
    assert layers.compare(Chunks(iter(pieces)), io.BytesIO(archive)).same == 2


def test_chunks_are_given_out_as_asked_for() -> None:
    chunks = Chunks(iter([b"abc", b"", b"d"]))
    assert [chunks.read(2) for _ in range(5)] == [b"ab", b"c", b"d", b"", b""]


@pytest.mark.parametrize(
    "members",
    [
        [member("big", bytes(32 * 2**20))],
        [member(f"{index}/{'long' * 30}", mtime=0.5) for index in range(8000)],
    ],
    ids=["one large", "many"],
)
def test_contents_and_headers_are_not_held_in_memory(tmp_path: Path, members: list[Member]) -> None:
    path = tmp_path / "image.tar"
    beside = member("beside", b"{" * 32 * 2**20)
    path.write_bytes(engine_20(tar(*members), beside=beside))
    tracemalloc.start()
    try:
        found = layers.compare(path, path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.same == 1
    assert peak < 11 * 2**20


def test_a_name_that_is_no_text_can_be_printed() -> None:
    left, right = (
        engine_20(
            tar(member("caf\udce9", mode=mode, pax_headers={"SCHILY.xattr.user.x": "\udcff"}))
        )
        for mode in (0o644, 0o600)
    )
    found = compare(left, right)
    assert str(found.first) == r"layer 0, caf\udce9: mode 0644, 0600"
    assert str(found.first).encode()
    document = json.loads(json.dumps(found.to_dict()))
    assert document["equal"] is False
    assert document["first"]["what"] == "mode"


# ---- what is no image ----------------------------------------------------------------------------


def manifest_alone(document: object) -> bytes:
    return tar(member("manifest.json", json.dumps(document).encode()))


def zstd_layer() -> bytes:
    return tar(blob(b"\x28\xb5\x2f\xfd rest"), member("manifest.json", b"[]"))


def layer_of_another_config() -> bytes:
    text = configuration([tar(member("other"))])
    manifest = json.dumps([{"Config": "config.json", "Layers": ["layer.tar"]}]).encode()
    return tar(
        member("config.json", text), member("layer.tar", BASE), member("manifest.json", manifest)
    )


def header_broken_in_a_layer() -> bytes:
    """Where tarfile itself ends in silence: the rest of the layer would not be compared."""
    archive = engine_20(tar(member("first", b"1"), member("second", b"2")))
    return archive.replace(b"second\0", b"sekond\0")


def gzip_cut_short() -> bytes:
    cut = gzip.compress(BASE, mtime=0)[:-20]
    return tar(blob(cut), member("index.json", b"{}"))


@pytest.mark.parametrize(
    ("archive", "why"),
    [
        (b"", "empty file"),
        (b"no archive at all" * 100, "invalid header"),
        (engine_20(BASE)[:4096], "unexpected end of data"),
        (tar(member("a", b"1")), "no manifest leads to its layers"),
        (manifest_alone({"Config": 1}), "no manifest leads to its layers"),
        (manifest_alone([]), "it holds 0 images"),
        (manifest_alone([{}, {}]), "it holds 2 images"),
        (tar(member("manifest.json", b"{")), "Expecting property name"),
        (zstd_layer(), "zstd"),
        (layer_of_another_config(), "layer.tar is sha256:.* and should be sha256:"),
        (header_broken_in_a_layer(), "layer.tar is sha256:.* and should be sha256:"),
        (gzip_cut_short(), "ended before"),
    ],
)
def test_what_is_no_image_is_named_with_the_reason(archive: bytes, why: str) -> None:
    with pytest.raises(ArchiveUnreadable, match=why) as caught:
        compare(archive, engine_20(BASE))
    assert "cannot read left as an image" in caught.value.what
    with pytest.raises(ArchiveUnreadable, match="cannot read right as an image"):
        compare(engine_20(BASE), archive)


def test_a_file_is_named_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ArchiveUnreadable, match=r"absent\.tar as an image: No such file"):
        layers.compare(tmp_path / "absent.tar", io.BytesIO())
    (tmp_path / "empty.tar").touch()
    with pytest.raises(ArchiveUnreadable, match=r"empty\.tar as an image: empty file"):
        layers.compare(io.BytesIO(engine_20(BASE)), tmp_path / "empty.tar")
