import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import fabric
from muster.errors import ManifestUnreadable, NoTorchrun, UnknownKubernetes
from muster.explain import catalogue
from muster.fabric import Fabric
from muster.finding import Finding, Severity
from muster.manifests import documents, lint

FABRICS = Path(__file__).parents[2] / "k8s/fabrics"
DIGEST = "sha256:" + "0" * 64

# a job as one may write it by hand: a shell says which pod holds the store
C10D = f"""\
apiVersion: v1
kind: Service
metadata:
  name: demo
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: demo
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: demo
spec:
  podSelector:
    matchLabels:
      batch.kubernetes.io/job-name: demo
  policyTypes:
  - Ingress
  - Egress
  ingress:
  - from:
    - podSelector:
        matchLabels:
          batch.kubernetes.io/job-name: demo
  egress:
  - to:
    - podSelector:
        matchExpressions:
        - {{key: batch.kubernetes.io/job-name, operator: In, values: [demo]}}
  - ports:
    - {{port: 53, protocol: UDP}}
    - {{port: 53, protocol: TCP}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: checkpoint
spec:
  accessModes:
  - ReadWriteMany
  resources:
    requests:
      storage: 1Ti
---
apiVersion: batch/v1
kind: Job
metadata:
  name: demo
spec:
  completionMode: Indexed
  completions: 4
  parallelism: 4
  activeDeadlineSeconds: 86400
  backoffLimitPerIndex: 3
  maxFailedIndexes: 0
  podReplacementPolicy: Failed
  podFailurePolicy:
    rules:
    - action: Ignore
      onPodConditions:
      - type: DisruptionTarget
        status: "True"
    - action: FailJob
      onExitCodes:
        containerName: train
        operator: In
        values: [137]
  template:
    metadata:
      labels:
        app: demo
    spec:
      subdomain: demo
      restartPolicy: Never
      terminationGracePeriodSeconds: 120
      automountServiceAccountToken: false
      enableServiceLinks: false
      containers:
      - name: train
        image: example.org/train@{DIGEST}
        command:
        - sh
        - -c
        - |
          exec torchrun \\
            --nnodes=4 \\
            --nproc-per-node=8 \\
            --rdzv-backend=c10d \\
            --rdzv-endpoint=demo-0.demo.default.svc.cluster.local:29400 \\
            --rdzv-conf is_host=$([ $JOB_COMPLETION_INDEX = 0 ] && echo true || echo false),read_timeout=900,join_timeout=1800 \\
            --rdzv-id=demo \\
            train.py --lr 1e-4
        env:
        - name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE
          value: "1"
        - name: NCCL_SOCKET_IFNAME
          value: eth0
        - name: POD
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        - name: NAME
          value: $(POD)-$(NCCL_SOCKET_IFNAME)
        ports:
        - name: rdzv
          containerPort: 29400
        resources:
          limits:
            nvidia.com/gpu: 8
            memory: 256Gi
          requests:
            cpu: 500m
            memory: 256Gi
        securityContext:
          capabilities:
            drop: [ALL]
        volumeMounts:
        - name: dshm
          mountPath: /dev/shm
        - name: checkpoint
          mountPath: /checkpoint
      volumes:
      - name: dshm
        emptyDir:
          medium: Memory
          sizeLimit: 64Gi
      - name: checkpoint
        persistentVolumeClaim:
          claimName: checkpoint
"""  # noqa: E501 # as long as such lines are

# a JobSet, whose controller makes the Service and restarts all pods together
STATIC = f"""\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: demo
spec:
  failurePolicy:
    maxRestarts: 3
    rules:
    - name: any
      action: RestartJobSet
  successPolicy:
    operator: All
  replicatedJobs:
  - name: node
    replicas: 1
    template:
      spec:
        backoffLimit: 0
        completions: 2
        parallelism: 2
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 90
            automountServiceAccountToken: false
            enableServiceLinks: false
            containers:
            - name: train
              image: example.org/train@{DIGEST}
              command: [torchrun]
              args:
              - --nnodes=2
              - --nproc-per-node=1
              - --node-rank=$(JOB_COMPLETION_INDEX)
              - --master-addr=$(MASTER_ADDR)
              - --master-port=29500
              - train.py
              env:
              - name: MASTER_ADDR
                value: demo-node-0-0.demo
"""

# two pods, written out, that Muster's launcher starts
PODS = "\n---\n".join(
    [
        """\
apiVersion: v1
kind: Service
metadata: {name: pair, namespace: ml}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {app: pair}""",
        *(
            f"""\
apiVersion: v1
kind: Pod
metadata:
  name: pair-{index}
  namespace: ml
  labels: {{app: pair}}
spec:
  hostname: pair-{index}
  subdomain: pair
  restartPolicy: Never
  terminationGracePeriodSeconds: 60
  automountServiceAccountToken: false
  enableServiceLinks: false
  containers:
  - name: train
    image: example.org/train@{DIGEST}
    args: [python, -m, torch.distributed.run, --nnodes=2, --nproc-per-node=1, --rdzv-backend=c10d,
      --rdzv-endpoint=pair-0.pair.ml.svc.cluster.local, --rdzv-id=pair,
      '--rdzv-conf=is_host={"true" if index == 0 else "false"},read_timeout=300', train.py]
"""
            for index in (0, 1)
        ),
    ]
)

HEALTHY = {"c10d": C10D, "static": STATIC, "pods": PODS}


def findings(text: str, only: Fabric | None = None) -> tuple[Finding, ...]:
    return lint.lint(documents.parse(text, "job.yaml"), fabric=only)


def rule(finding: Finding) -> str:
    match = re.search(r" \[([a-z0-9-]+)\]$", finding.what)
    assert match is not None
    return match[1]


def damaged(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


@pytest.mark.parametrize("kubernetes", ["1.34", "1.35", "1.36", "1.37"])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_sound_manifest_has_no_findings(name: str, kubernetes: str) -> None:
    found = documents.parse(HEALTHY[name], "job.yaml")
    assert lint.lint(found, kubernetes=kubernetes) == ()


# Each case: the rule that a change makes fire (and no other), how grave it is, the manifest, the
# changes. The line that the Finding must name is marked: it ends with #!
ERROR, WARNING = Severity.ERROR, Severity.WARNING
Change = tuple[str, str]
Case = tuple[str, Severity, str, list[Change]]

IMAGE = f"image: example.org/train@{DIGEST}"
HOST = "demo-0.demo.default.svc.cluster.local"
ENDPOINT = f"            --rdzv-endpoint={HOST}:29400 \\\n"
IS_HOST = "is_host=$([ $JOB_COMPLETION_INDEX = 0 ] && echo true || echo false),"
PER_INDEX = "  backoffLimitPerIndex: 3\n  maxFailedIndexes: 0\n"
SHM_MOUNT = "        - name: dshm\n          mountPath: /dev/shm\n"
SHM = "      - name: dshm\n        emptyDir:\n"
SHM_VOLUME = f"{SHM}          medium: Memory\n          sizeLimit: 64Gi\n"
GPUS = "            nvidia.com/gpu: 8\n"
SERVICE_OF_C10D = C10D.partition("---\n")[0]
FAILURE_POLICY = C10D[C10D.index("  podFailurePolicy:") : C10D.index("  template:")]
NODE_RANK = "              - --node-rank=$(JOB_COMPLETION_INDEX)\n"
MASTER_ADDR = "              - --master-addr=$(MASTER_ADDR)\n"
SELECTOR = "\n  selector:\n    batch.kubernetes.io/job-name: demo"
OWN_PODS = "\n        matchLabels:\n          batch.kubernetes.io/job-name: demo"
LONG = "d" * 49


def out(text: str) -> Change:
    return text, ""


def marked(text: str) -> Change:
    return text, f"{text} #!"


def to(old: str, new: str) -> Change:
    """A part of a line that becomes another, with which the line ends."""
    return old, f"{new} #!"


def behind(text: str, more: str) -> Change:
    return text, text + more


def variable(name: str, value: str) -> Change:
    """One more in the container's env."""
    entry = f"        - {{name: {name}, value: '{value}'}} #!\n"
    return "        - name: POD\n", f"{entry}        - name: POD\n"


def in_pod(line: str) -> Change:
    return behind("      subdomain: demo\n", f"      {line}\n")


def device(line: str) -> Change:
    return behind(GPUS, f"            {line}\n")


def host(name: str) -> Change:
    return f"={HOST}:", f"={name}:"


IPC_LOCK = ("drop: [ALL]", "add: [IPC_LOCK]")

FIELDS: list[Case] = [
    ("schema", ERROR, C10D, [to("parallelism: 4", 'parallelism: "4"')]),
    ("schema", ERROR, C10D, [to("podReplacementPolicy: Failed", "podReplacementPolicie: Failed")]),
    ("enum", ERROR, C10D, [to("operator: In\n", "operator: Inn"), ("Inn #!", "Inn #!\n")]),
    ("enum", ERROR, C10D, [in_pod("dnsPolicy: Cluster #!")]),
    ("enum", ERROR, STATIC, [to("action: RestartJobSet", "action: Restart")]),
    ("quantity", ERROR, C10D, [to("cpu: 500m", "cpu: 500M!")]),
    ("quantity", ERROR, C10D, [to("sizeLimit: 64Gi", "sizeLimit: 64GB")]),
    ("quantity", ERROR, C10D, [to("storage: 1Ti", "storage: 1TB")]),
    ("resource-limits", ERROR, C10D, [to("cpu: 500m", "cpu: 500m"), device("cpu: 250m")]),
    ("resource-limits", ERROR, C10D, [to("cpu: 500m", "example.org/card: 1")]),
    ("resource-limits", ERROR, C10D, [device("example.org/card: 500m #!")]),
    (
        "volume-missing",
        ERROR,
        C10D,
        [behind(SHM_MOUNT, "        - name: data #!\n          mountPath: /data\n")],
    ),
    (
        "volume-unused",
        WARNING,
        C10D,
        [behind("      volumes:\n", "      - name: data #!\n        emptyDir: {}\n")],
    ),
    (
        "mount-twice",
        ERROR,
        C10D,
        [behind(SHM_MOUNT, SHM_MOUNT.replace("dshm\n", "dshm #!\n"))],
    ),
    ("env-twice", WARNING, C10D, [variable("NCCL_SOCKET_IFNAME", "eth0")]),
    ("env-shell", WARNING, C10D, [variable("OTHER", "a-$POD")]),
    ("env-order", WARNING, C10D, [variable("OTHER", "$(POD)")]),
    (
        "name-missing",
        ERROR,
        STATIC,
        [
            ("metadata:\n  name: demo\n", "metadata: #!\n  labels: {}\n"),
            ("demo-node-0-0.demo", "other.example.org"),
        ],
    ),
    (
        "name-missing",
        WARNING,
        STATIC,
        [
            ("metadata:\n  name: demo\n", "metadata: #!\n  generateName: demo\n"),
            ("demo-node-0-0.demo", "other.example.org"),
        ],
    ),
    (
        "name-label",
        ERROR,
        C10D,
        [
            ("- name: train\n        image", "- name: Train #!\n        image"),
            ("containerName: train", "containerName: Train"),
        ],
    ),
    ("name-label", ERROR, C10D, [("name: demo\nspec:\n  podS", "name: D_ #!\nspec:\n  podS")]),
    (
        "name-length",
        ERROR,
        STATIC,
        [
            to("name: demo", f"name: {LONG}"),
            ("demo-node-0-0.demo", f"{LONG}-node-0-0.{LONG}"),
        ],
    ),
    (
        "name-fqdn",
        ERROR,
        PODS,
        [
            ("hostname: pair-0", f"setHostnameAsFQDN: true #!\n  hostname: {LONG}"),
            ("pair-0.pair.ml", f"{LONG}.pair.ml"),
            ("pair-0.pair.ml", f"{LONG}.pair.ml"),
        ],
    ),
]

SERVICE: list[Case] = [
    ("endpoint-missing", ERROR, C10D, [out(ENDPOINT)]),
    (
        "endpoint-port",
        ERROR,
        C10D,
        [(f"{HOST}:29400", f"{HOST}:99999"), out("name: rdzv\n          ")],
    ),
    ("endpoint-local", ERROR, C10D, [host("localhost")]),
    ("endpoint-local", WARNING, C10D, [host("10.0.0.1")]),
    ("endpoint-host", ERROR, C10D, [host("demo-4.demo.default.svc.cluster.local")]),
    ("endpoint-host", ERROR, C10D, [host("demo-0")]),
    ("endpoint-host", ERROR, C10D, [host("demo-0.dmo.default.svc.cluster.local")]),
    ("endpoint-host", ERROR, C10D, [host("demo-0.demo.ml.svc.cluster.local")]),
    ("endpoint-host", ERROR, C10D, [host("demo-0.demo.default.cluster.local")]),
    ("endpoint-host", ERROR, C10D, [host("dem-0.demo.default.svc.cluster.local")]),
    ("endpoint-host", ERROR, C10D, [host("demo.default.svc.cluster.local")]),
    ("endpoint-host", ERROR, C10D, [host("dem")]),
    ("endpoint-host", ERROR, C10D, [out("      subdomain: demo\n")]),
    (
        "endpoint-host",
        ERROR,
        C10D,
        [
            ("completionMode: Indexed", "completionMode: NonIndexed"),
            (PER_INDEX, "  backoffLimit: 0\n"),
        ],
    ),
    ("endpoint-host", ERROR, STATIC, [("demo-node-0-0.demo", "demo-node-0.demo")]),
    ("endpoint-host", ERROR, STATIC, [("demo-node-0-0.demo", "demo-node-1-0.demo")]),
    ("endpoint-host", ERROR, PODS, [out("  hostname: pair-0\n")]),
    (
        "service-missing",
        ERROR,
        C10D,
        [
            ("  name: demo\nspec:\n  clusterIP", "  name: other\nspec:\n  clusterIP"),
            marked("subdomain: demo"),
        ],
    ),
    (
        "service-missing",
        ERROR,
        C10D,
        [behind("kind: Service\nmetadata:\n", "  namespace: other\n"), marked("subdomain: demo")],
    ),
    ("service-headless", ERROR, C10D, [to("clusterIP: None", "clusterIP: 10.0.0.1")]),
    ("service-selector", ERROR, C10D, [(SELECTOR, "\n  selector: #!\n    app: dem")]),
    ("service-selector", ERROR, C10D, [out(SELECTOR)]),
    ("service-not-ready", WARNING, C10D, [to("Addresses: true", "Addresses: false")]),
    (
        "service-order",
        WARNING,
        f"{C10D}---\n{SERVICE_OF_C10D}",
        [(SERVICE_OF_C10D, "# moved\n"), marked("kind: Service")],
    ),
    (
        "service-port",
        ERROR,
        C10D,
        [
            host("first.default.svc.cluster.local"),
            behind(
                "---\n",
                "apiVersion: v1\nkind: Service\nmetadata: {name: first}\n"
                "spec:\n  ports: #!\n  - port: 80\n---\n",
            ),
        ],
    ),
    (
        "job-indexed",
        WARNING,
        C10D,
        [
            to("completionMode: Indexed", "completionMode: NonIndexed"),
            host("$FOUND"),
            (PER_INDEX, "  backoffLimit: 0\n"),
        ],
    ),
    (
        "network-policy-peers",
        ERROR,
        C10D,
        [marked("  ingress:"), (OWN_PODS, "\n        matchLabels:\n          app: other")],
    ),
    ("network-policy-ports", ERROR, C10D, [marked("  egress:"), ("[demo]", "[other]")]),
    (
        "network-policy-ports",
        ERROR,
        C10D,
        [("  ingress:\n  - from:", "  ingress: #!\n  - ports: [{port: 29400}]\n    from:")],
    ),
    (
        "network-policy-dns",
        ERROR,
        C10D,
        [
            out("  - ports:\n    - {port: 53, protocol: UDP}\n    - {port: 53, protocol: TCP}\n"),
            marked("  egress:"),
        ],
    ),
]

RENDEZVOUS: list[Case] = [
    ("torchrun-flag", ERROR, C10D, [behind("--nproc-per-node=8", " --max-restart-s=3")]),
    ("script-missing", ERROR, C10D, [out("            train.py --lr 1e-4")]),
    ("flag-variable", ERROR, STATIC, [to("--master-port=29500", "--master-port=$PORT")]),
    ("flag-variable", ERROR, STATIC, [to("--master-port=29500", "--master-port=$(PORT)")]),
    (
        "launch-deprecated",
        WARNING,
        STATIC,
        [to("[torchrun]", "[python, -m, torch.distributed.launch]")],
    ),
    ("rdzv-id", WARNING, C10D, [out("            --rdzv-id=demo \\\n")]),
    ("c10d-static-flags", WARNING, C10D, [behind("--rdzv-id=demo", " --node-rank=0")]),
    ("c10d-static-flags", WARNING, C10D, [behind("--rdzv-id=demo", " --master-addr=demo-0.demo")]),
    ("rdzv-conf", WARNING, C10D, [("join_timeout=1800", "timeout=1800")]),
    ("rdzv-conf", ERROR, C10D, [("join_timeout=1800", "join_timeout")]),
    ("is-host", ERROR, C10D, [(IS_HOST, "is_host=1,")]),
    ("is-host", ERROR, C10D, [(IS_HOST, "is_host=false,")]),
    ("is-host", WARNING, C10D, [out(IS_HOST), host("demo-0.demo")]),
    (
        "local-addr",
        WARNING,
        C10D,
        [in_pod("hostNetwork: true"), in_pod("dnsPolicy: ClusterFirstWithHostNet")],
    ),
    ("read-timeout", WARNING, C10D, [("read_timeout=900", "read_timeout=60")]),
    ("read-timeout", WARNING, C10D, [out("read_timeout=900,")]),
    (
        "join-timeout",
        WARNING,
        C10D,
        [("activeDeadlineSeconds: 86400", "activeDeadlineSeconds: 900")],
    ),
    ("static-node-rank", ERROR, STATIC, [out(NODE_RANK)]),
    (
        "static-node-rank",
        ERROR,
        STATIC,
        [to("--node-rank=$(JOB_COMPLETION_INDEX)", "--node-rank=0")],
    ),
    ("static-master", ERROR, STATIC, [out(MASTER_ADDR)]),
    ("static-elastic", ERROR, STATIC, [to("--nnodes=2", "--nnodes=1:2")]),
    (
        "standalone-nodes",
        ERROR,
        STATIC,
        [to("--master-port=29500", "--standalone"), out(NODE_RANK), out(MASTER_ADDR)],
    ),
    ("nnodes", ERROR, C10D, [("--nnodes=4", "--nnodes=5")]),
    ("nnodes", ERROR, C10D, [("--nnodes=4", "--nnodes=3")]),
    ("nnodes", ERROR, C10D, [("--nnodes=4", "--nnodes=5:4")]),
    ("nnodes", ERROR, STATIC, [to("--nnodes=2", "--nnodes=two")]),
    ("nnodes", ERROR, PODS, [("--nnodes=2", "--nnodes=3"), ("--nnodes=2", "--nnodes=3")]),
    ("completions", ERROR, C10D, [to("completions: 4", "completions: 8")]),
    ("nproc-per-node", ERROR, C10D, [("--nproc-per-node=8", "--nproc-per-node=16")]),
    ("nproc-per-node", WARNING, C10D, [("--nproc-per-node=8", "--nproc-per-node=4")]),
    ("nproc-per-node", ERROR, C10D, [("--nproc-per-node=8", "--nproc-per-node=gpu"), out(GPUS)]),
    ("world-size", WARNING, C10D, [variable("WORLD_SIZE", "4")]),
    ("rdzv-port", WARNING, C10D, [to("containerPort: 29400", "containerPort: 29500")]),
]

DEPLOYMENT = f"""\
apiVersion: apps/v1
kind: Deployment #!
metadata: {{name: demo}}
spec:
  selector: {{matchLabels: {{app: demo}}}}
  template:
    metadata: {{labels: {{app: demo}}}}
    spec:
      terminationGracePeriodSeconds: 60
      automountServiceAccountToken: false
      enableServiceLinks: false
      containers:
      - name: train
        {IMAGE}
        command: [torchrun, train.py]
"""

POLICY: list[Case] = [
    ("restart-policy", ERROR, C10D, [to("restartPolicy: Never", "restartPolicy: Always")]),
    ("restart-policy", ERROR, C10D, [out("      restartPolicy: Never\n")]),
    ("restart-policy", WARNING, PODS, [to("restartPolicy: Never", "restartPolicy: Always")]),
    ("never-ends", WARNING, DEPLOYMENT, []),
    (
        "needs-restart-never",
        ERROR,
        C10D,
        [
            ("restartPolicy: Never", "restartPolicy: OnFailure"),
            (PER_INDEX, "  backoffLimit: 0\n"),
            marked("  podFailurePolicy:"),
        ],
    ),
    (
        "per-index",
        ERROR,
        C10D,
        [(PER_INDEX, "  backoffLimit: 0\n  maxFailedIndexes: 0 #!\n")],
    ),
    ("backoff-limit", WARNING, C10D, [(PER_INDEX, "  backoffLimit: 3 #!\n")]),
    (
        "backoff-limit",
        WARNING,
        C10D,
        [
            out(PER_INDEX),
            ("completions: 4", "completions: 8"),
            ("parallelism: 4", "parallelism: 8"),
            ("--nnodes=4", "--nnodes=8"),
        ],
    ),
    (
        "pod-replacement-policy",
        ERROR,
        C10D,
        [to("podReplacementPolicy: Failed", "podReplacementPolicy: TerminatingOrFailed")],
    ),
    (
        "pod-replacement-policy",
        WARNING,
        C10D,
        [out("  podReplacementPolicy: Failed\n"), out(FAILURE_POLICY)],
    ),
    (
        "share-store",
        ERROR,
        C10D,
        [
            ("--nnodes=4", "--nnodes=2:4"),
            ("name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "name: OTHER"),
        ],
    ),
    (
        "share-store",
        WARNING,
        C10D,
        [('value: "1"', 'value: "0"'), marked("- name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE")],
    ),
    ("grace-period", WARNING, C10D, [to("PeriodSeconds: 120", "PeriodSeconds: 59")]),
    ("grace-period", WARNING, C10D, [out("      terminationGracePeriodSeconds: 120\n")]),
    (
        "grace-period",
        WARNING,
        C10D,
        [behind("--rdzv-id=demo", " --shutdown-timeout=100"), marked("PeriodSeconds: 120")],
    ),
    (
        "signals",
        WARNING,
        C10D,
        [("          exec torchrun", "          cd /train\n          torchrun")],
    ),
    ("exit-codes", WARNING, C10D, [to("values: [137]", "values: [42]")]),
    ("failure-rule", ERROR, C10D, [to("containerName: train", "containerName: main")]),
    ("failure-rule", ERROR, C10D, [to("values: [137]", "values: []")]),
]

POD: list[Case] = [
    ("shm", ERROR, C10D, [out(SHM_MOUNT), out(SHM_VOLUME)]),
    ("shm", WARNING, STATIC, [("--nproc-per-node=1", "--nproc-per-node=4")]),
    (
        "shm-kind",
        WARNING,
        C10D,
        [(SHM_VOLUME, "      - name: dshm #!\n        hostPath:\n          path: /dev/shm\n")],
    ),
    (
        "shm-kind",
        WARNING,
        C10D,
        [out("          medium: Memory\n"), (SHM, SHM.replace("dshm\n", "dshm #!\n"))],
    ),
    ("shm-size", WARNING, C10D, [to("sizeLimit: 64Gi", "sizeLimit: 512Gi")]),
    ("shm-size", WARNING, C10D, [to("sizeLimit: 64Gi", "sizeLimit: 64M")]),
    (
        "ipc-lock",
        WARNING,
        C10D,
        [device("rdma/rdma_shared_device_a: 1"), marked("        securityContext:")],
    ),
    (
        "ipc-lock-user",
        WARNING,
        C10D,
        [to("drop: [ALL]", "add: [IPC_LOCK]"), in_pod("securityContext: {runAsNonRoot: true}")],
    ),
    (
        "instance-resources",
        ERROR,
        C10D,
        [
            in_pod("nodeSelector: {node.kubernetes.io/instance-type: p4d.24xlarge}"),
            device("vpc.amazonaws.com/efa: 32 #!"),
            IPC_LOCK,
        ],
    ),
    (
        "instance-resources",
        WARNING,
        C10D,
        [
            in_pod("nodeSelector: {node.kubernetes.io/instance-type: p5.48xlarge}"),
            device("vpc.amazonaws.com/efa: 4 #!"),
            IPC_LOCK,
        ],
    ),
    (
        "host-network",
        ERROR,
        C10D,
        [in_pod("hostNetwork: true #!"), behind("--rdzv-id=demo", " --local-addr=$POD")],
    ),
    ("image-missing", ERROR, C10D, [(f"train\n        {IMAGE}\n", "train #!\n")]),
    ("image-digest", WARNING, C10D, [to(IMAGE, "image: example.org:5000/train:1.0")]),
    ("image-digest", WARNING, C10D, [to(IMAGE, "image: example.org:5000/train")]),
    ("service-account", WARNING, C10D, [to("AccountToken: false", "AccountToken: true")]),
    ("service-links", WARNING, C10D, [out("      enableServiceLinks: false\n")]),
    (
        "istio",
        WARNING,
        C10D,
        [
            marked("    metadata:"),
            behind("      labels:\n", '        sidecar.istio.io/inject: "true"\n'),
        ],
    ),
    (
        "istio",
        WARNING,
        C10D,
        [
            behind(
                "---\n",
                "apiVersion: v1\nkind: Namespace\n"
                "metadata: {name: default, labels: {istio-injection: enabled}}\n---\n",
            )
        ],
    ),
    (
        "claim-access",
        WARNING,
        C10D,
        [
            ("- ReadWriteMany", "- ReadWriteOnce"),
            ("- name: checkpoint\n        pers", "- name: checkpoint #!\n        pers"),
        ],
    ),
]

NCCL: list[Case] = [
    ("debug-switch", WARNING, C10D, [variable("NCCL_DEBUG", "TRACE")]),
    ("debug-switch", WARNING, C10D, [variable("NCCL_P2P_DISABLE", "1")]),
    ("debug-switch", WARNING, C10D, [variable("NCCL_SHM_DISABLE", "1")]),
    ("debug-switch", WARNING, C10D, [variable("CUDA_LAUNCH_BLOCKING", "1")]),
    ("debug-switch", WARNING, C10D, [variable("TORCH_DISTRIBUTED_DEBUG", "DETAIL")]),
    (
        "fabric-disabled",
        WARNING,
        C10D,
        [variable("NCCL_IB_DISABLE", "1"), device("nvidia.com/hostdev: 8"), IPC_LOCK],
    ),
    (
        "fabric-disabled",
        WARNING,
        C10D,
        [variable("NCCL_NET", "Socket"), device("nvidia.com/hostdev: 8"), IPC_LOCK],
    ),
    ("interface", ERROR, C10D, [marked("- name: NCCL_SOCKET_IFNAME"), ("eth0", "=lo")]),
    ("misspelled", WARNING, C10D, [variable("NCCL_IB_HCAS", "mlx5")]),
    ("misspelled", WARNING, C10D, [variable("GLOO_SOCKET_IFNAM", "eth0")]),
]

CASES = [*FIELDS, *SERVICE, *RENDEZVOUS, *POLICY, *POD, *NCCL]


@pytest.mark.parametrize(
    ("name", "severity", "text", "changes"),
    CASES,
    ids=[f"{name}-{index}" for index, (name, *_) in enumerate(CASES)],
)
def test_a_damaged_manifest_is_named_by_its_rule_alone(
    name: str, severity: Severity, text: str, changes: list[tuple[str, str]]
) -> None:
    broken = damaged(text, *changes)
    found = findings(broken)
    assert {rule(finding) for finding in found} == {name}
    assert {finding.severity for finding in found} == {severity}
    marks = [number for number, line in enumerate(broken.split("\n"), 1) if line.endswith("#!")]
    lines = {int(finding.where.removeprefix("job.yaml:")) for finding in found}
    assert lines >= set(marks), found


def test_every_rule_has_a_manifest_that_makes_it_fire() -> None:
    elsewhere = {"fabric-resources", "endpoint-index"}
    assert {rule.id for rule in lint.RULES} | {lint.SCHEMA} == {
        name for name, *_ in CASES
    } | elsewhere


def test_a_rule_names_the_fault_that_the_logs_of_such_a_job_show() -> None:
    known = {fault.id for fault in catalogue.read().faults}
    assert {each.fault for each in lint.RULES if each.fault} <= known
    (found,) = findings(damaged(C10D, out(SHM_MOUNT), out(SHM_VOLUME)))
    assert found.cause.endswith("(in a log: shm-too-small)")


def test_the_flags_in_a_script_are_found_by_their_own_lines() -> None:
    text = damaged(C10D, ("--nnodes=4", "--nnodes=5"), ("--rdzv-id=demo", "--rdzv_ids=demo"))
    lines = text.split("\n")
    assert {rule(each): lines[int(each.where[9:]) - 1].strip() for each in findings(text)} == {
        "nnodes": "--nnodes=5 \\",
        "torchrun-flag": "--rdzv_ids=demo \\",
        "rdzv-id": ENDPOINT.strip(),
    }


# ---- Muster's launcher and fabrics ---------------------------------------------------------------

LAUNCHER = damaged(
    C10D,
    (C10D[C10D.index("        - sh\n") : C10D.index("        env:")], "        - python\n"),
    behind(
        "        - python\n",
        "        - -m\n        - muster.launcher\n        args:\n        - --nnodes=4\n"
        "        - --nproc-per-node=8\n        - --rdzv-backend=c10d\n"
        f"        - --rdzv-endpoint={HOST}:29400\n        - --rdzv-id=demo\n"
        "        - --rdzv-conf=read_timeout=900\n        - train.py\n",
    ),
)


def test_the_launcher_says_itself_who_holds_the_store_and_has_codes_of_its_own() -> None:
    assert findings(LAUNCHER) == ()
    own = [("values: [137]", "values: [10, 12]"), (f"={HOST}:", "=demo-0.demo:")]
    assert findings(damaged(LAUNCHER, *own)) == ()


def test_the_launcher_wants_pod_0_as_endpoint() -> None:
    (finding,) = findings(damaged(LAUNCHER, host("demo-1.demo.default.svc.cluster.local")))
    assert (rule(finding), finding.severity) == ("endpoint-index", ERROR)


def test_a_fabrics_devices_are_counted() -> None:
    efa = fabric.read(FABRICS, "efa-p5")
    missing = findings(C10D, only=efa)
    assert "fabric-resources" in {rule(finding) for finding in missing}
    counts = {name: str(count) for name, count in efa.container["resources"]["limits"].items()}
    text = damaged(C10D, IPC_LOCK, out(GPUS))
    limits = "".join(f"            {name}: {count}\n" for name, count in counts.items())
    gpus = "" if "nvidia.com/gpu" in counts else GPUS
    whole = damaged(text, behind("          limits:\n", gpus + limits))
    assert "fabric-resources" not in {rule(finding) for finding in findings(whole, only=efa)}
    wrong = damaged(whole, ("vpc.amazonaws.com/efa: 32", "vpc.amazonaws.com/efa: 4 #!"))
    (finding,) = (each for each in findings(wrong, only=efa) if rule(each) == "fabric-resources")
    assert "vpc.amazonaws.com/efa: 32" in finding.what
    assert wrong.split("\n")[int(finding.where[9:]) - 1].endswith("#!")


# ---- what is not judged --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        [(IS_HOST, ""), ("--rdzv-conf ", "--rdzv-conf $CONF,")],
        [("--nnodes=4", "--nnodes=$NODES")],
        [("--nproc-per-node=8", "--nproc-per-node=gpu")],
        [("--nproc-per-node=8", "--nproc-per-node=auto")],
        [("--nproc-per-node=8 ", "$MORE_FLAGS ")],
        [host("$FOUND")],
        [host("etcd.other.svc.cluster.local"), ("c10d", "etcd-v2")],
        [host("etcd"), ("c10d", "etcd-v2")],
        [("          exec torchrun", "          trap 'kill -TERM $!' TERM\n          torchrun")],
        [(PER_INDEX, "  backoffLimit: 0\n")],
        [device("example.org/card: 2")],
        [device("rdma/ib: 1")],
        [in_pod("hostIPC: true"), out(SHM_MOUNT), out(SHM_VOLUME)],
        [
            in_pod("terminationGracePeriodSeconds: 600"),
            out("      terminationGracePeriodSeconds: 120\n"),
        ],
        [variable("NCCL_DEBUG", "INFO")],
        [variable("NCCL_IB_DISABLE", "1")],
        [variable("NCCL_MY_OWN_PLUGIN_SETTING", "1")],
        [
            (
                "job-name: demo\n---",
                'job-name: demo\n    batch.kubernetes.io/job-completion-index: "0"\n---',
            )
        ],
        [
            (
                "  ingress:\n  - from:",
                "  ingress:\n  - ports: [{port: 1024, endPort: 65535}]\n    from:",
            )
        ],
        [behind("      labels:\n", '        sidecar.istio.io/inject: "false"\n')],
    ],
)
def test_what_is_right_too_or_cannot_be_told_is_let_pass(changes: list[Change]) -> None:
    assert findings(damaged(C10D, *changes)) == ()


def test_an_object_of_the_wrong_shape_is_judged_by_its_shape_first() -> None:
    text = damaged(C10D, ("completions: 4", "completions: four"), ("clusterIP: None", "type: A"))
    assert {rule(finding) for finding in findings(text)} == {"schema"}
    unknown = damaged(C10D, ("parallelism: 4", "paralelism: 4"), ("medium: Memory", "medium: M"))
    assert {"schema", "enum"} <= {rule(finding) for finding in findings(unknown)}


def test_a_kind_that_is_not_known_is_a_warning_and_its_pods_are_judged() -> None:
    text = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: p}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 1
      template:
        spec:
          containers: [{name: a, image: i, command: [torchrun, --nnodes=2, a.py]}]
"""
    found = {rule(finding): finding for finding in findings(text)}
    assert found["schema"].severity is WARNING
    assert {"image-digest", "grace-period"} <= set(found)
    # its controller may give torchrun its flags
    assert not {"static-node-rank", "static-master", "nnodes"} & set(found)


def test_what_a_field_should_be_is_in_the_remedy() -> None:
    text = damaged(C10D, ('value: "1"', "value: 1"), ("parallelism: 4", "paralelism: 4"))
    remedies = [finding.remedy for finding in findings(text)]
    assert remedies == ["write parallelism", 'write "1"']
    newer = damaged(C10D, behind("  parallelism: 4\n", "  scheduling: {}\n"))
    (finding,) = lint.lint(documents.parse(newer, "job.yaml"), kubernetes="1.36")
    assert "1.37 has it" in finding.what


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(UnknownKubernetes):
        lint.lint(documents.parse(C10D, "job.yaml"), kubernetes="1.20")


def test_a_manifest_without_a_torchrun_is_refused() -> None:
    found = documents.parse(SERVICE_OF_C10D, "service.yaml")
    with pytest.raises(
        NoTorchrun, match=r"service.yaml: no container here runs torchrun \(Service"
    ):
        lint.require_torchrun(found)
    (group,) = lint.require_torchrun(documents.parse(C10D, "job.yaml"))
    assert group.name == "demo"


# ---- any manifest --------------------------------------------------------------------------------

LINES = "\n---\n".join([*HEALTHY.values(), LAUNCHER, DEPLOYMENT]).split("\n")
VALUES = [
    "",
    "~",
    "[]",
    "{}",
    "0",
    "-1",
    "x",
    "$X",
    "'1'",
    "[~]",
    "true",
    "99999999999",
    "1e3",
    "é",
]


@given(
    st.lists(st.tuples(st.integers(0, len(LINES) - 1), st.sampled_from(VALUES)), max_size=4),
    st.sets(st.integers(0, len(LINES) - 1), max_size=3),
)
def test_no_manifest_is_too_damaged_to_be_judged(
    values: list[tuple[int, str]], gone: set[int]
) -> None:
    lines = list(LINES)
    for number, value in values:
        key, colon, _ = lines[number].partition(": ")
        lines[number] = f"{key}{colon}{value}" if colon else f"{key} {value}"
    text = "\n".join(line for number, line in enumerate(lines) if number not in gone)
    with contextlib.suppress(ManifestUnreadable):
        for finding in findings(text):
            assert rule(finding)
            assert 1 <= int(finding.where.removeprefix("job.yaml:")) <= len(lines)
