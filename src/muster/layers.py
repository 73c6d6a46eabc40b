"""Two images layer by layer: whether they hold the same, and the first thing that differs.

Reads what `docker save` writes in one pass, so that a pipe will do: contents are hashed as they
go by and never kept. Both formats are known, that of Engine 20.10 (layer.tar) and OCI's (blobs,
plain or gzip), https://github.com/opencontainers/image-spec/blob/main/image-layout.md.
"""

import gzip
import hashlib
import io
import json
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar, cast

from muster.errors import ArchiveUnreadable

SCHEMA = 1

_Each = TypeVar("_Each")

# what a container gets; the rest of a configuration says when and from what it was made
CONFIG = (
    *("Env", "User", "Entrypoint", "Cmd", "WorkingDir", "Labels", "ExposedPorts", "Volumes"),
    *("StopSignal", "Healthcheck", "Shell", "OnBuild"),
)

_CHUNK = 2**20
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
# manifests and configurations; what is larger and no layer is nothing that we look for
_LARGEST_JSON = 16 * 2**20
_NAMES_ITS_CONTENT = re.compile(r"(^|/)[0-9a-f]{64}(/|\.|$)")
_XATTR = "SCHILY.xattr."
# what BuildKit marks its attestations with, which look like images beside the image
_REFERENCE_TYPE = "vnd.docker.reference.type"
_TYPES = {
    tarfile.DIRTYPE: "directory",
    tarfile.SYMTYPE: "symlink",
    tarfile.LNKTYPE: "hard link",
    tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device",
    tarfile.FIFOTYPE: "fifo",
}


class Readable(Protocol):
    """A stream of bytes; it need not seek."""

    def read(self, size: int, /) -> bytes: ...


class Chunks:
    """Chunks, as an Engine sends them, read like a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        while not self._rest and (chunk := next(self._chunks, None)) is not None:
            self._rest = chunk
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


class What(StrEnum):
    """What differs. Of one path the first in this order is named."""

    LAYER = "layer"
    PRESENCE = "presence"
    TYPE = "type"
    MODE = "mode"
    OWNER = "owner"
    TARGET = "target"
    ATTRIBUTES = "extended attributes"
    CONTENT = "content"
    TIME = "time"
    ORDER = "order"


# neither says that a path holds something else
_NO_PATH = {What.LAYER, What.TIME, What.ORDER}


@dataclass(frozen=True)
class Difference:
    """`layer` counts from 0, `created_by` is its step; `path` is empty where the layer lacks."""

    layer: int
    created_by: str
    path: str
    what: What
    left: str
    right: str

    def __str__(self) -> str:
        where = f"layer {self.layer}, {self.path or self.created_by}"
        return f"{where}: {self.what} {self.left}, {self.right}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `compare` found.

    Of `layers`, `same` have equal digests: their members were not looked at. `paths` differ in
    more than their time, `times` in their time; `config` names the keys that differ.
    """

    layers: int
    same: int
    first: Difference | None
    paths: int
    times: int
    config: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.first is None and not self.config

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "equal": self.equal, **asdict(self)}


def compare(
    left: Path | Readable, right: Path | Readable, *, ignore_times: bool = True
) -> Comparison:
    """Compare two archives, the left one read whole before the right one is begun.

    Times count for `equal` and `first` unless ignored, as Engine 20.10 can only write its own.
    Owners' names and the dialect of tar do not count: no Engine looks at them.
    """
    ours = _read(left, "left", {})
    theirs = _read(right, "right", ours.blobs)
    first: Difference | None = None
    same = paths = times = 0
    layers = max(len(ours.layers), len(theirs.layers))
    for index in range(layers):
        pair = [image.layers[index : index + 1] for image in (ours, theirs)]
        if all(pair) and pair[0][0].digest == pair[1][0].digest:
            same += 1
            continue
        for difference in _differences(index, *pair):
            times += difference.what is What.TIME
            paths += difference.what not in _NO_PATH
            if first is None and not (ignore_times and difference.what is What.TIME):
                first = difference
    config = _config_differences(ours.config, theirs.config)
    return Comparison(
        layers=layers, same=same, first=first, paths=paths, times=times, config=config
    )


# ---- what is compared --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """A member of a layer. `target` is a link's or a device's numbers."""

    path: str
    type: str
    mode: int
    uid: int
    gid: int
    target: str
    attributes: tuple[tuple[str, str], ...]
    sha256: str
    mtime: float

    def facets(self) -> dict[What, str]:
        return {
            What.TYPE: self.type,
            What.MODE: f"{self.mode:04o}",
            What.OWNER: f"{self.uid}:{self.gid}",
            What.TARGET: self.target,
            What.ATTRIBUTES: " ".join(f"{name}={value!a}" for name, value in self.attributes),
            What.CONTENT: f"sha256:{self.sha256}" if self.sha256 else "",
            What.TIME: f"@{self.mtime}",
        }


@dataclass(frozen=True)
class _Blob:
    """A layer's members, and the digest of its tar when it is not compressed."""

    digest: str
    entries: tuple[_Entry, ...]


@dataclass(frozen=True)
class _Layer:
    digest: str
    created_by: str
    entries: tuple[_Entry, ...]


@dataclass(frozen=True)
class _Image:
    """An image as its archive tells it; `blobs` by their names in that archive."""

    config: Mapping[str, Any]
    layers: tuple[_Layer, ...]
    blobs: Mapping[str, _Blob]


def _differences(
    index: int, left: Sequence[_Layer], right: Sequence[_Layer]
) -> Iterator[Difference]:
    """What differs between two layers, either of which may be missing."""
    created_by = next((layer.created_by for layer in (*left, *right) if layer.created_by), "")
    if not (left and right):
        digests = (side[0].digest if side else "absent" for side in (left, right))
        yield Difference(index, created_by, "", What.LAYER, *digests)
    sides = (tuple(each for layer in side for each in layer.entries) for side in (left, right))
    for path, what, *texts in _between(*sides):
        ours, theirs = map(_printable, texts)
        yield Difference(index, created_by, _printable(path), what, ours, theirs)


def _between(
    left: Sequence[_Entry], right: Sequence[_Entry]
) -> Iterator[tuple[str, What, str, str]]:
    """Paths in the order in which either layer comes to them first; their order itself last."""
    ours, theirs = ({entry.path: entry for entry in side} for side in (left, right))
    places: dict[str, int] = {}
    for side in (left, right):
        for place, entry in enumerate(side):
            places[entry.path] = min(place, places.get(entry.path, place))
    for path in sorted(places, key=places.__getitem__):
        for what, *texts in _of_path(ours.get(path), theirs.get(path)):
            yield path, what, texts[0], texts[1]
    common = ours.keys() & theirs.keys()
    orders = ([entry.path for entry in side if entry.path in common] for side in (left, right))
    for here, there in zip(*orders, strict=False):
        if here != there:
            yield here, What.ORDER, here, there
            return


def _of_path(left: _Entry | None, right: _Entry | None) -> Iterator[tuple[What, str, str]]:
    """The first facet that differs, and apart from it the time."""
    if left is None or right is None:
        here, there = (entry.type if entry else "absent" for entry in (left, right))
        yield What.PRESENCE, here, there
        return
    if left == right:
        return
    ours, theirs = left.facets(), right.facets()
    for what in [what for what in ours if what is not What.TIME and ours[what] != theirs[what]][:1]:
        yield what, ours[what], theirs[what]
    if left.mtime != right.mtime:
        yield What.TIME, ours[What.TIME], theirs[What.TIME]


def _printable(text: str) -> str:
    """A file's name may be no text at all: tarfile keeps its bytes as lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def _config_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[str, ...]:
    # an Engine writes null, an empty value or nothing at all for what was not set
    return tuple(name for name in CONFIG if (left.get(name) or None) != (right.get(name) or None))


# ---- reading an archive ------------------------------------------------------------------------


def _read(source: Path | Readable, name: str, known: Mapping[str, _Blob]) -> _Image:
    """The image in `source`; blobs that `known` has by the same name are passed over."""
    if isinstance(source, Path):
        try:
            stream = source.open("rb")
        except OSError as error:
            raise ArchiveUnreadable(str(source), error.strerror or str(error)) from error
        with stream:
            return _read(stream, str(source), known)
    archive = _Archive(known)
    try:
        archive.read(source)
        return archive.image()
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise ArchiveUnreadable(name, str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ArchiveUnreadable(name, f"no manifest leads to its layers ({error!r})") from error


@dataclass
class _Archive:
    """What is found in an archive, in whatever order it comes there: the manifest may be last."""

    known: Mapping[str, _Blob]
    blobs: dict[str, _Blob] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def read(self, source: Readable) -> None:
        for member, content in _members(source):
            name = member.name
            if member.issym():
                # Engine 20.10 writes the second of two equal layers as a link to the first
                target = posixpath.join(posixpath.dirname(name), member.linkname)
                self.links[name] = posixpath.normpath(target)
            elif content is None:
                continue
            elif name in self.known and _NAMES_ITS_CONTENT.search(name):
                self.blobs[name] = self.known[name]
            elif _is_layer(content.peek(tarfile.BLOCKSIZE)[: tarfile.BLOCKSIZE]):
                self.blobs[name] = _read_layer(name, content)
            elif member.size <= _LARGEST_JSON:
                self.texts[name] = content.read()

    def image(self) -> _Image:
        """The one image of the archive, each of its layers being what its configuration says."""
        config, names = self._docker() if "manifest.json" in self.texts else self._oci()
        digests: list[str] = config["rootfs"]["diff_ids"]
        steps = [
            str(step.get("created_by", ""))
            for step in config.get("history") or ()
            if not step.get("empty_layer")
        ]
        if len(steps) != len(digests):
            steps = [""] * len(digests)
        layers = []
        for name, digest, step in zip(names, digests, steps, strict=True):
            blob = self.blobs[self.links.get(name, name)]
            if blob.digest != digest:
                raise ValueError(f"{name} is {blob.digest} and should be {digest}")
            layers.append(_Layer(digest, step, blob.entries))
        return _Image(config.get("config") or {}, tuple(layers), self.blobs)

    def _docker(self) -> tuple[dict[str, Any], list[str]]:
        """The configuration and the layers' names, as `docker save` lists them."""
        manifests: list[dict[str, Any]] = json.loads(self.texts["manifest.json"])
        manifest = _only(manifests)
        return self._json(manifest["Config"]), manifest["Layers"]

    def _oci(self) -> tuple[dict[str, Any], list[str]]:
        """The same from an OCI layout alone, whose index may hold another and attestations."""
        document = self._json("index.json")
        while "manifests" in document:
            images = [
                each["digest"]
                for each in document["manifests"]
                if _REFERENCE_TYPE not in (each.get("annotations") or {})
            ]
            document = self._json(_blob_name(_only(images)))
        layers = [_blob_name(layer["digest"]) for layer in document["layers"]]
        return self._json(_blob_name(document["config"]["digest"])), layers

    def _json(self, name: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.texts[name])
        return document


def _only(images: Sequence[_Each]) -> _Each:
    if len(images) != 1:
        raise ValueError(f"it holds {len(images)} images")
    return images[0]


def _blob_name(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _is_layer(head: bytes) -> bool:
    """Whether a file begins as a tar does, an empty one being zeros, or as a compressed one."""
    return head[257:262] == b"ustar" or head.startswith((b"\0", _GZIP, _ZSTD))


def _read_layer(name: str, content: io.BufferedReader) -> _Blob:
    head = content.peek(len(_ZSTD))
    if head.startswith(_ZSTD):
        raise ValueError(f"{name} is compressed by zstd, which is not read here")
    zipped = head.startswith(_GZIP)
    hashed = _Hashed(gzip.GzipFile(fileobj=content) if zipped else content)
    entries = tuple(_entry(*each) for each in _members(hashed))
    return _Blob(f"sha256:{hashed.finish()}", entries)


def _entry(member: tarfile.TarInfo, content: io.BufferedReader | None) -> _Entry:
    device = member.type in (tarfile.CHRTYPE, tarfile.BLKTYPE)
    return _Entry(
        path=member.name.removeprefix("./"),
        type=_TYPES.get(member.type, "file"),
        mode=member.mode & 0o7777,
        uid=member.uid,
        gid=member.gid,
        target=f"{member.devmajor}:{member.devminor}" if device else member.linkname,
        attributes=tuple(
            sorted(
                (name.removeprefix(_XATTR), value)
                for name, value in member.pax_headers.items()
                if name.startswith(_XATTR)
            )
        ),
        sha256=hashlib.file_digest(content, "sha256").hexdigest() if content else "",
        mtime=member.mtime,
    )


def _members(stream: Readable) -> Iterator[tuple[tarfile.TarInfo, io.BufferedReader | None]]:
    """Each member of a tar, with its content if it is a file: to be read before the next."""
    # a stream's tar only ever calls read
    file = cast("IO[bytes]", stream)
    with tarfile.open(fileobj=file, mode="r|", bufsize=_CHUNK) as tar:
        while (member := tar.next()) is not None:
            content = tar.extractfile(member) if member.isreg() else None
            assert content is None or isinstance(content, io.BufferedReader)
            yield member, content
            # tarfile would keep them all
            tar.members.clear()  # type: ignore[attr-defined]  # typeshed does not know it


class _Hashed:
    """A stream that hashes what is read from it."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()

    def read(self, size: int, /) -> bytes:
        chunk = self._stream.read(size)
        self._digest.update(chunk)
        return chunk

    def finish(self) -> str:
        """The hash of the whole, also of what no reader asked for."""
        while self.read(_CHUNK):
            pass
        return self._digest.hexdigest()
