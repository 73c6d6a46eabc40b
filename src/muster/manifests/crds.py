"""JSON Schemas of JobSet and TrainJob, made of the models of kubeflow-trainer-api.

`python -m muster.manifests.crds` writes crds.json anew: to import the models takes longer than all
the rest of a lint. What is Kubernetes's own in them refers to Kubernetes's schemas.
"""

import importlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from muster.manifests import schema

_KINDS: Final = {
    "jobset.x-k8s.io/v1alpha2": {"JobSet": "JobsetV1alpha2JobSet"},
    "trainer.kubeflow.org/v1alpha1": {
        "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
        "TrainJob": "TrainerV1alpha1TrainJob",
        "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    },
}
# A CRD holds the fields of the Kubernetes that it was made with: a newer one's are unknown to it.
# Of these types the models' fields bind too; deeper ones rarely grow.
_BOTH: Final = {
    "IoK8sApiBatchV1JobTemplateSpec",
    "IoK8sApiBatchV1JobSpec",
    "IoK8sApiCoreV1PodTemplateSpec",
    "IoK8sApiCoreV1PodSpec",
}
# required of the stored object, and filled in by the controller's webhook where it is left out
# https://github.com/kubernetes-sigs/jobset/blob/main/pkg/webhooks/jobset_webhook.go
_DEFAULTED: Final = {"JobsetV1alpha2FailurePolicyRule": {"name"}}


def made(kubernetes: Collection[str]) -> dict[str, Any]:
    """The schema of each kind and of what it holds; `kubernetes` names Kubernetes's own types."""
    models = importlib.import_module("kubeflow_trainer_api.models")
    json_schema = importlib.import_module("pydantic.json_schema")
    wanted = [
        (getattr(models, model), "validation")
        for kinds in _KINDS.values()
        for model in kinds.values()
    ]
    _, whole = json_schema.models_json_schema(wanted, ref_template="{model}")
    translation = _Translation(kubernetes)
    kinds = {
        version: {kind: translation.reference(model) for kind, model in of.items()}
        for version, of in _KINDS.items()
    }
    return {"kinds": kinds, "$defs": dict(translation.definitions(whole["$defs"]))}


class _Translation:
    """Pydantic's schemas to those of crds.json."""

    def __init__(self, kubernetes: Collection[str]) -> None:
        self._own = {re.sub(r"\W", "", name).lower(): name for name in kubernetes}

    def definitions(self, models: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for model, pydantic in models.items():
            if model in _BOTH:
                yield model, self._both(pydantic, self._own[model.lower()])
            elif model.lower() not in self._own:
                found = self._plain(pydantic)
                required = [
                    field
                    for field in found.get("required", ())
                    if field not in _DEFAULTED.get(model, ())
                ]
                yield model, {**found, "required": required}

    def reference(self, model: str) -> str:
        name = self._own.get(model.lower())
        if name is None or model in _BOTH:
            return f"#/$defs/{model}"
        return f"{schema.DEFINITIONS}#/$defs/{name}"

    def _plain(self, pydantic: Mapping[str, Any]) -> dict[str, Any]:
        """Without titles, descriptions and null, which is the same as absent."""
        choices = [each for each in pydantic.get("anyOf", []) if each != {"type": "null"}]
        if choices:
            (pydantic,) = choices
        if "$ref" in pydantic:
            return {"$ref": self.reference(pydantic["$ref"])}
        found: dict[str, Any] = {
            key: pydantic[key] for key in ("type", "required") if key in pydantic
        }
        for key in ("items", "additionalProperties"):
            if isinstance(pydantic.get(key), dict):
                found[key] = self._plain(pydantic[key])
        if "properties" in pydantic:
            found["properties"] = self._fields(pydantic)
            found["additionalProperties"] = False
        return found

    def _both(self, pydantic: Mapping[str, Any], name: str) -> dict[str, Any]:
        """The model's fields, each as Kubernetes's own type has it."""
        fields = {
            key: field if field.get("$ref", "").startswith("#") else True
            for key, field in self._fields(pydantic).items()
        }
        kubernetes = f"{schema.DEFINITIONS}#/$defs/{name}"
        return {"$ref": kubernetes, "properties": fields, "additionalProperties": False}

    def _fields(self, pydantic: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {key: self._plain(value) for key, value in pydantic["properties"].items()}


def text(schemas: dict[str, Any]) -> str:
    return json.dumps(schemas, indent=1, sort_keys=True) + "\n"


def write() -> None:
    newest = schema.definitions(schema.VERSIONS[-1])
    schema.CRDS.write_text(text(made(newest["$defs"])))


if __name__ == "__main__":
    write()
