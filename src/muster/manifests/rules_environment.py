"""The variables of containers, as Kubernetes makes them of a manifest."""

import re
from collections.abc import Iterator
from typing import Final

from muster.finding import Finding, warning
from muster.manifests.documents import mappings
from muster.manifests.rules import Manifest, Rule, all_containers

_SHELL_VARIABLE: Final = re.compile(r"\$(\w+|\{\w+[^}]*\})")


def env_twice(manifest: Manifest) -> Iterator[Finding]:
    for group in manifest.groups:
        for path, container in all_containers(group):
            first: dict[str, int] = {}
            for index, entry in enumerate(mappings(container.get("env"))):
                name = str(entry.get("name", ""))
                if name in first:
                    line = group.document.line(*path, "env", first[name])
                    yield warning(
                        group.document.where(*path, "env", index),
                        f"the variable {name} is given twice",
                        evidence=f"lines {line} and {group.document.line(*path, 'env', index)}",
                        cause="the last one counts, and kubectl apply may lose one of the two when"
                        " it merges",
                        remedy="keep one",
                    )
                first.setdefault(name, index)


def env_shell(manifest: Manifest) -> Iterator[Finding]:
    """$NAME in a value, which nobody expands."""
    for group in manifest.groups:
        for path, container in all_containers(group):
            for index, entry in enumerate(mappings(container.get("env"))):
                match = _SHELL_VARIABLE.search(str(entry.get("value", "")))
                if match is not None:
                    bare = re.match(r"\w+", match[1].strip("{}"))
                    assert bare is not None
                    yield warning(
                        group.document.where(*path, "env", index, "value"),
                        f"{match[0]} in the value of {entry.get('name')} stays as it is",
                        evidence=f"{entry.get('name')}: {entry.get('value')}",
                        cause="Kubernetes expands $(NAME) in values, from variables above it in"
                        " the same list, and neither $NAME nor ${NAME}",
                        remedy=f"write $({bare[0]}), or set the variable in the container's"
                        " command",
                    )


def env_order(manifest: Manifest) -> Iterator[Finding]:
    """$(NAME) of a variable that is not above it."""
    for group in manifest.groups:
        for path, container in all_containers(group):
            if container.get("envFrom"):
                continue
            seen: set[str] = set()
            for index, entry in enumerate(mappings(container.get("env"))):
                value = str(entry.get("value", ""))
                for name in re.findall(r"(?<!\$)\$\(([A-Za-z_]\w*)\)", value):
                    if name not in seen:
                        yield warning(
                            group.document.where(*path, "env", index, "value"),
                            f"$({name}) in the value of {entry.get('name')} stays as it is",
                            evidence=f"{entry.get('name')}: {value}",
                            cause="Kubernetes knows only the variables above it in the list, not"
                            " those of the image or below",
                            remedy=f"put {name} above {entry.get('name')}, or give its value",
                        )
                seen.add(str(entry.get("name", "")))


RULES: Final = (
    Rule("env-twice", env_twice),
    Rule("env-shell", env_shell),
    Rule("env-order", env_order),
)
