"""Secrets: what they look like, what only looks like one, and that no byte of them leaves a run."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time
from typing import Any

import pytest

from paceline.args.secrets import MASK, describe_error, is_secret, mask_command, mask_text, masked

S = "Zq7rT2xW9bVn4KcL8mPd"  # what must not be left
TEXTS = [
    f"https://bucket.s3.amazonaws.com/a?X-Amz-Algorithm=AWS4&X-Amz-Credential={S}%2F2026&X-Amz-Signature={S}&a=1",
    f"https://storage.googleapis.com/b/o?X-Goog-Credential={S}&X-Goog-Signature={S}",
    f"https://b.blob.core.windows.net/c?sv=2026&sig={S}%3D&se=1",
    f"https://host/path?token={S}",
    f"https://maps/api?key={S}&x=1",
    f"https://host/path?AWSAccessKeyId={S}&Signature={S}&Expires=1",
    f"s3://user:{S}@bucket/run",
    f"postgresql+psycopg2://u:{S}@host/db",
    f"Authorization: Bearer {S}",
    f"authorization: Basic {S}==",
    f"{{'Authorization': 'Bearer {S}'}}",
    f"header bearer {S}.{S}",
    f"hf_{S}",
    f"(hf_{S})",
    f"ghp_{S}",
    f"github_pat_{S}",
    f"sk-{S}",
    f"xoxb-{S}",
    "AKIAABCDEFGHIJKLMNOP",
    f"eyJ{S}.{S}.{S}",
    f"train.py --api_key={S} --lr 1",
    f"api-key: {S}",
    f'"api_key": "{S}"',
    f"hub_token={S}",
    f"WANDB_API_KEY={S}",
    f"password = '{S}'",
    f"my_secret: {S}",
    f"DefaultEndpointsProtocol=https;AccountName=x;AccountKey={S}==;EndpointSuffix=y",
    f"token='{S}'",
    f"torchrun train.py --hub_token={S} --token={S} --lr 1",
    f"Command '['python', 'train.py', '--hub_token', '{S}', '--password', '{S}']' returned 1",
    f"https://{S}@github.com/org/repo.git",
    f"https://host/path?jwt={S}&auth={S}",
    f"access_token: {S}; passphrase={S}",
    f"npm_{S} r8_{S} sk_live_{S} pypi-{S}{S}",
    f"run --password {S} --hub_token {S} failed",
    f"https://host/callback?code={S}&state=1",
    f"https://hooks.slack.com/services/T01ABCDEF/B02ABCDEF/{S}",
    f"https://discord.com/api/webhooks/1234567890/{S}",
    f"gitea_token={S} 'my-token': '{S}'",
    f"os.environ['WANDB_API_KEY'] = '{S}'",
    f'os.environ["HF_TOKEN"]="{S}"',
    f'os.getenv("WANDB_API_KEY", "{S}")',
    f"monkeypatch.setenv('API_TOKEN', r'{S}')",
    f'MISTRAL_API_KEY: str = "{S}"',
    f"HF_TOKEN: str | None = '{S}'",
    f"if (api_key := '{S}') == password != b'{S}' or api_key == f'{S}':",
    f"api_key => '{S}'; password='correct {S} battery'",
    f"wandb.login(key='{S}{S}')",
    f"token: {S}",
    f'"auth": "{S}=="',
    f"machine api.wandb.ai login user password {S}",
    f"curl -s -u me:{S} http://host",
    f"SG.{S}.{S} gsk_{S} xai-{S}",
    f"1234567890:AA{S}{S[:12]}",
    f"-----BEGIN RSA PRIVATE KEY-----\n{S}\n{S}\n-----END RSA PRIVATE KEY-----",
]
PLAIN = [
    "include_num_input_tokens_seen=all max_new_tokens=5 pad_token=<pad> eos_token: </s>",
    '"pad_token": "[PAD]", "bos_token_id": 1, "special_tokens_map": {}',
    "s3://bucket/run/checkpoint-4",
    "https://huggingface.co/org/model?download=true",
    "git@github.com:org/repo.git ssh://git@host/repo",
    "the key of the bearer of tokens; signature: (x, y), Unexpected token: 5",
    "sort_key=lambda x: x, key='abc', keyword=3",
    "hub_token=None password=None token=True use_auth_token=False",
    "config.json is damaged: it is not JSON (Expecting value: line 1 column 1 (char 0))",
    "hf_argparser sk-learn --learning_rate=0.1",
    "<HUB_TOKEN> <MASKED>",
    "/runs/sig=0.5,lr=1e-4/checkpoint-10 s3://bucket/sig=3/file.txt sas=1",
    "Command '['python', '--pad_token', 'x', '--max_new_tokens', '5', '--hub_token', '--lr']' returned 1",
    "10:30 a@b.c 12:00 //a:b",
    "label_token=yes prompt_token: 'user' answer-token=12 last_token=0.25",
    "--hub_token is needed, or --token; give --password on the command line, --api-key too",
    "key: runs/exp1/checkpoint-400/model-00001-of-00002 cache_key=9f86d081884c7d659a2feaa0c55ad015",
    "expected one of 'api_key', 'learning_rate' or 'password', 'seed': str = 'x'",
    "token: reserved_special_token_12 auth: user pass: first login to the host, curl -u",
    "https://host/page?code=404&page=2 https://hooks.slack.com/services",
]


@pytest.mark.parametrize("text", TEXTS)
def test_secrets_go(text: str) -> None:
    hidden = mask_text(text)
    assert S not in hidden
    assert "ABCDEFGHIJKLMNOP" not in hidden
    assert MASK in hidden
    assert mask_text(hidden) == hidden


@pytest.mark.parametrize("text", TEXTS)
def test_secrets_go_from_nests_and_what_wraps_them(text: str) -> None:
    nest = masked({"a": [text, (text, {"b": f"error: {text!r}"})], 3: json.dumps({"x": text})})
    assert S not in repr(nest)
    assert S not in mask_text(json.dumps([text]))
    assert S not in " ".join(mask_command(["train.py", text, f"--x={text}"]))


@pytest.mark.parametrize("text", PLAIN)
def test_other_texts_stay(text: str) -> None:
    assert mask_text(text) == text


def test_names() -> None:
    for name in ("hub_token", "token", "--api-key", "aws_secret_access_key", "db.password", "HF_TOKEN", "credentials"):
        assert is_secret(name, "x"), name
    for name in ("pad_token", "additional_special_tokens", "max_new_tokens", "tokenizer", "key", "eos_token", "keys"):
        assert not is_secret(name, "x"), name
    assert is_secret("gitea_token", S)
    assert mask_command(["--gitea-token", S, "--label_token", "yes"]) == ["--gitea-token", MASK, "--label_token", "yes"]
    assert masked({"hub_token": "x", "pad_token": "[PAD]", "n": 1, "token": None}) == {
        "hub_token": MASK, "pad_token": "[PAD]", "n": 1, "token": None
    }  # fmt: skip


def test_values_of_variables_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct horse battery")
    monkeypatch.setenv("SOME_PATH", "/usr/share/words")
    assert mask_text("it said correct horse battery at /usr/share/words") == f"it said {MASK} at /usr/share/words"


@pytest.mark.slow
def test_long_texts_take_no_long_time() -> None:
    parts = ["a", "token ", "a_", "://", "x-", "eyJaaaaaaaaa", "eyJaaaaaaaaa.", "sk-", "password ", "authorization ",
             "://a:", "-----BEGIN PRIVATE KEY-----", "a-token_", "key", "aws", "Bearer ",
             "?key", "\\\"token", "hf_", "=", "'", "login a password ", "curl -u ", "password='a", "'token', '",
             "token: str = (\n", "SG.aaaaaaaaaaaaaaaaaaaa."]  # fmt: skip
    for part in parts:
        text = part * (60_000 // len(part))
        start = time.monotonic()
        mask_text(text)
        assert time.monotonic() - start < 3, part


# ---- logs


def test_loggers_of_the_package_are_masked(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("paceline.anything.at.all")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        logger.warning("cannot reach %s", TEXTS[0])
        try:
            raise OSError(TEXTS[0])
        except OSError:
            logger.exception("it failed")
        logger.warning("nothing %d", 3)
    finally:
        logging.getLogger().removeHandler(handler)
    assert S not in stream.getvalue()
    assert S not in caplog.text
    assert "Traceback" in stream.getvalue()
    assert "nothing 3" in stream.getvalue()


def test_warnings_without_handlers_are_still_shown_once() -> None:
    code = (
        "import logging, paceline; log = logging.getLogger('paceline.a'); log.info('quiet');"
        f"log.warning('seen hf_{S}'); logging.basicConfig(format='%(message)s'); log.warning('again')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [f"seen {MASK}", "again"]


def test_errors_of_options_hide_their_values() -> None:
    from paceline.args.errors import wrong_value

    shown: Any = wrong_value("optim", f"hf_{S}", "choose one")
    assert S not in str(shown)
    assert S not in str(wrong_value("hub_token", [S], "give text"))
    assert "'adam'" in str(wrong_value("optim", "adam", "choose one"))


def test_secrets_do_not_get_into_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    error = OSError("no: wJalrXUtnFEMI at https://h/x?X-Amz-Signature=deadbeef&sig=c0ffee, token: 'xyz' end\nmore")
    words = describe_error(error)
    assert not any(secret in words for secret in ("wJalrXUtnFEMI", "deadbeef", "c0ffee", "xyz", "more"))
    assert words.endswith("end")
