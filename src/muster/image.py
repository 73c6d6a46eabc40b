"""The image of a variant: its base, its build, and whether a build is needed at all."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from muster import (
    __version__,
    bootstrap,
    buildkit,
    cache,
    context,
    nccl_tests,
    pins,
    wheelhouse,
)
from muster.context import Checkout
from muster.engine import Engine, Image, RegistryUnreachable
from muster.errors import (
    BaseNotFound,
    BuildFailed,
    DigestGone,
    EngineLost,
    NcclTestsUnreachable,
    NotArchitectures,
    WrongArchitecture,
)
from muster.pins import NcclTests, Pins, Variant, Wheel
from muster.progress import Progress

SCHEMA = 1

LABEL_BASE = "io.muster.base"
LABEL_GROUND = "io.muster.ground"
LABEL_INPUTS = "io.muster.inputs"
LABEL_RECIPE = "io.muster.recipe"
LABEL_NCCL_TESTS = "io.muster.nccl-tests"
LABEL_SLIM = "io.muster.slim"
LABEL_VARIANT = pins.LABEL_VARIANT

# the label's value where the source of nccl-tests could not be had
MISSING = "missing"


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
    """What to build.

    `base` overrides the pinned one; `offline` asks no index and no repository; `slim` leaves out
    torch.compile; `archs` overrides the pinned architectures of nccl-tests, and
    `nccl_tests_source` names a folder that has the source. On a GPU node that source is a must.
    `no_cache` runs every step again, also when nothing changed.
    """

    variant: Variant
    wheels: tuple[Wheel, ...]
    base: str | None = None
    offline: bool = False
    slim: bool = False
    archs: tuple[int, ...] = ()
    nccl_tests_source: Path | None = None
    on_gpu_node: bool = False
    no_cache: bool = False

    @property
    def ref(self) -> str:
        return f"{self.variant.image_ref}-slim" if self.slim else self.variant.image_ref


@dataclass(frozen=True)
class Result:
    """What `build` ended with. `seconds` from its start, `built` False when nothing was to do.

    `same_ground`: nothing but train/ and the suite changed, so the proofs of before still hold.
    """

    image: Image
    built: bool
    same_ground: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "command": "build", **asdict(self)}


def archs(text: str | None) -> tuple[int, ...]:
    """The compute capabilities in `text` ("80,90"); empty, for the pinned ones, without a text."""
    if text is None:
        return ()
    numbers = text.split(",")
    if not all(number.isascii() and number.isdigit() and len(number) < 4 for number in numbers):
        raise NotArchitectures(text)
    return tuple(sorted({int(number) for number in numbers}))


def build(
    engine: Engine,
    checkout: Checkout,
    pinned: Pins,
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
    ground_id = given.id if given else f"{variant.base.ref} {bootstrap.recipe(checkout.docker)}"
    wishes = f"{ground_id} {pinned.nccl_tests} {request.archs} {request.slim}"
    inputs = context.fingerprint(checkout, variant, wishes)
    ground_inputs = context.fingerprint(checkout, variant, wishes, without=("train/", "smoke/"))
    with context.lock(variant, progress):
        image = before = engine.image(request.ref)
        current = image is not None and image.labels.get(LABEL_INPUTS) == inputs
        built = request.no_cache or not current
        source = None
        if built or (image and image.labels.get(LABEL_NCCL_TESTS) == MISSING):
            source = _nccl_tests(pinned.nccl_tests, request, progress)
            built = built or source is not None
        if built:
            client = buildkit.find_client(engine.address.client_flags, engine.address.builder)
            contents = _contents(pinned, request, source, progress)
            ground = given or _base(engine, checkout, variant, confirm, progress)
            plan = _Plan(
                request, pinned.nccl_tests, ground, inputs, ground_inputs, source is not None
            )
            with context.staged(checkout, variant, contents, plan.facts(checkout)) as folder:
                _build(engine, client, plan.order(folder), progress)
            image = engine.image(request.ref)
            if before is not None:
                engine.discard(before)
    if image is None:
        raise EngineLost("the build", f"{request.ref} is not on it after the build")
    same_ground = (
        not request.no_cache
        and before is not None
        and all(
            before.labels.get(name) == image.labels.get(name)
            for name in (LABEL_GROUND, LABEL_BASE, LABEL_NCCL_TESTS)
        )
    )
    return Result(image, built, same_ground, round(time.monotonic() - started, 3))


def _nccl_tests(pin: NcclTests, request: Request, progress: Progress) -> Path | None:
    """The git directory with the source of nccl-tests; None where the variant has none.

    Where it cannot be had, a node with a GPU stops here: its suite would lack a step. Elsewhere
    the image is built without, and says so.
    """
    if not request.variant.nvcc_lock_path.is_file():
        return None
    try:
        return nccl_tests.fetch(pin, request.nccl_tests_source, request.offline, progress)
    except NcclTestsUnreachable as error:
        if request.on_gpu_node:
            raise
        progress.say(f"WITHOUT nccl-tests: {error.what}")
        return None


def _contents(
    pinned: Pins, request: Request, source: Path | None, progress: Progress
) -> context.Contents:
    wheels = tuple(fetch_wheels(request, request.wheels, progress).values())
    nvcc: tuple[Path, ...] = ()
    if source is not None:
        lock = pins.read_wheels(request.variant.nvcc_lock_path)
        nvcc = tuple(fetch_wheels(request, lock, progress).values())
    return context.Contents(wheels, nvcc, source, pinned.nccl_tests.commit)


def fetch_wheels(
    request: Request, wheels: Sequence[Wheel], progress: Progress
) -> Mapping[Wheel, Path]:
    """The files of `wheels`, fetched into the wheelhouse where they were missing."""
    house = wheelhouse.Wheelhouse(cache.folder() / "wheels")
    target = wheelhouse.Target(request.variant.base.python)
    return house.fetch(wheels, target, request.offline, progress)


def _build(
    engine: Engine, client: buildkit.Client, order: buildkit.Build, progress: Progress
) -> None:
    try:
        buildkit.build(client, order, progress)
    except BuildFailed as error:
        if not engine.answers():
            raise EngineLost("the build", error.what.splitlines()[-1].strip()) from None
        raise


@dataclass(frozen=True)
class _Plan:
    """One build that is decided on: what the client, the labels and the bill of materials say."""

    request: Request
    pin: NcclTests
    ground: Base
    inputs: str
    ground_inputs: str
    with_nccl_tests: bool

    @property
    def archs(self) -> tuple[int, ...]:
        cuda = self.request.variant.cuda
        return self.request.archs or (cuda.archs if cuda else ())

    def order(self, folder: Path) -> buildkit.Build:
        variant = self.request.variant
        args = {
            "BASE": self.ground.ref,
            "ACCELERATOR": variant.accelerator.value,
            "NCCL_TESTS": variant.cuda.nvcc if variant.cuda and self.with_nccl_tests else "none",
            "ARCHS": " ".join(map(str, self.archs)),
            "SLIM": str(int(self.request.slim)),
            "REQUIRE_CUDA": variant.cuda.require_cuda if variant.cuda else "",
        }
        return buildkit.Build(
            context=folder,
            dockerfile=folder / "Dockerfile",
            ref=self.request.ref,
            args=args,
            labels=self.labels(),
            no_cache=self.request.no_cache,
        )

    def labels(self) -> dict[str, str]:
        """OCI's labels (https://specs.opencontainers.org/image-spec/annotations/) and ours."""
        variant, ground = self.request.variant, self.ground
        labels = {
            "org.opencontainers.image.title": f"muster {variant.name}",
            "org.opencontainers.image.description": f"torch {variant.torch} for torchrun",
            "org.opencontainers.image.version": __version__,
            "org.opencontainers.image.base.name": variant.base.image,
            LABEL_VARIANT: variant.name,
            LABEL_BASE: ground.origin.value,
            LABEL_INPUTS: self.inputs,
            LABEL_GROUND: self.ground_inputs,
            LABEL_NCCL_TESTS: self._nccl_tests_label(),
        }
        if self.request.slim:
            labels[LABEL_SLIM] = "without torch.compile"
        if ground.origin is Origin.REGISTRY:
            labels["org.opencontainers.image.base.digest"] = variant.base.digest
        if ground.origin is Origin.GIVEN:
            labels["org.opencontainers.image.base.name"] = ground.ref
        return labels

    def _nccl_tests_label(self) -> str:
        if self.with_nccl_tests:
            return self.pin.tag
        return MISSING if self.request.variant.nvcc_lock_path.is_file() else "none"

    def facts(self, checkout: Checkout) -> dict[str, Any]:
        """What the bill of materials says and the image cannot."""
        variant = self.request.variant
        facts: dict[str, Any] = {
            "variant": variant.name,
            "torch": variant.torch,
            "nccl": variant.cuda.nccl if variant.cuda else None,
            "slim": self.request.slim,
            "base": {
                "ref": self.ground.ref,
                "id": self.ground.id,
                "origin": self.ground.origin.value,
            },
            "wheels": [asdict(wheel) for wheel in self.request.wheels],
            "trimmed": [*checkout.globs("trim.txt"), "**/*.a"],
            "stripped": checkout.globs("strip.txt"),
        }
        if self.request.slim:
            facts["trimmed"] += checkout.globs("trim-slim.txt")
        if self.with_nccl_tests:
            facts["nccl_tests"] = {"version": self.pin.tag, "commit": self.pin.commit}
        return facts


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
