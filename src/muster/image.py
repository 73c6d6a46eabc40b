"""The image of a variant: its base, its build, and whether a build is needed at all."""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from muster import __version__, bootstrap, buildkit, cache, context, pins, wheelhouse
from muster.context import Checkout
from muster.engine import Engine, Image, RegistryUnreachable
from muster.errors import BaseNotFound, BuildFailed, DigestGone, EngineLost, WrongArchitecture
from muster.pins import Variant, Wheel
from muster.progress import Progress

SCHEMA = 1

LABEL_BASE = "io.muster.base"
LABEL_INPUTS = "io.muster.inputs"
LABEL_RECIPE = "io.muster.recipe"
LABEL_VARIANT = "io.muster.variant"


class Origin(StrEnum):
    """Where the base came from; the label io.muster.base says it."""

    REGISTRY = "registry"
    MMDEBSTRAP = "mmdebstrap"
    GIVEN = "given"


@dataclass(frozen=True)
class Base:
    """The image to build on, as this Engine holds it."""

    ref: str
    id: str
    origin: Origin


@dataclass(frozen=True)
class Request:
    """What to build. `base` overrides the pinned one; `offline` asks no index for wheels."""

    variant: Variant
    wheels: tuple[Wheel, ...]
    base: str | None = None
    offline: bool = False


@dataclass(frozen=True)
class Result:
    """What `build` ended with. `seconds` from its start, `built` False when nothing was to do."""

    image: Image
    built: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "command": "build", **asdict(self)}


def build(
    engine: Engine,
    checkout: Checkout,
    request: Request,
    confirm: Callable[[str], bool],
    progress: Progress,
) -> Result:
    """Build what is requested unless an image of the same inputs is there; tagged last of all."""
    started = time.monotonic()
    variant = request.variant
    if engine.architecture != pins.ARCHITECTURE:
        raise WrongArchitecture(engine.architecture, pins.ARCHITECTURE)
    given = None if request.base is None else _given(engine, request.base)
    pinned_base = f"{variant.base.ref} {bootstrap.recipe(checkout.docker)}"
    inputs = context.fingerprint(checkout, variant, given.id if given else pinned_base)
    with context.lock(variant, progress):
        image = before = engine.image(variant.image_ref)
        built = image is None or image.labels.get(LABEL_INPUTS) != inputs
        if built:
            client = buildkit.find_client(engine.address.client_flags, engine.address.builder)
            files = wheels(request, progress)
            ground = given or _base(engine, checkout, variant, confirm, progress)
            facts = _facts(request, ground)
            with context.staged(checkout, variant, files.values(), facts) as folder:
                _build(engine, client, _order(folder, variant, ground, inputs), progress)
            image = engine.image(variant.image_ref)
            if before is not None:
                engine.discard(before)
    if image is None:
        raise EngineLost("the build", f"{variant.image_ref} is not on it after the build")
    return Result(image, built, round(time.monotonic() - started, 3))


def wheels(request: Request, progress: Progress) -> Mapping[Wheel, Path]:
    """The files of the request's wheels, fetched into the wheelhouse where they were missing."""
    house = wheelhouse.Wheelhouse(cache.folder() / "wheels")
    target = wheelhouse.Target(request.variant.base.python)
    return house.fetch(request.wheels, target, request.offline, progress)


def _build(
    engine: Engine, client: buildkit.Client, order: buildkit.Build, progress: Progress
) -> None:
    try:
        buildkit.build(client, order, progress)
    except BuildFailed as error:
        if not engine.answers():
            raise EngineLost("the build", error.what.splitlines()[-1].strip()) from None
        raise


def _order(folder: Path, variant: Variant, ground: Base, inputs: str) -> buildkit.Build:
    return buildkit.Build(
        context=folder,
        dockerfile=folder / "Dockerfile",
        ref=variant.image_ref,
        args={"BASE": ground.ref},
        labels=_labels(variant, ground, inputs),
    )


def _labels(variant: Variant, ground: Base, inputs: str) -> dict[str, str]:
    """OCI's own labels (https://specs.opencontainers.org/image-spec/annotations/) and ours."""
    labels = {
        "org.opencontainers.image.title": f"muster {variant.name}",
        "org.opencontainers.image.description": f"torch {variant.torch} for torchrun",
        "org.opencontainers.image.version": __version__,
        "org.opencontainers.image.base.name": variant.base.image,
        LABEL_VARIANT: variant.name,
        LABEL_BASE: ground.origin.value,
        LABEL_INPUTS: inputs,
    }
    if ground.origin is Origin.REGISTRY:
        labels["org.opencontainers.image.base.digest"] = variant.base.digest
    if ground.origin is Origin.GIVEN:
        labels["org.opencontainers.image.base.name"] = ground.ref
    return labels


# ---- the base ----------------------------------------------------------------------------------


def _given(engine: Engine, ref: str) -> Base:
    """The base that the user names: on the Engine, or pulled."""
    image = engine.image(ref)
    if image is None:
        try:
            engine.pull(ref)
        except (RegistryUnreachable, DigestGone) as error:
            raise BaseNotFound(ref, error.what) from error
        image = engine.image(ref)
        assert image is not None
    return Base(ref, image.id, Origin.GIVEN)


def _base(
    engine: Engine,
    checkout: Checkout,
    variant: Variant,
    confirm: Callable[[str], bool],
    progress: Progress,
) -> Base:
    """The pinned base, from its registry or, when that is out of reach, from Debian's packages."""
    ref = variant.base.ref
    if engine.image(ref) is None:
        progress.detail(f"pulling {ref}")
        try:
            engine.pull(ref)
        except RegistryUnreachable as error:
            progress.say(f"{error.what}")
            return _bootstrapped(engine, checkout, variant.base.suite, confirm, progress)
    image = engine.image(ref)
    assert image is not None
    return Base(ref, image.id, Origin.REGISTRY)


def _bootstrapped(
    engine: Engine,
    checkout: Checkout,
    suite: str,
    confirm: Callable[[str], bool],
    progress: Progress,
) -> Base:
    ref = f"muster-base:{suite}"
    recipe = bootstrap.recipe(checkout.docker)
    image = engine.image(ref)
    if image is None or image.labels.get(LABEL_RECIPE) != recipe:
        with tempfile.TemporaryDirectory(prefix="muster-base-") as folder:
            tar = Path(folder) / f"{suite}.tar"
            bootstrap.make(suite, checkout.docker, tar, confirm, progress)
            labels = {LABEL_BASE: Origin.MMDEBSTRAP.value, LABEL_RECIPE: recipe}
            engine.import_image(tar, ref, labels)
        image = engine.image(ref)
        assert image is not None
    progress.say(f"base: {ref}, made by mmdebstrap")
    return Base(ref, image.id, Origin.MMDEBSTRAP)


def _facts(request: Request, ground: Base) -> dict[str, Any]:
    """What the bill of materials says and the image cannot."""
    return {
        "variant": request.variant.name,
        "torch": request.variant.torch,
        "nccl": request.variant.nccl,
        "base": {"ref": ground.ref, "id": ground.id, "origin": ground.origin.value},
        "wheels": [asdict(wheel) for wheel in request.wheels],
    }
