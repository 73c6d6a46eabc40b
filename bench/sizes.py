"""cu13 and its slim image beside a plain `pip install` of the same wheels: size and build time.

    ./invokew bench

The wheels are in the wheelhouse before the clock starts, and nccl-tests are left out everywhere.
"cold" has no layer and no file of the context on the Engine; the plain container gets the wheels by
a mount, and its time ends with the commit that makes an image of it. Muster's times are of the
build alone: neither the command's own start nor the proofs after it are in them. Everything made
here goes again, what the Engine keeps in its own build cache apart.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.image import Bench, Quiet, Row, call, copied, found, seconds, told

from muster import cache, image, size
from muster.pins import NcclTests

ROW = "cu13"
# no repository has it: nccl-tests are counted apart
NO_NCCL_TESTS = NcclTests("none", "0" * 40, "/nonexistent")

PLAIN_INSTALL = """
set -eu
apt-get update
apt-get install --yes --no-install-recommends python3
python3 -m venv --without-pip /opt/venv
pip=$(echo /wheels/pip-*.whl)
/opt/venv/bin/python "$pip/pip" install --no-index --find-links /wheels --no-deps \
    --require-hashes --requirement /lock.txt --root-user-action ignore
"""
# where both have their wheels
SITE = "/opt/venv/lib/python{}/site-packages"


@dataclass(frozen=True)
class Measured:
    """One image; `compressed` is None without zstd, the build times in seconds."""

    ref: str
    unpacked: int
    compressed: int | None
    triton: int
    triton_compressed: int | None
    layers: int
    cold: float
    warm: float | None


def muster_bench(checkout: Path, *, slim: bool, undo: contextlib.ExitStack) -> Bench:
    """cu13 under a name of its own, so that neither the image of that name nor a cache is met."""
    bench = Bench(checkout, ROW)
    variant = replace(bench.variant, name=f"{ROW}-bench-{uuid.uuid4().hex[:8]}")
    bench.request = replace(bench.request, variant=variant, slim=slim, offline=True)
    bench.pins = replace(bench.pins, nccl_tests=NO_NCCL_TESTS)
    undo.callback((cache.folder() / f"{variant.name}.lock").unlink, missing_ok=True)
    undo.callback(forget, bench, "rmi", bench.request.ref)
    return bench


def forget(bench: Bench, *words: str) -> None:
    """Remove something that may not have come to be."""
    subprocess.run([*bench.docker, *words], capture_output=True, check=False)


def built(bench: Bench) -> Measured:
    bench.freshen()
    cold = seconds(bench.build)
    warm = seconds(bench.build)
    return measured(bench, bench.request.ref, cold, warm)


def plain(bench: Bench, undo: contextlib.ExitStack) -> Measured:
    """The container of a plain install, committed; there is no cache that a second could use."""
    name = ref = f"muster-bench-{uuid.uuid4().hex[:8]}"
    wheels = next(iter(image.fetch_wheels(bench.request, bench.request.wheels, Quiet()).values()))
    undo.callback(forget, bench, "rmi", ref)
    undo.callback(forget, bench, "rm", "--force", name)
    install = [
        *(*bench.docker, "run", "--name", name, "--volume", f"{wheels.parent}:/wheels:ro"),
        *("--volume", f"{bench.variant.lock_path}:/lock.txt:ro", bench.base_ref()),
        *("sh", "-c", PLAIN_INSTALL),
    ]
    cold = seconds(lambda: call(install)) + seconds(
        lambda: call([*bench.docker, "commit", name, ref])
    )
    return measured(bench, ref, cold, None)


# ---- sizes --------------------------------------------------------------------------------------


def measured(bench: Bench, ref: str, cold: float, warm: float | None) -> Measured:
    triton = SITE.format(bench.variant.base.python) + "/triton"
    run = [*bench.docker, "run", "--rm", "--entrypoint"]
    there = f"if [ -d {triton} ]; then {{}}; else {{}}; fi"
    used = output([*run, "sh", ref, "-c", there.format(f"du -sb {triton}", "echo 0")])
    packed = [*run, "sh", ref, "-c", there.format(f"tar -cf - {triton}", ":")]
    return Measured(
        ref=ref,
        unpacked=found(bench.engine, ref).size,
        compressed=compressed([*bench.docker, "save", ref]),
        triton=int(used.split()[0]),
        triton_compressed=compressed(packed),
        layers=len(layer_ids(bench, ref)),
        cold=cold,
        warm=warm,
    )


def output(argv: Sequence[str]) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def compressed(argv: Sequence[str]) -> int | None:
    """Bytes of what `argv` prints in zstd -3; None where there is no zstd."""
    zstd = shutil.which("zstd")
    if zstd is None:
        return None
    pack = [zstd, "-3", "-T0"]
    counted = 0
    with (
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as source,
        subprocess.Popen(pack, stdin=source.stdout, stdout=subprocess.PIPE) as packer,
    ):
        assert source.stdout is not None
        assert packer.stdout is not None
        source.stdout.close()
        while chunk := packer.stdout.read(2**20):
            counted += len(chunk)
    if source.returncode or packer.returncode:
        raise subprocess.CalledProcessError(source.returncode or packer.returncode, argv)
    return counted


def layer_ids(bench: Bench, ref: str) -> list[str]:
    inspected: list[str] = json.loads(
        output([*bench.docker, "image", "inspect", "--format", "{{json .RootFS.Layers}}", ref])
    )
    return inspected


def pulled_again(bench: Bench) -> int:
    """Bytes of the layers that a node which has the image lacks after a change of train/."""
    before = set(layer_ids(bench, bench.request.ref))
    bench.change_script()
    bench.build()
    after = layer_ids(bench, bench.request.ref)
    return sum(
        count
        for layer, count in zip(after, layer_sizes(bench, bench.request.ref), strict=True)
        if layer not in before
    )


def layer_sizes(bench: Bench, ref: str) -> list[int]:
    """Each layer's bytes as a tar, in order, from what `docker save` writes."""
    sizes: dict[str, int] = {}
    manifest: list[dict[str, Any]] = []
    with (
        subprocess.Popen([*bench.docker, "save", ref], stdout=subprocess.PIPE) as saved,
        tarfile.open(fileobj=saved.stdout, mode="r|", bufsize=2**20) as archive,
    ):
        for member in archive:
            # the second of two equal layers is a link to the first
            sizes[member.name] = member.size
            if member.name == "manifest.json" and (file := archive.extractfile(member)):
                manifest = json.load(file)
    return [sizes[name] for name in manifest[0]["Layers"]]


# ---- the table ----------------------------------------------------------------------------------


def rows(plainly: Measured, cu13: Measured, slim: Measured, pulled: int) -> list[Row]:
    images = (plainly, cu13, slim)
    unpacked = [each.unpacked - each.triton for each in images]
    packed = [less(each.compressed, each.triton_compressed) for each in images]
    ratios = [each.cold / plainly.cold for each in (cu13, slim)]
    return [
        Row(("unpacked", *(size.decimal(each.unpacked) for each in images))),
        Row(
            ("without triton", *map(size.decimal, unpacked)),
            "4.6 and 3.1 GB",
            unpacked[1] <= 4.6e9 and unpacked[2] <= 3.1e9,
        ),
        Row(("saved, zstd -3", *(decimal(each.compressed) for each in images))),
        Row(
            ("without triton", *map(decimal, packed)),
            "cu13 2.6 GB",
            None if packed[1] is None else packed[1] <= 2.6e9,
        ),
        Row(("layers", *(str(each.layers) for each in images))),
        Row(("cold build", *(f"{each.cold:.1f} s" for each in images))),
        Row(
            ("cold, beside plain", "", *map("{:.2f}".format, ratios)), "cu13 1.2", ratios[0] <= 1.2
        ),
        Row(("warm build", *(f"{each.warm:.2f} s" if each.warm else "none" for each in images))),
        Row(
            ("pulled on a change", "", f"{pulled / 1e3:.0f} KB", ""),
            "100 KB",
            pulled < 100e3,
        ),
    ]


def less(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or part is None else whole - part


def decimal(count: int | None) -> str:
    return "not measured: no zstd" if count is None else size.decimal(count)


def main() -> int:
    # as Ctrl-C does: what was made goes on the way out
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with copied() as copy, contextlib.ExitStack() as undo:
        whole = muster_bench(copy, slim=False, undo=undo)
        cu13 = built(whole)
        # before the slim one changes the Dockerfile that both are built from
        pulled = pulled_again(whole)
        plainly = plain(whole, undo)
        slim = built(muster_bench(copy, slim=True, undo=undo))
    return told(("what", "plain pip install", "cu13", "slim"), rows(plainly, cu13, slim, pulled))


if __name__ == "__main__":
    sys.exit(main())
