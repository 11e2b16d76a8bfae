"""Secrets are in nothing that is written down about a run: known by names, by shapes, and from the environment."""

import contextlib
import time
from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloop.bus import Publisher, Recording
from offloop.bus.redaction import redact

SECRET = "s3cr-et,VALUE+0"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK\n-----END RSA PRIVATE KEY-----"

SECRET_NAMES = """
    password passwords db_password PGPASSWORD MYSQL_PWD passphrase db_pass secret secrets client_secret clientSecret
    clientsecret AWS_SECRET_ACCESS_KEY credentials token tokens HF_TOKEN hfToken hftoken HFToken authtoken
    wandb.token token2 TOKEN_OLD key api_key apiKey apikey API-KEY api_keys X-Api-Key accesskey KAGGLE_KEY ssh.key
    auth basic_auth authorization bearer Cookie jwt pw db_pw GITHUB_PAT passkey privkey login.pass
"""
OTHER_NAMES = """
    num_tokens max_tokens max_new_tokens tokens_per_second tokenizer token_ids subtokens pad_token eos_token
    forced_bos_token additional_special_tokens TOKENIZERS_PARALLELISM monkey keyboard hotkey key_size sort_key
    label_keys input_key num_key_value_heads author authority auth_type SSH_AUTH_SOCK file_pat bypass forward_pass
    secondary keynote lr 5
"""


def test_a_value_under_the_name_of_a_secret_is_hidden() -> None:
    values = (SECRET, [SECRET], (1, SECRET), {"a": SECRET}, {SECRET: 1}, {"a": [{"b": SECRET}]}, SECRET.encode())
    other = {"name": "lr", "value": 1}
    for name in SECRET_NAMES.split():
        for value in values:
            assert redact(UserDict({"a": ({name: value},)})) == {"a": [{name: "***"}]}
            assert redact({"a": [{name: value}]}) == {"a": [{name: "***"}]}
        assert redact([f"--{name}", SECRET, f"--{name}={SECRET}", "x"]) == [f"--{name}", "***", f"--{name}=***", "x"]
        assert redact([[name, SECRET], ("lr", 1)]) == [[name, "***"], ["lr", 1]]
        assert redact([{"name": name, "value": SECRET}, other]) == [{"name": name, "value": "***"}, other]
        for text in (f"{name}={SECRET}", f"at {name}: '{SECRET} x' y", f"{{'{name}': ['{SECRET}', 'x y'], 'lr': 0.1}}"):
            assert "***" in redact(text)
            assert SECRET not in redact(text)


def test_a_value_under_another_name_is_shown() -> None:
    for name in OTHER_NAMES.split():
        for value in ({name: "abc"}, [f"--{name}", "abc", f"--{name}=abc"], f"--{name}=abc --{name} abc '{name}': 'a'"):
            assert redact(value) == value


def test_numbers_booleans_and_nothing_are_no_secrets_but_a_number_may_be_a_password() -> None:
    shown = {"tokens": 10**9, "token": 5, "use_auth": True, "api_key": None, "keys": [1, np.float32(2)], "auth": ""}
    assert redact(shown) == shown
    text = "t.py --tokens=2_000 --tokens 10B {'token': None, 'password': False} --pad-token '<pad>'"
    assert redact(text) == text
    assert redact({"password": 1234, "secrets": [1], "has_password": True}) == {
        "password": "***",
        "secrets": "***",
        "has_password": True,
    }


KEPT = (
    *("http://127.0.0.1:5000", "ssh://git@host/x", "git@github.com:a/b", "C:\\x", "a:b", "", "--api-key '***'"),
    *("http://h:80/a@b", "https://h:8000?x=a@b", "http://h:1#a@b", "http://[::1]:80/a@b", "file://C:/a@b"),
    *("KeyError: 'lr'", "the bearer certificates", "see sk-learn and hf_transformer", "--use-auth-token --lr 5"),
)


TEXTS = dict(
    [
        ("--wandb.token=abc def", "--wandb.token=***"),
        ('{"lr": 0.1, "password": "a,b", "n": 1}', '{"lr": 0.1, "password": ***, "n": 1}'),
        (r'{"x": "{\"token\": \"a b\", \"lr\": 1}"}', r'{"x": "{\"token\": ***, \"lr\": 1}"}'),
        ("Config(password='a b', lr=1)", "Config(password=***, lr=1)"),
        ("-o x=https://me:pw@host:5000/?token=abc&x=1", "-o x=https://***@host:5000/?token=***&x=1"),
        ("https://TOKEN@host/x and git+https://u:p@ss@h", "https://***@host/x and git+https://***@h"),
        ("redis://:a#b@h:6379/0 https://u:a/b?c@d@h/x", "redis://***@h:6379/0 https://***@h/x"),
        ("https://h/?a=1&sig=abc%3D&b=2&X-Amz-Signature=abc", "https://h/?a=1&sig=***&b=2&X-Amz-Signature=***"),
        ("curl -H 'Authorization: Bearer a b' https://h", "curl -H 'Authorization: ***' https://h"),
        ("Authorization: token abc\nAccept: x", "Authorization: ***"),
        ("curl --password X --lr 1", "curl --password *** --lr 1"),
        ("Command '['x', '--password', 'a b', '-v']' failed", "Command '['x', '--password', ***, '-v']' failed"),
        ("{'Authorization': b'Bearer X', b'token': b'a b'}", "{'Authorization': ***, b'token': ***}"),
        (f"a {JWT}, {PEM} b", "a ***, *** b"),
        ("hf_abcdefghIJKLMNOPqrst x ghp_0123456789abcdef", "*** x ***"),
        ("sk-proj-abc_DEF-0123456789 github_pat_11ABC_def012 wandb_v1_abcdefGHIJ_0123456789", "*** *** ***"),
        ("xoxb-1234-5678-abc (AKIAIOSFODNN7EXAMPLE)", "*** (***)"),
        ("post to https://hooks.slack.com/services/T0/B0/abcdefgh", "post to https://***"),
        ("sent Bearer abcdefgh12", "sent Bearer ***"),
        *((kept, kept) for kept in KEPT),
    ]
)


def test_secrets_in_texts_are_known_by_names_and_shapes() -> None:
    assert {text: redact(text) for text in TEXTS} == TEXTS
    assert {text: redact(text) for text in TEXTS.values()} == {text: text for text in TEXTS.values()}


def test_words_of_a_command_line_may_be_values_of_the_option_before() -> None:
    assert redact(["t.py", "--tokens", "a", "b", "--lr", "1"]) == ["t.py", "--tokens", "***", "***", "--lr", "1"]
    words = [*("t.py", "--token", "abc", "--secret", "--verbose", "--max-tokens", "5", "-key", "a"), 1]
    headers = ["-H", "Authorization: Bearer X", "-H", "Authorization:", "Bearer", "X", "--no-auth", "--x", "y"]
    assert redact([*words, *headers]) == [
        *("t.py", "--token", "***", "--secret", "--verbose", "--max-tokens", "5", "-key", "***", 1),
        *("-H", "Authorization: ***", "-H", "Authorization:", "***", "***", "--no-auth", "--x", "y"),
    ]


def test_the_parts_of_a_named_tuple_have_names() -> None:
    login = namedtuple("login", ["user", "api_key"])
    assert redact([login("me", SECRET)]) == [{"user": "me", "api_key": "***"}]


def test_values_of_the_environment_are_known_wherever_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = 'quoted "one"/é'
    named = {"MY_TOKEN": secret, "DB_PASSWORD": "s3cret", "SOME_SECRET": "\udcffsecret", "X_SECRET": "1"}
    not_secret = {"A_SECRET": "test", "SSH_KEY": str(tmp_path), "NAME": "not-secret", "MAX_TOKENS": "a-long-value"}
    for name, value in {**named, **not_secret}.items():
        monkeypatch.setenv(name, value)
    given = {"note": secret, "l": ["see s3cret.", "s3crets"], secret.encode(): Path(f"{secret}/x")}
    assert redact(given) == {"note": "***", "l": ["see ***.", "s3crets"], b"***": "***/x"}
    assert redact(str(KeyError('quoted "one"/é'))) == "'***'"
    assert redact("?x=quoted%20%22one%22%2F%C3%A9&y=1") == "?x=***&y=1"
    assert redact("\udcffsecret") == "***"
    kept = [str(tmp_path), "test 1 not-secret a-long-value"]
    assert redact(kept) == kept


@settings(max_examples=50)
@given(st.text(), st.text())
def test_no_secret_of_the_environment_is_in_any_text(before: str, after: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_API_KEY", SECRET)
        for text in (f"{before}{SECRET}{after}", repr(before + SECRET + after)):
            assert SECRET not in redact({text: [text]}).popitem()[1][0]


def test_what_contains_itself_or_is_very_deep_ends() -> None:
    around: list[Any] = ["x"]
    around.append(around)
    assert redact(around) == ["x", "***"]
    deep: Any = SECRET
    for _ in range(5000):
        deep = {"a": deep}
    assert SECRET not in repr(redact(deep))


PATTERNS = (
    *("a", "token=", "eyJ", "-eyJ", "sk-", "://", "://a", "a@", "--password ", "'token': ", '"', "\\", "((", "a.-"),
    *("-----BEGIN A-----", "://a:b/", "://a:", "b'", "Bearer: ", "hf_", "bearer a ", "token: '''", 'key=\\"'),
    *("token: \\", "token: '", "tokens=1 "),
)


def test_a_text_takes_a_time_that_is_proportional_to_it() -> None:
    def seconds(text: str) -> float:
        began = time.thread_time()
        redact(text)
        return time.thread_time() - began

    for pattern in PATTERNS:
        small, large = (min(seconds(pattern * (size // len(pattern))) for _ in range(2)) for size in (4_000, 32_000))
        # Eight times, where a quadratic search takes 64.
        assert large < 24 * small + 0.02, pattern


def test_nothing_that_a_run_writes_down_has_a_secret(monkeypatch: pytest.MonkeyPatch, runs_dir: Path) -> None:
    known = "env-s3cret-value"
    monkeypatch.setenv("SOME_API_KEY", known)
    monkeypatch.setattr("sys.argv", ["train.py", "--password", SECRET, f"--note={known}"])
    info = {"config": {"api_keys": {"a": [SECRET]}, "note": [{known: f"at {known}"}]}, "model": known}
    with contextlib.suppress(ValueError), Publisher("r", info=info) as publisher:
        publisher.publish("fit_start", hyperparameters={"login": {"token": SECRET}, "x": f"https://{SECRET}@h {known}"})
        raise ValueError(f"cannot log in with {known} at https://{SECRET}@host")
    files = b"".join(path.read_bytes() for path in runs_dir.rglob("*") if path.is_file())
    said = repr([(one.event, one.fields) for one in Recording(publisher.recording)])
    for one in (SECRET, known):
        assert one.encode() not in files
        assert one not in said
    error = "ValueError: cannot log in with *** at https://***@host"
    assert error in (runs_dir / "r" / "run.json").read_text()
    assert "https://***@h ***" in said
