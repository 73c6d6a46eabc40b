"""Results for people and machines: the terminal's table, JSON, JUnit."""

import errno
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster import size
from muster.errors import CannotWrite, DiskFull
from muster.finding import Finding, Outcome, Severity, Verdict
from muster.finding import verdict as verdict_of
from muster.page.words import line, plain
from muster.portrait import portrait
from muster.standings import named, standings
from muster.summary import summary
from muster.tables import bare

if TYPE_CHECKING:
    # what is reported is made elsewhere: its modules need not be loaded to print something else
    from muster import image, layers
    from muster import lock as lock_
    from muster import verify as verify_
    from muster.bisect.bisection import Result as Bisected
    from muster.compare import Comparison
    from muster.doctor.examine import Result as Examined
    from muster.dossier import Dossier
    from muster.explain.explanation import Explanation
    from muster.fabric import Fabric
    from muster.manifests.spec import Spec
    from muster.proofs import Proof
    from muster.rehearse.rehearsal import Result as Played
    from muster.steps import Step

# https://www.w3.org/TR/xml/#charsets
_NOT_XML = re.compile("[^\\t\\n\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")

_STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.NOT_APPLICABLE: "dim",
    Outcome.NOT_RUN: "yellow",
    Severity.ERROR: "bold red",
    Severity.WARNING: "yellow",
    Verdict.READY: "bold green",
    Verdict.NOT_READY: "bold red",
}


def build(result: "image.Result") -> str:
    """The reference, id, size and time in one line."""
    found = result.image
    state = "built" if result.built else "up to date"
    identity = found.id.removeprefix("sha256:")[:12]
    return f"{found.ref} {identity} {size.decimal(found.size)}, {state} in {result.seconds:.1f} s"


def largest(facts: Mapping[str, Any], count: int = 8) -> RenderableType:
    """The largest wheels of an image, as they are in it after trimming and stripping."""
    table = bare("largest parts", "unpacked")
    for name, part in list(facts["parts"].items())[:count]:
        table.add_row(Text(name), size.decimal(part))
    return table


def rehearsal(result: "Played") -> RenderableType:
    """The pods in every try, the Findings, the notes and the verdict."""
    table = bare("pod", "try", "node", "ranks", "exit", "seconds")
    for pod in result.pods:
        table.add_row(
            pod.name,
            str(pod.generation + 1),
            "" if pod.group_rank is None else str(pod.group_rank),
            ", ".join(map(str, pod.ranks)),
            "" if pod.exit_code is None else str(pod.exit_code),
            f"{pod.seconds:.1f}",
        )
    notes = [Text(f"note: {note}", style="dim") for note in result.notes]
    return _closing(Group(table, *notes), result.findings, result.verdict)


def findings(found: Iterable[Finding]) -> RenderableType:
    """Each Finding with its evidence, cause and remedy."""
    return Group(*map(_finding, found))


def explanation(found: "Explanation") -> RenderableType:
    """The picture of the job, the Findings, what was left unread, and on the last line the sum."""
    parts: list[RenderableType] = [portrait(found.picture), Text()]
    parts += map(_finding, found.findings)
    parts += [Text(f"note: {note}", style="dim") for note in found.notes]
    errors = sum(each.severity is Severity.ERROR for each in found.findings)
    warnings = len(found.findings) - errors
    told = f"{errors} faults found" if errors != 1 else "1 fault found"
    if not errors:
        told = "nothing wrong found" if not warnings else "no fault found"
    told += f", {warnings} to look at" if warnings else ""
    style = _STYLES[Verdict.NOT_READY if errors else Verdict.READY]
    return Group(*parts, Text(f"{told} in {found.lines} lines", style))


def bisection(result: "Bisected") -> RenderableType:
    """What the first run's log says, the layers at fault, how to repeat it; the sum comes last."""
    found = result.conclusion
    parts: list[RenderableType] = [Text()]
    if not result.runs.first.passed:
        parts += map(_finding, result.runs.first.explained.findings)
    for blame in found.blames:
        helped = ", ".join(trial.change.name for trial in blame.helped)
        parts.append(Text(f"at fault: {blame.layer.name}", _STYLES[Severity.ERROR]))
        told = {
            "passes": f"{helped}{f' (NCCL {blame.layer.since}+)' if blame.layer.since else ''}",
            "proves": blame.layer.proves,
            "leaves open": blame.layer.leaves_open,
            "to decide": blame.layer.decide,
        }
        parts += [_grid(told), Text()]
    if found.beside:
        parts.append(Text(f"goes around it, and passes too: {', '.join(found.beside)}"))
    parts += [Text(f"note: {text}", style="dim") for text in (*found.says, *result.reminders)]
    if not result.runs.first.passed:
        parts += [Text("\nto repeat it:"), *(Text(f"  {line}") for line in result.lines)]
    if result.logs is not None:
        parts.append(Text(f"logs: {result.logs}"))
    style = _STYLES[Verdict.READY if result.passes else Verdict.NOT_READY]
    return Group(*parts, Text(found.outcome, style))


def rendered(target: str, spec: "Spec") -> str:
    """What was written, and what the cluster must admit."""
    fabric = spec.fabric
    return (
        f"{target}: {spec.kind}, {spec.nnodes} nodes with {spec.nproc_per_node} ranks on"
        f" {fabric.name}; needs Pod Security level {fabric.pod_security}\n"
        f"next: ./invokew rehearse {target}, then kubectl apply -f {target}"
    )


def lint(command: str, file: str, found: Iterable[Finding]) -> dict[str, Any]:
    listed = [each.to_dict() for each in found]
    return {"schema": 1, "command": command, "file": file, "findings": listed}


def fabrics(known: "Iterable[Fabric]") -> RenderableType:
    """One row a fabric: the GPUs of a node, the level it needs, the network that NCCL must name."""
    table = bare("fabric", "GPUs", "Pod Security", "NCCL says", "is")
    for each in known:
        gpus = str(each.gpus_per_node or "any")
        words = (each.name, gpus, each.pod_security, each.using_network[0], each.summary)
        table.add_row(*map(Text, words))
    return table


def fabric(known: "Fabric") -> dict[str, Any]:
    """A fabric as JSON."""
    return {
        "name": known.name,
        "summary": known.summary,
        "network": known.network,
        "pod_security": known.pod_security,
        "gpus_per_node": known.gpus_per_node,
        "busbw_floor_gb_s": known.busbw_floor_gb_s,
        "using_network": list(known.using_network),
        "environment": dict(known.environment),
        "docker": asdict(known.docker),
        "sources": list(known.sources),
    }


def comparison(found: "layers.Comparison") -> str:
    """What the comparison of two images came to; the first difference on a line of its own."""
    same = f"{found.layers} layers, {found.same} of them the very same"
    lines = [f"{same}; {found.paths} paths differ, {found.times} in their time alone"]
    if found.first is not None:
        lines.append(f"first difference: {found.first}")
    if found.config:
        lines.append(f"the configuration differs in {', '.join(found.config)}")
    return "\n".join([*lines, "equal" if found.equal else "not equal"])


def smoke(dossier: "Dossier") -> RenderableType:
    """The steps, what else the run tells, the Findings; the verdict stands alone at the end."""
    table = bare("step", "outcome", "seconds", "measure")
    for step in dossier.steps:
        ran = step.outcome is not Outcome.NOT_RUN
        table.add_row(
            Text(line(step.name)),
            Text(step.outcome, _STYLES[step.outcome]),
            Text(f"{step.seconds:.1f}" if ran else "", justify="right"),
            Text(line(step.measure)),
        )
    beside = (Group(Text(), part) for part in summary(dossier))
    return _closing(Group(table, *beside), dossier.findings, dossier.verdict)


def compare(found: "Comparison") -> RenderableType:
    """The nodes by rank, what differs, the Findings, and on the last line who is odd."""
    parts = [Group(Text(), part) for part in standings(found)]
    odd = tuple(dict.fromkeys(each.where for each in found.findings))
    told = Text(
        f"odd: {named(odd)}" if odd else "no node is odd", _STYLES[verdict_of(found.findings)]
    )
    return Group(*parts, Text(), *map(_finding, found.findings), told)


def verify(result: "verify_.Result") -> RenderableType:
    """The table of proofs, the Findings, and the verdict alone on the last line."""
    table = bare("proof", "outcome", "evidence")
    for proof in result.proofs:
        table.add_row(proof.name, Text(proof.outcome, _STYLES[proof.outcome]), Text(_first(proof)))
    return _closing(table, result.findings, result.verdict)


def doctor(result: "Examined") -> RenderableType:
    """The table of checks, the Findings, and the verdict alone on the last line."""
    table = bare("check", "outcome", "measure")
    for each in result.examinations:
        table.add_row(each.name, Text(each.outcome, _STYLES[each.outcome]), Text(each.measure))
    return _closing(table, result.findings, result.verdict)


def proved(result: "verify_.Result") -> str:
    """The proofs that a build ends with, in one line."""
    outcomes = Counter(proof.outcome for proof in result.proofs)
    counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    return f"verified in {result.seconds:.1f} s: of {len(result.proofs)} proofs {counted}"


def lock(result: "lock_.Result") -> RenderableType:
    """The table of pins that are behind, what stays and why, and on the last line what was done."""
    table = bare("what", "where", "from", "to")
    for move in result.moves:
        table.add_row(move.what, move.where, _short(move.before), _short(move.after))
    parts: list[RenderableType] = [table, Text()] if result.moves else []
    parts += [Text(f"stays as it is: {note.part}: {note.why}") for note in result.kept]
    for note in result.unreached:
        where = (f"not reached: {note.part}", "bold red")
        parts.append(Text.assemble(where, f": {note.why}"))
    done = f"{len(result.moves)} written" if result.written else "nothing written"
    state = f"{len(result.moves)} behind" if result.moves or result.unreached else "current"
    if result.unreached:
        state += f", {len(result.unreached)} not reached"
    return Group(*parts, Text(f"{state}: {done}"))


def _short(text: str) -> str:
    """Hashes as git shortens them; they stand in full in the files and in --json."""
    return re.sub(r"([0-9a-f]{12})[0-9a-f]{28,52}", r"\1", text)


def _first(proof: "Proof") -> str:
    """A failed proof's evidence stands in its Finding: here its first line will do."""
    return proof.evidence.partition("\n")[0]


def _closing(
    table: RenderableType, findings: Iterable[Finding], verdict: Verdict
) -> RenderableType:
    word = Text(verdict, _STYLES[verdict])
    return Group(Text(), table, Text(), *(_finding(each) for each in findings), word)


def _finding(finding: Finding) -> RenderableType:
    """Of any text only what a terminal shows: it may come from a log, or from another machine."""
    where, what = plain(finding.where), plain(finding.what)
    heading = Text.assemble((finding.severity, _STYLES[finding.severity]), f" in {where}: {what}")
    told = {name: plain(getattr(finding, name)) for name in ("evidence", "cause", "remedy")}
    return Group(heading, _grid(told), Text())


def _grid(told: Mapping[str, str]) -> Table:
    """A name and what is told of it in each row."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", style="dim", min_width=10)
    grid.add_column(overflow="fold")
    for name, text in told.items():
        grid.add_row(name, Text(text))
    return grid


def junit(dossier: "Dossier") -> bytes:
    """The steps as JUnit XML, the dialect that pytest writes and CI systems read."""
    suite = ET.Element("testsuite", name="muster smoke", time=f"{dossier.seconds:.3f}")
    for step in dossier.steps:
        suite.append(_testcase(step))
    # what the run itself found, a refused GPU for one, is no step's: it gets a case of its own
    of_steps = {each for step in dossier.steps for each in step.findings}
    for each in dossier.findings:
        if each.severity is Severity.ERROR and each not in of_steps:
            case = ET.SubElement(suite, "testcase", classname="smoke", name=each.where)
            ET.SubElement(case, "failure", message=_xml(each.what)).text = _xml(_plain(each))
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    root = ET.Element("testsuites")
    root.append(suite)
    xml: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return xml


def _testcase(step: "Step") -> ET.Element:
    case = ET.Element("testcase", classname="smoke", name=step.name, time=f"{step.seconds:.3f}")
    if step.outcome is Outcome.NOT_APPLICABLE:
        ET.SubElement(case, "skipped", message=_xml(step.measure))
    if step.outcome is Outcome.NOT_RUN:
        ET.SubElement(case, "skipped", message=_xml(f"not run: {step.measure}"))
    if step.outcome is Outcome.FAILED:
        what = "; ".join(each.what for each in step.findings)
        failure = ET.SubElement(case, "failure", message=_xml(what))
        failure.text = _xml("\n".join(_plain(each) for each in step.findings))
    if step.output:
        ET.SubElement(case, "system-out").text = _xml(step.output)
    return case


def _plain(finding: Finding) -> str:
    return "\n".join(f"{name}: {text}" for name, text in finding.to_dict().items())


def _xml(text: str) -> str:
    """`text` without the characters that no XML may hold, as terminals' colours are made of."""
    return _NOT_XML.sub("\ufffd", text)


def check_writable(path: Path) -> None:
    """That write() will work, said before the work starts rather than after it."""
    if path.is_dir():
        raise CannotWrite(path, "it is a folder")
    if not path.parent.is_dir():
        raise CannotWrite(path, f"there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise CannotWrite(path, "permission denied")


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    write(path, (json.dumps(document, indent=2) + "\n").encode())


def write(path: Path, content: bytes) -> None:
    """Write the whole file or none of it; a device, such as /dev/stdout, as it comes."""
    if path.is_char_device() or path.is_fifo():
        path.write_bytes(content)
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskFull(str(path.parent), str(error)) from error
        raise CannotWrite(path, error.strerror or str(error)) from error
    finally:
        unfinished.unlink(missing_ok=True)
