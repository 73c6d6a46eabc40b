"""A pod of a manifest as containers on the Engine: what is the same, and what cannot be.

What differs is noted, once for all pods: GPUs and devices are left out, ranks are fewer where the
machine is smaller, what only a cluster has (a Secret, a host's folder, a sidecar) is missing.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import psutil

from muster.engine import ContainerSpec, Place, Stage
from muster.manifests import invocation, quantities, workloads
from muster.manifests.documents import Document, mapping, mappings, strings, whole
from muster.manifests.workloads import (
    DEFAULT_GRACE_S,
    FAILURE_COUNTS,
    INDEX_VARIABLE,
    PodGroup,
)
from muster.rehearse import command, notes

SHM: Final = "/dev/shm"
# what a container has that mounts nothing there
CONTAINER_SHM: Final = 64 * 2**20
FAULT_FOLDER: Final = "/muster-fault"
_INDEX_KEY: Final = "batch.kubernetes.io/job-completion-index"
_JOB_INDEX_KEY: Final = "jobset.sigs.k8s.io/job-index"
_POD_INDEX_KEY: Final = "apps.kubernetes.io/pod-index"
# in the place of the five letters that the Job controller adds to a pod's name
_SUFFIX: Final = "xxxxx"


@dataclass(frozen=True, kw_only=True)
class Change:
    """What the rehearsal has otherwise than the manifest: for this machine, or for a fault."""

    image: str | None = None
    nproc_per_node: int | None = None
    join_timeout_s: int | None = None
    shm_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Role:
    """One container of a pod."""

    name: str
    spec: ContainerSpec
    place: Place


@dataclass(frozen=True)
class Cast:
    """The containers of one pod, one after the other: those before, then the one with torchrun."""

    before: tuple[Role, ...]
    trainer: Role
    grace_s: int

    def placed(self, place: Place) -> "Cast":
        """The same with torchrun's container at another place."""
        return replace(self, trainer=replace(self.trainer, place=place))


@dataclass(frozen=True)
class Wardrobe:
    """What the pods of a manifest mount, made once on the Stage; `image` is to make it with."""

    stage: Stage
    documents: Sequence[Document]
    image: str
    made: dict[str, str] = field(default_factory=dict)

    def config_map(self, name: str, namespace: str, source: Mapping[str, Any]) -> str | None:
        """The volume `name` with a ConfigMap's files; None when the manifest does not hold it."""
        key = (namespace, str(source.get("name", "")))
        found = workloads.config_maps(self.documents).get(key)
        if found is None:
            return None
        paths = {
            str(item.get("key")): str(item.get("path")) for item in mappings(source.get("items"))
        }
        chosen = {key: text for key, text in found.items() if not paths or key in paths}
        files = {paths.get(key, key): text.encode() for key, text in chosen.items()}
        return self.volume(f"configmap-{name}", files)

    def empty(self, name: str) -> str:
        """A volume that only the one who asks for it has."""
        return self.volume(f"{name}-{len(self.made)}", {})

    def volume(self, name: str, files: Mapping[str, bytes]) -> str:
        """The volume `name`, the same one for every pod."""
        if name not in self.made:
            self.made[name] = self.stage.volume(name, files, self.image)
        return self.made[name]


@dataclass(frozen=True)
class Tailor:
    """Makes the containers of a group's pods; `notes` collects what is otherwise than there.

    `generation` is how many pods of the same number came before.
    """

    group: PodGroup
    wardrobe: Wardrobe
    change: Change
    notes: dict[str, None]
    generation: int = 0

    def cast(self, index: int) -> Cast:
        """The containers of pod `index`."""
        self._note(*notes.of_pod(self.group))
        before = [each for each in self._initial() if each.get("restartPolicy") != "Always"]
        own = self._own_volumes([*before, self.group.trainer], index)
        grace_s = whole(self.group.template.get("terminationGracePeriodSeconds"), DEFAULT_GRACE_S)
        roles = (self._role(container, index, own) for container in before)
        return Cast(tuple(roles), self._role(self.group.trainer, index, own), grace_s)

    def _initial(self) -> list[dict[str, Any]]:
        return mappings(self.group.template.get("initContainers"))

    def _note(self, *texts: str) -> None:
        self.notes.update(dict.fromkeys(texts))

    def _own_volumes(self, containers: Iterable[Mapping[str, Any]], index: int) -> dict[str, str]:
        """The volumes of this pod alone that one container leaves to another, by their names."""
        mounted = Counter(
            name
            for container in containers
            for name in {
                str(mount.get("name"))
                for mount in mappings(container.get("volumeMounts"))
                if mount.get("mountPath") != SHM
            }
        )
        return {
            name: self.wardrobe.empty(f"pod-{index}-{name}")
            for name, source in self._volumes().items()
            if mounted[name] > 1 and _is_empty(source)
        }

    def _role(self, container: Mapping[str, Any], index: int, own: Mapping[str, str]) -> Role:
        self._note(*notes.of_container(container))
        name = str(container.get("name", ""))
        return Role(name, self._spec(container, index), self._place(container, index, own))

    # ---- what runs ----

    def _spec(self, container: Mapping[str, Any], index: int) -> ContainerSpec:
        values = self._environment(container, index)
        entrypoint, arguments = self._words(container, values)
        rights = self._rights(container)
        return ContainerSpec(
            image=self.change.image or str(container.get("image", "")),
            entrypoint=entrypoint or None,
            command=arguments,
            shm_bytes=self._shm_bytes(container),
            cap_add=tuple(strings(mapping(rights.get("capabilities")).get("add"))),
            user=_user(rights),
            environment=values,
            init=False,
        )

    def _environment(self, container: Mapping[str, Any], index: int) -> dict[str, str]:
        fields, namespace = self._fields(index), self.group.namespace
        maps = workloads.config_maps(self.wardrobe.documents)
        values = workloads.environment(container, namespace, maps, fields)
        self._note(*notes.of_variables(container, values, namespace, maps))
        if INDEX_VARIABLE in fields:
            values.setdefault(INDEX_VARIABLE, fields[INDEX_VARIABLE])
        if container == self.group.trainer:
            own = workloads.environment(container, namespace, maps)
            for name, value in self.group.environment.items():
                if own.get(name) != value:  # Kubeflow's controller sets it
                    values[name] = invocation.substitute(value, values)
        # torchrun tells at this level how the nodes met
        return {**values, "LOGLEVEL": "INFO", **self._changed_variables(values)}

    def _changed_variables(self, values: Mapping[str, str]) -> dict[str, str]:
        """What the change sets. A flag goes before the PET_ variable of its name."""
        changed = dict(self.change.environment)
        if "PYTHONPATH" in changed and "PYTHONPATH" in values:
            changed["PYTHONPATH"] += f":{values['PYTHONPATH']}"
        if self.change.nproc_per_node is not None:
            changed["PET_NPROC_PER_NODE"] = str(self.change.nproc_per_node)
        if self.change.join_timeout_s is not None:
            conf = values.get("PET_RDZV_CONF", "")
            changed["PET_RDZV_CONF"] = command.impatient(conf, self.change.join_timeout_s)
        return changed

    def _fields(self, index: int) -> dict[str, str]:
        """What the downward API and the Job's controller tell a pod."""
        group = self.group
        fields = {
            "metadata.name": self._pod_name(index),
            "metadata.namespace": group.namespace,
            "spec.nodeName": f"rehearsal-{index}",
            # the address is not known before the pod starts, and a name serves as well
            "status.podIP": group.fqdn(index) or group.hostname(index),
        }
        annotations = mapping(group.metadata.get("annotations"))
        if "backoffLimitPerIndex" in group.job:
            counts = dict(zip(FAILURE_COUNTS, (str(self.generation), "0"), strict=True))
            annotations = {**annotations, **counts}
        told: dict[str, dict[str, Any]] = {"labels": {**group.labels}, "annotations": annotations}
        if group.indexed:
            numbers = self._numbers(index)
            told = {where: {**values, **numbers} for where, values in told.items()}
            if _INDEX_KEY in numbers:
                fields[INDEX_VARIABLE] = numbers[_INDEX_KEY]
        for where, values in told.items():
            fields |= {f"metadata.{where}['{key}']": str(value) for key, value in values.items()}
        return fields

    def _numbers(self, index: int) -> dict[str, str]:
        """The labels, and annotations, with the pod's number."""
        if self.group.kind == "StatefulSet":
            return {_POD_INDEX_KEY: str(index)}
        if self.group.pods_per_job is None:
            return {_INDEX_KEY: str(index)}
        job, own = divmod(index, self.group.pods_per_job)
        return {_INDEX_KEY: str(own), _JOB_INDEX_KEY: str(job)}

    def _pod_name(self, index: int) -> str:
        """Not the host name: a Job's controller adds letters that nobody knows before."""
        if self.group.kind == "Pod":
            return self.group.name
        hostname = self.group.hostname(index)
        return f"{hostname}-{_SUFFIX}" if self.group.job and self.group.indexed else hostname

    def _words(
        self, container: Mapping[str, Any], values: Mapping[str, str]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The program and the rest, as the Engine takes them, with what was chosen otherwise."""
        given = {
            key: [invocation.substitute(word, values) for word in strings(container.get(key))]
            for key in ("command", "args")
        }
        words = [*given["command"], *given["args"]]
        if self.change.nproc_per_node is not None:
            words = command.with_ranks(words, self.change.nproc_per_node)
        if self.change.join_timeout_s is not None:
            words = command.with_join_timeout(words, self.change.join_timeout_s)
        # without a command the image's own entrypoint takes the arguments
        own = 1 if given["command"] else 0
        return tuple(words[:own]), tuple(words[own:])

    # ---- where it stands ----

    def _place(self, container: Mapping[str, Any], index: int, own: Mapping[str, str]) -> Place:
        fqdn, hostname = self.group.fqdn(index), self.group.hostname(index)
        rights = self._rights(container)
        tmpfs, volumes = self._mounts(container, own)
        return Place(
            hostname=hostname,
            domain=fqdn.removeprefix(f"{hostname}.") if fqdn else None,
            aliases=aliases(fqdn),
            tmpfs=tuple(tmpfs),
            volumes=volumes,
            memory_bytes=_memory_bytes(container),
            groups=_groups(rights),
            cap_drop=tuple(strings(mapping(rights.get("capabilities")).get("drop"))),
            read_only=rights.get("readOnlyRootFilesystem") is True,
            no_new_privileges=rights.get("allowPrivilegeEscalation") is False,
            working_folder=container.get("workingDir"),
        )

    def _rights(self, container: Mapping[str, Any]) -> dict[str, Any]:
        """The pod's security context, with the container's over it."""
        pod = mapping(self.group.template.get("securityContext"))
        return {**pod, **mapping(container.get("securityContext"))}

    def _volumes(self) -> dict[str, dict[str, Any]]:
        found = mappings(self.group.template.get("volumes"))
        return {str(volume.get("name")): volume for volume in found}

    def _mounts(
        self, container: Mapping[str, Any], own: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """The folders that are empty and this container's alone, and volumes by their folders."""
        empty: list[str] = []
        volumes: dict[str, str] = {}
        for mount in mappings(container.get("volumeMounts")):
            folder, name = str(mount.get("mountPath")), str(mount.get("name"))
            if folder == SHM:
                continue
            if name not in own and _is_empty(self._volumes().get(name, {})):
                empty.append(folder)
                continue
            volume = own.get(name) or self._volume(mount)
            if volume is None:
                self._note(f"{folder} is left out: only a cluster has what is mounted there")
            elif volume in volumes:
                self._note(f"{folder} is left out: its volume is mounted at {volumes[volume]} too")
            else:
                volumes[volume] = folder
        if self.change.files:
            volumes[self.wardrobe.volume("fault", self.change.files)] = FAULT_FOLDER
        return empty, volumes

    def _volume(self, mount: Mapping[str, Any]) -> str | None:
        """The volume with what is mounted from a ConfigMap or a claim."""
        name, part = str(mount.get("name")), str(mount.get("subPath", ""))
        source = self._volumes().get(name, {})
        if "configMap" in source and not part:
            config_map = mapping(source["configMap"])
            return self.wardrobe.config_map(name, self.group.namespace, config_map)
        if "persistentVolumeClaim" in source:
            claim = mapping(source["persistentVolumeClaim"]).get("claimName")
            words = ["claim", str(claim), *re.findall(r"[\w.]+", part)]
            return self.wardrobe.volume("-".join(words), {})
        return None

    def _shm_bytes(self, container: Mapping[str, Any]) -> int:
        """The smaller of the volume's limit and the memory's, which may be all the machine has."""
        if self.change.shm_bytes is not None:
            return self.change.shm_bytes
        sources = self._volumes()
        for mount in mappings(container.get("volumeMounts")):
            if mount.get("mountPath") == SHM:
                volume = mapping(sources.get(str(mount.get("name")), {}).get("emptyDir"))
                limits = [_bytes(volume.get("sizeLimit")), _memory_bytes(container)]
                everything = psutil.virtual_memory().total
                return min([limit for limit in limits if limit], default=everything)
        return CONTAINER_SHM


def aliases(fqdn: str | None) -> tuple[str, ...]:
    """The names that a resolver in the pod's namespace completes to `fqdn`; the bare one is none.

    https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/
    """
    if fqdn is None:
        return ()
    host, service, namespace, *rest = fqdn.split(".")
    short = (f"{host}.{service}", f"{host}.{service}.{namespace}")
    return (*short, f"{short[1]}.{rest[0]}", fqdn)


def _user(rights: Mapping[str, Any]) -> str | None:
    if "runAsUser" not in rights:
        return None
    group = f":{rights['runAsGroup']}" if "runAsGroup" in rights else ""
    return f"{rights['runAsUser']}{group}"


def _groups(rights: Mapping[str, Any]) -> tuple[str, ...]:
    further = rights.get("supplementalGroups")
    groups = [*strings(further), *strings([rights["fsGroup"]] if "fsGroup" in rights else [])]
    return tuple(dict.fromkeys(groups))


def _is_empty(source: Mapping[str, Any]) -> bool:
    """Whether a volume is made with the pod, and goes with it."""
    return "emptyDir" in source or "ephemeral" in source


def _memory_bytes(container: Mapping[str, Any]) -> int | None:
    return _bytes(mapping(mapping(container.get("resources")).get("limits")).get("memory"))


def _bytes(quantity: object) -> int | None:
    found = quantities.parse(str(quantity)) if quantity is not None else None
    return int(found) if found else None
