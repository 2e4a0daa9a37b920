"""Addresses: secrets in them are refused and never shown; variables take their place."""

from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_recipe
from servers import Reply, serve

from tailtune.errors import UserError
from tailtune.fetch.dataset import fetch_dataset
from tailtune.recipe.addresses import with_secrets
from tailtune.recipe.load import parse_parameters
from tailtune.recipe.schema import source_list

SECRETS = [
    "https://u:hunter2@host/a.jsonl",
    "HTTPS://u:hunter2@host/a.jsonl",
    "http://hunter2@host/a.jsonl",
    "http://:hunter2@host/a.jsonl",
    "https://u:hun/ter2@host/a.jsonl",
    "https://u:hunter2%40host/a.jsonl",
    "https://u:hunter2@[::1/a.jsonl",
    "https:/u:hunter2@host/a.jsonl",
    "u:hunter2@host/a.jsonl",
    "https://host?sig=hunter2",
    "https://host/a.jsonl?X-Amz-Signature=hunter2",
    "https://host/a.jsonl?hunter2",
    "https://host/a.jsonl#hunter2",
    "https://host/a.jsonl?page=1&key=hunter2",
    "https://host/a.jsonl;token=hunter2",
    "https://host/a.jsonl%3Fsig=hunter2",
    "https://host/a.jsonl?sig=${DATA_QUERY}&key=hunter2",
    "s3://key:hunter2@bucket/a.jsonl",
    "s3://bucket/a.jsonl?sig=hunter2",
    "hf://u:hunter2@datasets/o/n",
    "hf://datasets/o/n?token=hunter2",
    "ftp://u:hunter2@host/a.jsonl",
]
PLACES: list[tuple[str, Any]] = [
    ("data_source", lambda address: address),
    ("data_source", lambda address: ["a.jsonl", address]),
    ("data_source", lambda address: f'["a.jsonl", "{address}"]'),
    ("data.validation_source", lambda address: address),
    ("base_model", lambda address: address),
    ("data", lambda address: {"source": address, "columns": {"a": "{a}"}, "split_by": "a"}),
]


@pytest.mark.parametrize("address", SECRETS)
@pytest.mark.parametrize(("key", "form"), PLACES)
def test_an_address_with_a_secret_is_refused_and_the_secret_not_shown(address: str, key: str, form: Any) -> None:
    for overrides in ({key: form(address)}, parse_parameters([f"{key}={form(address)}"])):
        with pytest.raises(UserError) as error:
            tiny_recipe(**overrides)
        assert "is given with a" in str(error.value) and "${DATA_QUERY}, as docs/data.md shows" in str(error.value)
        assert "hunter2" not in str(error.value) and "ter2" not in str(error.value)


@pytest.mark.parametrize("key", ["data_source", "base_model", "seed", "data.max_rows", "data.sourc", "no.such.key"])
@pytest.mark.parametrize("text", ['["https://host/a.jsonl?hunter2", 3]', '["s3://b/a", "https://host/a?hunter2", 3]',
                                  '["https://u:hunter2@host/a.jsonl", ""]', '["https://host/a.jsonl?hunter2"',
                                  "https://host/a?hunter2"])  # fmt: skip
def test_a_message_about_something_else_does_not_show_a_secret(key: str, text: str) -> None:
    with pytest.raises(UserError) as error:
        tiny_recipe(**parse_parameters([f"{key}={text}"]))
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("key", ["data.source", "data_source", "data.validation_source", "base_model", "data", "model"])
def test_the_overlay_of_a_recipe_has_no_secrets_either(key: str) -> None:
    secret = "https://u:hunter2@host/a.jsonl"
    value = {"data": {"source": ["a", secret]}, "model": {"base_model": secret}}.get(key, secret)
    raw = tiny_recipe().model_dump(mode="json") | {"local": {key: value}}
    with pytest.raises(ValueError, match="is given with a login") as error:
        type(tiny_recipe()).model_validate(raw)
    assert "hunter2" not in error.value.errors()[0]["msg"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "address",
    [
        "https://host/a.jsonl",
        "https://host:8000/a.jsonl?download=true",
        "https://host/a%20b@c.jsonl",
        "https://host/a.jsonl?${DATA_QUERY}",
        "https://${DATA_LOGIN}@host/a.jsonl",
        "https://host/a.jsonl?sig=${DATA_SIG}&page=2",
        "http://[::1]:80/a.jsonl",
        "s3://bucket/a#b.jsonl",
        "s3://bucket/f[a-z]?.jsonl",
        "hf://datasets/o/n@main/a.jsonl?config=a&split=b",
        "/data/a?b.jsonl",
        "me@work/*.jsonl",
        "embedded",
    ],
)
def test_other_addresses_are_taken_as_they_are(address: str) -> None:
    assert source_list(tiny_recipe(data_source=address).data.source) == [address]


@pytest.mark.parametrize(("key", "address"), [("data_source", "s3://${DATA_B}/a"), ("base_model", "${DATA_M}"),
                                              ("data_source", "a" * 4001), ("data_source", "http://[::1/a"),
                                              ("data_source", "http://host:80000/a")])  # fmt: skip
def test_what_no_address_can_be_is_refused(key: str, address: str) -> None:
    with pytest.raises(UserError, match=r"only addresses with https:// may|at most 4,000|is no valid address"):
        tiny_recipe(**{key: address})


def test_variables_come_from_the_environment_or_the_mounted_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_LOGIN", "me:p%40ss")
    monkeypatch.setenv("TAILTUNE_S3_SECRET_DIR", str(tmp_path))
    (tmp_path / "DATA_QUERY").write_text("sig=1\n")
    assert with_secrets("https://${DATA_LOGIN}@host/a?${DATA_QUERY}") == "https://me:p%40ss@host/a?sig=1"
    assert with_secrets("https://host/${AWS_SECRET_ACCESS_KEY}") == "https://host/${AWS_SECRET_ACCESS_KEY}"


@pytest.mark.parametrize(
    ("value", "problem"),
    [("", "DATA_QUERY is not set"), ("hun ter2", "DATA_QUERY contains a space"), ("ä", "DATA_QUERY contains a space")],
)
def test_a_variable_that_is_missing_or_broken_is_named(
    value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_QUERY", value)
    with pytest.raises(UserError, match=problem) as error:
        with_secrets("https://host/a?${DATA_QUERY}")
    assert "ter2" not in str(error.value)


@pytest.mark.parametrize("address", ["https://${DATA_X}/a", "https://host:${DATA_X}/a"])
def test_an_address_that_is_none_is_not_shown_with_its_secret(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_X", "*hunter2:x@")
    with pytest.raises(UserError) as error:
        fetch_dataset(address, tmp_path / "raw")
    assert "hunter2" not in str(error.value) and "${DATA_X}" in str(error.value)


@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_secret_is_sent_and_neither_stored_nor_shown(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tailtune.fetch.transfer.RETRY_WAIT_SECONDS", 0.01)
    monkeypatch.setenv("DATA_QUERY", "sig=hunter2")
    monkeypatch.setenv("DATA_FOLDER", "hunter2")
    message = ""
    with serve() as server:
        statuses = [] if status == 200 else [status] * 9
        server.replies["/hunter2/a.jsonl"] = Reply(b'{"a": 1}\n', statuses=statuses)
        try:
            fetch_dataset(f"{server.url}/${{DATA_FOLDER}}/a.jsonl?${{DATA_QUERY}}", tmp_path / "raw")
        except UserError as error:
            message = str(error)
        assert (server.requests[0][1], server.queries[0]) == ("/hunter2/a.jsonl", "sig=hunter2")
    assert bool(message) is (status != 200)
    stored = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "hunter2" not in message + stored + caplog.text
    assert "${DATA_FOLDER}" in message + stored
