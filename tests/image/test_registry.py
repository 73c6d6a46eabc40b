"""What the real Engine says of a registry, asked of a small one that runs here."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from muster import lock
from muster.engine import Engine, RegistryUnreachable
from muster.errors import DigestGone
from muster.pins import DigestKind

OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"
MANIFEST = {OCI: f"{OCI}.manifest.v1+json", DOCKER: f"{DOCKER}.distribution.manifest.v2+json"}
INDEX = {OCI: f"{OCI}.index.v1+json", DOCKER: f"{DOCKER}.distribution.manifest.list.v2+json"}
CONFIG = {OCI: f"{OCI}.config.v1+json", DOCKER: f"{DOCKER}.container.image.v1+json"}


class Registry:
    """The read side of a registry: manifests by tag and digest, blobs by digest."""

    def __init__(self) -> None:
        self.content: dict[str, tuple[str, bytes]] = {}
        self.tags: dict[str, str] = {}

    def add(self, media_type: str, document: dict[str, Any], tag: str | None = None) -> str:
        body = json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        self.content[digest] = (media_type, body)
        if tag:
            self.tags[tag] = digest
        return digest

    def manifest(self, dialect: str, architecture: str, tag: str | None = None) -> str:
        rootfs = {"type": "layers", "diff_ids": list[str]()}
        config = {"architecture": architecture, "os": "linux", "config": {}, "rootfs": rootfs}
        digest = self.add(CONFIG[dialect], config)
        described = self.descriptor(digest)
        document = {"schemaVersion": 2, "mediaType": MANIFEST[dialect], "config": described}
        return self.add(MANIFEST[dialect], {**document, "layers": []}, tag)

    def index(self, dialect: str, tag: str) -> str:
        manifests = [
            {
                **self.descriptor(self.manifest(dialect, architecture)),
                "platform": {"architecture": architecture, "os": "linux"},
            }
            for architecture in ("amd64", "arm64")
        ]
        document = {"schemaVersion": 2, "mediaType": INDEX[dialect], "manifests": manifests}
        return self.add(INDEX[dialect], document, tag)

    def descriptor(self, digest: str) -> dict[str, Any]:
        media_type, body = self.content[digest]
        return {"mediaType": media_type, "digest": digest, "size": len(body)}


class Handler(BaseHTTPRequestHandler):
    registry: Registry

    def do_GET(self) -> None:
        *_, kind, name = self.path.split("/")
        digest = self.registry.tags.get(name, name)
        if kind in ("manifests", "blobs") and digest in self.registry.content:
            self.answer(200, *self.registry.content[digest], digest)
        elif self.path == "/v2/":
            self.answer(200, "application/json", b"{}")
        else:
            errors = [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]
            self.answer(404, "application/json", json.dumps({"errors": errors}).encode())

    do_HEAD = do_GET  # noqa: N815  the handler's own spelling

    def answer(self, status: int, media_type: str, body: bytes, digest: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its own name
        """Nothing: the tests' output is theirs."""


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def host(registry: Registry) -> Iterator[str]:
    """Where `registry` answers, until the test ends; Docker takes it without TLS on 127.0.0.1."""
    handler = type("Answering", (Handler,), {"registry": registry})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("dialect", [OCI, DOCKER])
def test_the_list_of_all_architectures_is_an_index(
    engine: Engine, registry: Registry, host: str, dialect: str
) -> None:
    digest = registry.index(dialect, "slim")
    found = engine.registry_digest(f"{host}/debian:slim")
    assert found == (digest, INDEX[dialect], ("amd64", "arm64"))
    assert lock.digest_kind("debian", *found) is DigestKind.INDEX


@pytest.mark.parametrize("kind", [DigestKind.AMD64, DigestKind.ARM64])
def test_one_manifest_is_its_architecture(
    engine: Engine, registry: Registry, host: str, kind: DigestKind
) -> None:
    digest = registry.manifest(DOCKER, kind.value, "slim")
    found = engine.registry_digest(f"{host}/debian:slim")
    assert found == (digest, MANIFEST[DOCKER], (kind.value,))
    assert lock.digest_kind("debian", *found) is kind


def test_a_tag_that_the_registry_lacks_is_gone(engine: Engine, host: str) -> None:
    with pytest.raises(DigestGone, match=f"{host}/debian:slim"):
        engine.registry_digest(f"{host}/debian:slim")


def test_a_registry_that_does_not_answer_is_unreachable(engine: Engine) -> None:
    with pytest.raises(RegistryUnreachable, match="connection refused"):
        engine.registry_digest("127.0.0.1:9/debian:slim")
