"""No secret of a log is shown, and what explains a fault is."""

import time

import pytest

from muster.explain.mask import masked


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
        "tokens/s 12345, tokens: 99999",
        "tcp://10.0.0.1:29500",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize("unit", ["token=", "eyJ", "eyJaaaaaaaaaaaa.", "://a:", "sk-", "bearer "])
def test_hostile_text_takes_no_longer_than_other_text(unit: str) -> None:
    begin = time.process_time()
    masked(unit * (2**16 // len(unit)))
    assert time.process_time() - begin < 2
