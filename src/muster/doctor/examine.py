"""Every check over the facts of a node: what was seen, what was found, the verdict."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from muster.doctor import checks_gpus, checks_hcas, checks_host, checks_job, checks_links
from muster.doctor.check import Check, Seen, seen
from muster.doctor.facts import Facts
from muster.doctor.look import look
from muster.finding import Finding, Outcome, Verdict, verdict, warning

# in the order in which a job meets them
CHECKS: tuple[Check, ...] = (
    checks_gpus.driver,
    checks_gpus.gpus,
    checks_gpus.xid,
    checks_gpus.mig,
    checks_gpus.persistence,
    checks_gpus.topology,
    checks_gpus.fabric_manager,
    checks_gpus.acs,
    checks_gpus.iommu,
    checks_gpus.container_toolkit,
    checks_gpus.gpu_processes,
    checks_host.shm,
    checks_host.locked_memory,
    checks_host.open_files,
    checks_host.processes,
    checks_host.control_group,
    checks_host.numa,
    checks_host.hugepages,
    checks_host.clock,
    checks_links.interfaces,
    checks_links.speed,
    checks_links.subnets,
    checks_links.nccl_interface,
    checks_links.gloo_interface,
    checks_hcas.hcas,
    checks_hcas.verbs_files,
    checks_hcas.nccl_hca,
    checks_hcas.gids,
    checks_hcas.roce_mtu,
    checks_hcas.gpudirect,
    checks_hcas.affinity,
    checks_job.master_addr,
    checks_job.master_port,
    checks_job.held_ports,
    checks_job.ranks,
    checks_job.visible_devices,
    checks_job.leftover_shm,
    checks_job.debug_switches,
    checks_job.nccl_conf,
)


@dataclass(frozen=True)
class Examination:
    """One check's outcome. `measure` is what it saw, or why it does not apply."""

    name: str
    outcome: Outcome
    measure: str
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        findings = [each.to_dict() for each in self.findings]
        return {
            "name": self.name,
            "outcome": self.outcome,
            "measure": self.measure,
            "findings": findings,
        }


@dataclass(frozen=True)
class Result:
    """A node's examinations; `seconds` is what the look took."""

    facts: Facts
    examinations: tuple[Examination, ...]
    seconds: float

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for each in self.examinations for finding in each.findings)

    @property
    def verdict(self) -> Verdict:
        return verdict(self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "command": "doctor",
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "checks": [each.to_dict() for each in self.examinations],
            "findings": [each.to_dict() for each in self.findings],
            "facts": self.facts.to_dict(),
        }


def doctor() -> Result:
    """This machine, looked at and judged."""
    started = time.monotonic()
    facts = look()
    return Result(facts, examine(facts), time.monotonic() - started)


def examine(facts: Facts, checks: Iterable[Check] = CHECKS) -> tuple[Examination, ...]:
    """What each of `checks` makes of the facts."""
    return tuple(_examination(check, facts) for check in checks)


def _examination(check: Check, facts: Facts) -> Examination:
    name = check.__name__
    try:
        found = check(facts)
    except Exception as error:  # noqa: BLE001  a machine may be odd in ways that nobody foresaw
        found = _broke_off(name, error)
    return Examination(name, found.outcome, found.measure, found.findings)


def _broke_off(name: str, error: Exception) -> Seen:
    evidence = f"{type(error).__name__}: {error}"
    finding = warning(
        what=f"the check {name} itself broke off",
        where=name,
        evidence=evidence,
        cause="not known: the check did not foresee this machine",
        remedy="keep the facts (--json FILE): they hold what the check was given",
    )
    return seen(evidence, [finding])
