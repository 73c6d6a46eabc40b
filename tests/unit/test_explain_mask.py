"""No secret of a log is shown, and what explains a fault is."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.explain import catalogue
from muster.explain.mask import masked

WORDS = (
    *(
        "password",
        "--password ",
        "secret: ",
        "_PASS=",
        "A_KEY",
        "--token-",
        "token=(",
        "'api_key': ",
    ),
    *(
        "--",
        "--a-",
        "-",
        "=",
        ":",
        " ",
        '"',
        "'",
        "&sig=",
        "authorization: ",
        "authorization: basic ",
    ),
    *(
        "-----BEGIN PRIVATE KEY-----",
        "-----BEGIN A",
        "-----",
        "://",
        "@",
        "/",
        "abcdefgh",
        "1",
        "***",
    ),
    *("AKIA", "hf_", "eyJaaaaaaaaaa.", "token=", "bearer ", "\n"),
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("WANDB_API_KEY=0123456789abcdef train.py", "WANDB_API_KEY=*** train.py"),
        ("--hf-token hf_abcdefghijklmnop", "--hf-token ***"),
        ("{'password': 'hunter22', 'user': 'x'}", "{'password': '***', 'user': 'x'}"),
        ("AWS_SECRET_ACCESS_KEY: abcd/efgh+ijkl", "AWS_SECRET_ACCESS_KEY: ***"),
        ("pull from https://me:hunter2@registry.example/x", "pull from https://***@registry.example/x"),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer ***"),
        ("got ghp_abcdefghijklmnopqrst back", "got *** back"),
        ("export HF_TOKEN='abcdefghijkl' HF_HOME=/x", "export HF_TOKEN='***' HF_HOME=/x"),
        (
            "environ({'WANDB_API_KEY': '0123456789ab', 'MASTER_ADDR': '10.0.0.1'})",
            "environ({'WANDB_API_KEY': '***', 'MASTER_ADDR': '10.0.0.1'})",
        ),
        ("DB_PASS=x PGPASSWORD=a,b;c MYSQL_PWD=d", "DB_PASS=*** PGPASSWORD=*** MYSQL_PWD=***"),
        ("MASTER_KEY=abcdefgh MASTER_PORT=29500", "MASTER_KEY=*** MASTER_PORT=29500"),
        ("redis://:hunter2@node-0:6379/0", "redis://***@node-0:6379/0"),
        ("postgres://me:p@ss@db/x", "postgres://***@db/x"),
        ("Authorization: Basic bWU6aHVudGVyMg==", "Authorization: Basic ***"),
        ("-H 'authorization: token abcdefghijk'", "-H 'authorization: token ***'"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc=\n-----END RSA PRIVATE KEY-----",
            "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----",
        ),
        ("-----BEGIN PRIVATE KEY-----\\nMIIEow, cut", "-----BEGIN PRIVATE KEY-----***"),
        ('"password": "correct horse battery", "user": "x"', '"password": "***", "user": "x"'),
        ("train.py --password xyz --num-tokens 512", "train.py --password *** --num-tokens 512"),
        ("['--db-password', 'xyz', '--lr', '1']", "['--db-password', '***', '--lr', '1']"),
        ("--wandb-api-key=abcdefgh --hf-token 'a b c d e'", "--wandb-api-key=*** --hf-token '***'"),
        ("https://x.example/y?sv=1&sig=abcdefgh%3D&se=2", "https://x.example/y?sv=1&sig=***&se=2"),
        ("AccountKey=abcdefghijk==;Suffix=x", "AccountKey=***;Suffix=x"),
        ("key AKIAIOSFODNN7EXAMPLE here", "key *** here"),
        ("cookie eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.SflKxwRJSM", "cookie ***"),
    ],
)  # fmt: skip
def test_a_secret_is_masked_and_its_name_is_not(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "node-0:1:2 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0",
        "wait timeout after 600000ms, keys: /default_pg/0//cpu//0",
        "The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
        "for key prefix: store_based_barrier_key:1 (world_size=4, worker_count=3)",
        "tokens/s 12345, tokens: 99999, num_token: 12345678901, pad_token: [PAD], eos_token=</s>",
        "node-0:1:2 [0] NCCL INFO NCCL_IB_PKEY set by environment to 32769.",
        "PWD=/workspace OLDPWD=/root MASTER_ADDR=node-0.example.org SSH_AUTH_SOCK=/run/x",
        "pull hf_transfer-model from git@github.com:org/task-scheduler-long-name.git",
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
        "tcp://10.0.0.1:29500",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


def test_no_line_that_explains_a_fault_is_changed() -> None:
    here = Path(__file__).parent
    logs = (here / "explain_corpus.toml", here / "explain_reports.toml", catalogue.FILE)
    for line in "\n".join(path.read_text(encoding="utf-8") for path in logs).split("\n"):
        assert masked(line) == line


@given(st.text() | st.lists(st.sampled_from(WORDS)).map("".join))
def test_what_is_masked_is_so_once_and_for_all(text: str) -> None:
    assert masked(masked(text)) == masked(text)


@pytest.mark.parametrize(
    "unit", ["token=", "eyJ", "eyJaaaaaaaaaaaa.", "://a:", "sk-", "bearer ", *WORDS]
)
def test_hostile_text_takes_no_longer_than_other_text(unit: str) -> None:
    begin = time.process_time()
    masked(unit * (2**16 // len(unit)))
    assert time.process_time() - begin < 2
