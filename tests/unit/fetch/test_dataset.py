"""Data sets from a file, the package, and the hub. How bytes arrive: test_transfer.py."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_recipe
from converted import data_of
from datasets.data_files import DataFilesDict, get_data_patterns
from fetched import DATA, SHA256, assert_complete, assert_nothing
from servers import COMMIT, Reply, Server

from tailtune.errors import UserError
from tailtune.fetch import hub
from tailtune.fetch.choice import Wanted, choose_files, find_splits, local_files
from tailtune.fetch.dataset import fetch_dataset
from tailtune.fetch.model import fetch_model
from tailtune.manifest import read_manifest
from tailtune.parquet.write import write_parquet
from tailtune.run import Run


def test_a_run_that_has_trained_refuses_another_file(tmp_path: Path) -> None:
    from components.fetch_dataset import fetch_dataset as component

    source = tmp_path / "data.jsonl"
    source.write_bytes(DATA)
    folders = {f"{name}_dir": tmp_path / name for name in ("data", "models", "workspace")}
    run = Run(name="a", recipe=tiny_recipe(data_source=str(source)), local=True, **folders)
    first = component.python_func(run.to_json())
    source.write_bytes(DATA + DATA)
    checkpoint = run.models_dir / "checkpoints" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete.json").write_text("{}")
    with pytest.raises(SystemExit):
        component.python_func(run.to_json())
    assert Path(first).read_bytes() == DATA
    shutil.rmtree(run.models_dir)
    assert Path(component.python_func(run.to_json())).read_bytes() == DATA + DATA


def test_local_file(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(DATA)
    first = fetch_dataset(str(source), target, sha256=SHA256)
    assert (first.path, first.revision, first.bytes, first.sha256, first.reused) == (
        target / "data.jsonl", None, len(DATA), SHA256, False)  # fmt: skip
    assert_complete(target)
    before = {path: path.stat().st_mtime_ns for path in [target, *target.iterdir()]}
    again = fetch_dataset(str(source), target, sha256=SHA256)
    assert again.reused and again.path == first.path and again.sha256 == SHA256
    assert before == {path: path.stat().st_mtime_ns for path in [target, *target.iterdir()]}
    source.write_bytes(b"changed\n")
    with pytest.raises(UserError, match=f"differs from the file that this run was trained on.*{SHA256}"):
        fetch_dataset(str(source), target, keep=True)
    assert before == {path: path.stat().st_mtime_ns for path in [target, *target.iterdir()]}
    assert {path.name for path in tmp_path.iterdir()} == {source.name, target.name}
    assert not fetch_dataset(str(source), target).reused
    assert_complete(target, content=b"changed\n")


def test_a_change_that_keeps_size_and_time_is_seen(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(DATA)
    before = source.stat()
    fetch_dataset(str(source), target)
    source.write_bytes(DATA[::-1])
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not fetch_dataset(str(source), target).reused
    assert_complete(target, content=DATA[::-1])


def test_a_file_that_grows_while_it_is_read(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(DATA)

    def grow(*_: object) -> None:
        with source.open("ab") as file:
            file.write(b"x")

    monkeypatch.setattr("tailtune.progress.Progress.update", grow)
    with pytest.raises(UserError, match=r"data\.jsonl was changed while it was read; wait until it is complete"):
        fetch_dataset(str(source), target)
    assert not target.exists()


def test_embedded(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "image").mkdir()
    monkeypatch.setenv("TAILTUNE_EMBEDDED_DIR", str(tmp_path / "image"))
    (tmp_path / "image" / "README.md").write_text("#")
    with pytest.raises(UserError, match=r"exactly one data file .* found 0 \(none\); build the image with one"):
        fetch_dataset("embedded", target)
    (tmp_path / "image" / "data.jsonl").write_bytes(DATA)
    assert fetch_dataset("embedded", target).source == "embedded"
    assert_complete(target)
    (tmp_path / "image" / "more.csv").write_text("a")
    with pytest.raises(UserError, match=r"found 2 \(data.jsonl, more.csv\)"):
        fetch_dataset("embedded", target)
    assert_complete(target)


def test_hub_dataset(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"README.md": b"#", "dataset_infos.json": b"{}", "data/data.jsonl": DATA}
    server.add_repo("datasets", "owner/name", files)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    fetched = fetch_dataset("hf://datasets/owner/name", target)
    assert (fetched.revision, fetched.sha256) == (COMMIT, SHA256)
    assert_complete(target)
    assert all(headers["authorization"] == "Bearer hf_test" for _, _, headers in server.requests)
    num_requests = len(server.requests)
    assert fetch_dataset("hf://datasets/owner/name", target).reused
    assert len(server.requests) == num_requests, "the commit is pinned, so there is no further query"


def test_hub_dataset_with_revision_and_file(server: Server, target: Path) -> None:
    server.add_repo("datasets", "owner/name", {"a.csv": b"a,b\n", "data.jsonl": DATA})
    assert fetch_dataset(f"hf://datasets/owner/name@{COMMIT}/data.jsonl", target).revision == COMMIT
    assert_complete(target)


def names_of(directory: Path) -> list[str]:
    """The fetched files' names, in the manifest's order."""
    published = read_manifest(directory)
    assert published is not None
    return [file["file"] for file in published["facts"]["files"]]


def test_several_sources_of_every_kind_keep_their_order(server: Server, tmp_path: Path, target: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    for name in ("b.jsonl", "deep/a.jsonl", "deep/notes.md", ".hidden.jsonl"):
        (folder / name).write_bytes(DATA)
    for name in ("part-2.csv", "part-1.csv", "other.csv"):
        (tmp_path / name).write_bytes(b"a\n1\n")
    server.add_repo("datasets", "owner/name", {"hub.jsonl": DATA})
    sources = [f"{tmp_path}/part-*.csv", str(folder), "hf://datasets/owner/name", str(tmp_path / "other.csv")]
    fetched = fetch_dataset(sources, target, validation_source=str(folder / "b.jsonl"))
    assert fetched.path == target
    assert names_of(target) == [
        f"{number:04}-{name}" for number, name in enumerate(
            ["part-1.csv", "part-2.csv", "b.jsonl", "a.jsonl", "hub.jsonl", "other.csv", "b.jsonl"])]  # fmt: skip
    published = read_manifest(target)
    assert published is not None
    files = published["facts"]["files"]
    assert [file["side"] for file in files] == ["train"] * 6 + ["validation"]
    assert [file["revision"] for file in files] == [None] * 4 + [COMMIT] + [None] * 2
    assert published["facts"]["bytes"] == sum(path.stat().st_size for path in target.iterdir()) - (
        target / "manifest.json").stat().st_size  # fmt: skip
    assert fetch_dataset(sources, target, validation_source=str(folder / "b.jsonl")).reused
    assert not fetch_dataset(sources, target).reused and len(names_of(target)) == 6
    (folder / "c.jsonl").write_bytes(DATA)
    assert not fetch_dataset(sources, target).reused, "a new file in a directory is fetched"
    assert "0003-c.jsonl" in names_of(target)
    with pytest.raises(UserError, match="differs from the file that this run was trained on"):
        fetch_dataset(sources[:1], target, keep=True)


def test_what_arrived_of_several_files_is_kept(server: Server, target: Path) -> None:
    server.replies["/one.jsonl"] = Reply(DATA)
    server.replies["/two.jsonl"] = Reply(DATA, statuses=[404])
    sources = [f"{server.url}/one.jsonl", f"{server.url}/two.jsonl"]
    with pytest.raises(UserError, match=r"two\.jsonl answered 404"):
        fetch_dataset(sources, target)
    assert not target.exists()
    fetch_dataset(sources, target)
    assert server.ranges("/one.jsonl") == [None, None], "only its version was asked for"
    assert names_of(target) == ["0000-one.jsonl", "0001-two.jsonl"]


@pytest.mark.parametrize("etag", ['"v2"', None])
def test_a_file_that_changed_while_another_failed_is_not_kept(server: Server, target: Path, etag: str | None) -> None:
    server.replies["/one.jsonl"] = Reply(DATA, etag=etag and '"v1"')
    server.replies["/two.jsonl"] = Reply(DATA, statuses=[404])
    sources = [f"{server.url}/one.jsonl", f"{server.url}/two.jsonl"]
    with pytest.raises(UserError, match=r"two\.jsonl answered 404"):
        fetch_dataset(sources, target)
    server.replies["/one.jsonl"] = Reply(DATA[::-1], etag=etag)
    fetch_dataset(sources, target)
    assert (target / "0000-one.jsonl").read_bytes() == DATA[::-1]
    published = read_manifest(target)
    assert published is not None
    assert published["facts"]["files"][0]["sha256"] == hashlib.sha256(DATA[::-1]).hexdigest()


def test_files_whose_names_look_like_numbered_ones_stay_apart(tmp_path: Path, target: Path) -> None:
    folder = tmp_path / "folder"
    contents = {"x/a.jsonl": b"1\n", "y/a.jsonl": b"2\n", "z/0000-a.jsonl": b"3\n", "z/0001-a.jsonl": b"4\n"}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    fetch_dataset(str(folder), target)
    assert [(target / name).read_bytes() for name in names_of(target)] == list(contents.values())


CONFIGS = {
    "configs": [
        {"config_name": "small", "data_files": [{"split": "train", "path": "small/train-*.jsonl"},
                                                {"split": "test", "path": ["small/test.jsonl"]}]},
        {"config_name": "large", "data_dir": "large"},
    ]
}  # fmt: skip
FILES = ("small/train-1.jsonl", "small/train-0.jsonl", "small/test.jsonl", "large/a.jsonl", "large/b.jsonl")


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("?config=small&split=train", ["train-0.jsonl", "train-1.jsonl"]),
        ("?config=small&split=test", ["test.jsonl"]),
        ("?config=large", ["a.jsonl", "b.jsonl"]),
        ("?config=large&split=train", ["a.jsonl", "b.jsonl"]),
        ("/large", ["a.jsonl", "b.jsonl"]),
        ("/small/*[0-9].jsonl", ["train-0.jsonl", "train-1.jsonl"]),
        ("/**/*a*.jsonl", ["a.jsonl", "train-0.jsonl", "train-1.jsonl"]),
        ("/small?split=test", ["test.jsonl"]),
        (f"@{COMMIT}?config=small&split=test", ["test.jsonl"]),
    ],
)
def test_configuration_and_split_of_a_hub_dataset(query: str, names: list[str], server: Server, target: Path) -> None:
    server.add_repo("datasets", "owner/name", dict.fromkeys(FILES, DATA), card=CONFIGS)
    fetch_dataset(f"hf://datasets/owner/name{query}", target)
    assert [name.split("-", 1)[1] if len(names) > 1 else name for name in names_of(target)] == names


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", r"has 2 configurations \(small, large\); choose one: hf://datasets/owner/name\?config=small$"),
        ("?split=test", r"has 2 configurations .*; choose one: hf://datasets/owner/name\?config=small&split=test$"),
        ("?config=smal", r"has no configuration 'smal', did you mean 'small'\?; it has small, large; correct"),
        ("?config=small", r"has 2 splits \(train: small/train-0.jsonl, small/train-1.jsonl, test: small/test.jsonl\); "
                          r"choose one: hf://datasets/owner/name\?config=small&split=train$"),
        ("?config=small&split=dev", r"has no split 'dev'; it has train: .*, test: .*; correct \?split="),
        ("?subset=small", r"'subset' is not known after '\?'; write \?config=NAME&split=NAME"),
        ("?config=small&config=large", "names a configuration or a split twice; give each of them as a source"),
        ("/large?config=small", r"name/large names files, and \?config=small as well; leave one of them out$"),
        ("/[z-a].jsonl", r"'\[z-a\]\.jsonl' is not a pattern; write ranges in ascending order, as \[a-z\]$"),
        ("/small", r"has 2 splits \(train: .*choose one: hf://datasets/owner/name/small\?split=train$"),
    ],
)  # fmt: skip
def test_a_choice_that_is_missing_or_wrong_lists_what_there_is(
    query: str, words: str, server: Server, target: Path
) -> None:
    server.add_repo("datasets", "owner/name", dict.fromkeys(FILES, DATA), card=CONFIGS)
    with pytest.raises(UserError, match=words):
        fetch_dataset(f"hf://datasets/owner/name{query}", target)
    assert_nothing(target)


@pytest.mark.parametrize(
    "config",
    [
        {"data_files": "./b.jsonl"},
        {"config_name": "default", "data_files": [{"path": "./deep//../b.jsonl"}]},
        {"data_dir": "./deep", "data_files": "../b.jsonl"},
    ],
    ids=str,
)
def test_a_card_may_leave_out_names_and_write_paths_as_it_likes(config: dict[str, Any]) -> None:
    card = {"configs": [config]}
    assert choose_files(["a.jsonl", "b.jsonl"], Wanted("x"), card) == ["b.jsonl"]
    assert choose_files(["a.jsonl", "b.jsonl"], Wanted("x", config="default", split="train"), card) == ["b.jsonl"]


def test_a_card_of_the_whole_data_set_leaves_its_folder_out() -> None:
    assert choose_files(["a.jsonl", "b.jsonl"], Wanted("x"), {"configs": [{"data_dir": "."}]}) == ["a.jsonl", "b.jsonl"]


def test_a_card_of_the_old_form_names_configurations_only() -> None:
    assert choose_files(["a.jsonl", "b.jsonl"], Wanted("x"), {"configs": ["en", "de"]}) == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["chats.jsonl", "eval.jsonl"], r"1 split \(test: eval.jsonl\), and files that belong to none \(chats.jsonl\)"),
        (["train.jsonl", "extra.jsonl"], r"1 split \(train: train.jsonl\), and files that .* \(extra.jsonl\)"),
        (["dev/a.jsonl", "prod/b.jsonl"], r"1 split \(validation: dev/a.jsonl\), and .* \(prod/b.jsonl\)"),
        (["train.csv", "test.csv", "new.csv"], r"2 splits \(train: train.csv, test: test.csv\), and .* \(new.csv\)"),
        (["data/train-00000-of-00001.parquet", "more.parquet"], r"1 split .*, and .* \(more.parquet\)"),
        (["Train.jsonl", "Test.jsonl"], r"2 splits \(train: Train.jsonl, test: Test.jsonl\)"),
        (["trainset/a.csv", "testset/a.csv"], r"2 splits \(train: trainset/a.csv, test: testset/a.csv\)"),
        (["TRAINS.csv", "devset.csv"], r"2 splits \(train: TRAINS.csv, validation: devset.csv\)"),
    ],
    ids=str,
)
def test_no_file_is_left_out_unless_a_split_is_chosen(names: list[str], found: str) -> None:
    with pytest.raises(UserError, match=rf"^hf://x has {found}; choose one: hf://x\?split="):
        choose_files(names, Wanted("hf://x"))
    with pytest.raises(UserError, match=r"^hf://x/f has \d split.*; choose one: hf://x/f\?split="):
        choose_files([f"f/{name}" for name in names], Wanted("hf://x/f", "f"))
    split = next(iter(find_splits(names)))
    assert choose_files(names, Wanted("hf://x", split=split)) == find_splits(names)[split]


def test_how_to_choose_where_files_are_of_no_split(tmp_path: Path) -> None:
    names = ["train.csv", "new.csv"]
    with pytest.raises(UserError, match=r"; choose one: hf://x\?split=train, or append a file's name or a pattern$"):
        choose_files(names, Wanted("hf://x"))
    assert choose_files(names, Wanted("hf://x", "*.csv")) == sorted(names)
    for name in ("chats.jsonl", "eval.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=rf"; name the files, .* for example {tmp_path}/eval.jsonl$"):
        local_files(str(tmp_path))
    assert local_files(f"{tmp_path}/*.jsonl") == [tmp_path / "chats.jsonl", tmp_path / "eval.jsonl"]


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        ["default/train-00000-of-00002.parquet", "default/train-00001-of-00002.parquet"],
        ["default/train/0000.parquet", "default/train/0001.parquet"],
        ["default/0000.parquet", "default/0001.parquet"],
        ["data/de-00000-of-00002.parquet", "data/de-00001-of-00002.parquet"],
        ["test/a.csv", "test/b.csv"],
        ["a.jsonl", "b.NDJSON", "c.ndjson.gz", "d.json.ZST"],
    ],
    ids=str,
)
def test_a_data_set_of_one_split_is_read_whole(names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    beside = [".gitattributes", "README.md", "LICENSE", "license.txt", "_SUCCESS", "load.py", ".git/x.json"]
    beside += ["dataset_infos.json", "requirements.txt", "data/dataset_info.json", "data/.part.jsonl"]
    assert choose_files([*names, *beside], Wanted("x")) == sorted(names)
    assert "read" not in caplog.text


@pytest.mark.parametrize("path", ["", "*", "deep"])
def test_files_that_are_passed_over_are_said(path: str, caplog: pytest.LogCaptureFixture) -> None:
    names = ["a.jsonl", "c.tsv", "d.jsonl.bz2", "README.md"]
    names = [f"deep/{name}" for name in names] if path == "deep" else names
    chosen = choose_files(names, Wanted("s3://b/f", path))
    assert chosen == names[:1]
    words = "fetch: s3://b/f: only .json, .jsonl, .csv, .txt or .parquet files are read, not"
    assert caplog.messages == [f"{words} {names[1]}, {names[2]}"]


@pytest.mark.parametrize("beside", ["state.json", "_delta_log/000.json", "_SUCCESS", ".cache/a.json"])
def test_what_stands_beside_the_data_is_none(beside: str, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_files([beside, "part-0.parquet"], Wanted("s3://b/f")) == ["part-0.parquet"]
    with pytest.raises(UserError, match=r"s3://b/f contains no .* file"):
        choose_files([beside, "data.arrow"], Wanted("s3://b/f"))


def test_a_card_may_name_the_whole_data_set() -> None:
    card = {"configs": [{"config_name": "all", "data_files": [{"split": "train", "path": "./"}]}]}
    assert choose_files(["a.csv", "b/c.csv"], Wanted("hf://datasets/o/n"), card) == ["a.csv", "b/c.csv"]


LAYOUTS = [
    ["train.jsonl", "test.jsonl", "README.md"],
    ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/extra_set-00000-of-00001.parquet"],
    ["my_train_0.csv", "my-train-1.csv", "my.valid.csv", "other.csv"],
    ["training/a.csv", "training/b.csv", "dev/a.csv", "eval/x.csv"],
    ["de_train/a.csv", "de_train/b.csv", "test-2/a.csv"],
    ["trainer.csv", "latest.csv", "contest.csv"],
    ["a.csv", "b/c.csv"],
    ["train-test.csv", "val.csv"],
    ["train/test.csv", "validation.csv"],
]


@pytest.mark.parametrize("names", LAYOUTS, ids=lambda names: names[0])
def test_splits_are_those_that_the_datasets_library_finds(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = DataFilesDict.from_patterns(get_data_patterns(str(tmp_path)), str(tmp_path))
    assert {split: sorted(files) for split, files in find_splits(sorted({*names} - {"README.md"})).items()} == {
        str(split): sorted({Path(file).relative_to(tmp_path).as_posix() for file in files})
        for split, files in expected.items()
    }


def test_a_cut_of_a_hub_dataset_is_resumed(server: Server, target: Path) -> None:
    server.add_repo("datasets", "owner/name", {"data.jsonl": DATA})
    path = f"/datasets/owner/name/resolve/{COMMIT}/data.jsonl"
    server.replies[path].cuts = [100_000]
    fetch_dataset("hf://datasets/owner/name", target)
    assert server.ranges(path) == [None, "bytes=100000-"]
    assert_complete(target)


def test_damaged_hub_file(server: Server, target: Path) -> None:
    server.add_repo("datasets", "owner/name", {"data.parquet": DATA})
    server.replies[f"/datasets/owner/name/resolve/{COMMIT}/data.parquet"].body = DATA[::-1]
    with pytest.raises(UserError, match=r"arrived with sha256 .*, the hub says .*; run the step again"):
        fetch_dataset("hf://datasets/owner/name", target)
    assert_nothing(target)


def test_a_failure_keeps_the_earlier_data(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(DATA)
    fetch_dataset(f"{server.url}/data.jsonl", target)
    with pytest.raises(UserError, match="404"):
        fetch_dataset(f"{server.url}/other.jsonl", target)
    assert_complete(target)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param("{tmp}/missing.jsonl", "missing.jsonl does not exist; give the path of a file", id="missing"),
        pytest.param("{tmp}/docs", r"docs contains no .json, .jsonl, .csv, .txt or .parquet file", id="directory"),
        pytest.param("{tmp}/*.csv", r"\*.csv does not exist", id="glob"),
        pytest.param("{tmp}/empty.jsonl", r"empty.jsonl is empty \(0 bytes\)", id="empty"),
        pytest.param("ftp://host/data.csv", r"'ftp://' is not supported; use hf://datasets/", id="scheme"),
        pytest.param("hf://datasets/owner", "Write hf://datasets/OWNER/NAME", id="hf-syntax"),
        pytest.param("hf://owner/model", "is not a dataset; write hf://datasets", id="hf-model"),
        pytest.param("s3://bucket", "names no object; write s3://BUCKET/KEY", id="s3-bucket-only"),
        pytest.param("http://", "cannot be fetched.*check the address", id="no-host"),
    ],
)
def test_bad_sources(tmp_path: Path, target: Path, source: str, words: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").touch()
    with pytest.raises(UserError, match=words):
        fetch_dataset(source.format(tmp=tmp_path), target)
    assert_nothing(target)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param("missing", r"owner/missing is not on the hub .*check the name.*HF_TOKEN", id="missing"),
        pytest.param("name@v9", "has no such revision on the hub", id="revision"),
        pytest.param("name/x.csv", "x.csv has no such file on the hub", id="file"),
        pytest.param("none", "contains no .json, .jsonl, .csv, .txt or .parquet file", id="none"),
        pytest.param("gated", r"is gated: accept its licence at .*/owner/gated, .*HF_TOKEN", id="gated"),
        pytest.param("token", r"is refused by the hub .*401\); check HF_TOKEN", id="bad-token"),
    ],
)
def test_hub_dataset_refusals(server: Server, target: Path, source: str, words: str) -> None:
    server.add_repo("datasets", "owner/name", {"data.csv": b"a"})
    server.add_repo("datasets", "owner/none", {"README.md": b"#"})
    server.add_repo("datasets", "owner/gated", {"data.csv": b"a"}, refuse=(403, "GatedRepo"))
    server.add_repo("datasets", "owner/token", {"data.csv": b"a"}, refuse=(401, ""))
    with pytest.raises(UserError, match=words):
        fetch_dataset(f"hf://datasets/owner/{source}", target)
    assert_nothing(target)


SHA = b'{"id": "owner/name", "sha": "' + COMMIT.encode() + b'", "siblings": '


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            b"<!doctype html><p>Log in",
            r"does not answer as a hub: Expecting value.*check HF_ENDPOINT and the proxy",
        ),
        (b"", "does not answer as a hub"),
        (b"[]", "does not answer as a hub"),
        (b"{}", "does not answer as a hub"),
        (b"[" * 100_000, "does not answer as a hub"),
        (b"1" * 5000, "does not answer as a hub"),
        (b'{"id": "owner/name", "sha": "../../x", "siblings": []}', "does not answer as a hub: it names no commit"),
        (SHA + b"5}", "does not answer as a hub"),
        (SHA + b'[{"rfilename": 5}]}', "does not answer as a hub: it lists a file without a sound name and size"),
        (SHA + b'[{"rfilename": "a\\u0000.jsonl"}]}', "it lists a file without a sound name and size"),
        (SHA + b'[{"rfilename": "\\ud800.jsonl"}]}', "it lists a file without a sound name and size"),
        (SHA + b'[{"rfilename": "a.jsonl", "size": "x"}]}', "it lists a file without a sound name and size"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value[:60]),
)
def test_a_server_that_is_no_hub(answer: bytes, words: str, server: Server, target: Path) -> None:
    for kind in ("datasets", "models"):
        for path in ("", "/revision/main"):
            server.replies[f"/api/{kind}/owner/name{path}"] = Reply(answer, content_type="text/html")
    with pytest.raises(UserError, match=words):
        fetch_dataset("hf://datasets/owner/name", target)
    with pytest.raises(UserError, match=words):
        fetch_model("owner/name", target)
    assert_nothing(target)


@pytest.mark.parametrize("configs", [7, [{"data_files": 5}], [{"data_files": [{"path": 5}, {"path": 6}]}]], ids=str)
def test_a_card_that_cannot_be_read(configs: Any, server: Server, target: Path) -> None:
    server.add_repo("datasets", "owner/name", {"a.jsonl": DATA, "b.jsonl": DATA}, card={"configs": configs})
    with pytest.raises(UserError, match="card has configurations that cannot be read; append a file's name or a"):
        fetch_dataset("hf://datasets/owner/name", target)
    assert fetch_dataset("hf://datasets/owner/name/a.jsonl", target).bytes


@pytest.mark.parametrize("token", ["hf_é", "hf a", "hf\x7f"])
def test_a_token_that_is_none(token: str, server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=r"the hub's token contains a space or another character .*; correct HF_TOKEN"):
        fetch_dataset("hf://datasets/owner/name", target)
    assert not server.requests


@pytest.mark.parametrize("address", ["not a url", "http://", "ftp://x", "https://[::1", f"https://{'x' * 70}.org"])
def test_addresses_of_servers_that_are_none(address: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(UserError, match=r"HF_ENDPOINT is '.*', which is no address; write https://HOST\[:PORT\]"):
        fetch_dataset("hf://datasets/owner/name", target)
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(UserError, match=r"AWS_ENDPOINT_URL or AWS_S3_ENDPOINT is '.*', which is no address"):
        fetch_dataset("s3://bucket/data.jsonl", target)
    assert_nothing(target)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/a%00b.jsonl", "a_b.jsonl"),
        ("/a%0Ab.jsonl", "a_b.jsonl"),
        ("/" + "x" * 254 + ".jsonl", "x" * 194 + ".jsonl"),
        ("/" + "%C3%A9" * 120 + ".jsonl", "é" * 97 + ".jsonl"),
        ("/a%2F..%2F..", "data"),
    ],
)
def test_names_that_no_file_can_have(path: str, name: str, server: Server, target: Path) -> None:
    server.replies[path] = Reply(DATA)
    assert fetch_dataset(server.url + path, target).path.name == name


@pytest.mark.parametrize("disk", ["full", "read-only"])
def test_a_disk_that_takes_nothing(disk: str, small_disk: Path, tmp_path: Path) -> None:
    """In the parquet step; what is left does not look complete to the next start."""
    source = tmp_path / "data.jsonl"
    rows = ({"a": hashlib.sha512(str(i).encode()).hexdigest()} for i in range(20_000))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {
        "full": r"no space in .*disk: what is written does not fit, 2\d\d,\d+ bytes are free; remove old runs",
        "read-only": r"cannot read or write .*disk.*Read-only file system.*; check the volume's access mode",
    }[disk]
    if disk == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=words):
        write_parquet(source, small_disk / "parquet", data_of({"a": "{a}"}))
    assert list(small_disk.iterdir()) == []


def test_a_hub_that_stops_answering_is_given_up(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HUB_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(hub, "HUB_GIVE_UP_SECONDS", 0.3)
    server.replies["/api/datasets/owner/name"] = Reply(b"{}", pause_after=1)
    with pytest.raises(UserError, match="could not be fetched"):
        fetch_dataset("hf://datasets/owner/name", target)
    assert len(server.requests) == 2
