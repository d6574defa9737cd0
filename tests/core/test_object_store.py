"""Local copies of objects, from a real server of S3 on the loopback interface, and the errors of URLs in a job."""

from __future__ import annotations

import errno
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.object_server import Server
from tests.packages import needs
from titan_launch.config.loading.load import dump_job, load_job
from titan_launch.core import object_store
from titan_launch.core.errors import RunError, UserError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.core.object_store import ObjectStore, StoredObject, StoreError, is_url, local_copy

pytestmark = needs("moto", "s3fs")


@pytest.fixture
def server(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    """A server without objects, an empty cache, and short pauses before a request is repeated."""
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "_URLS", {})
    monkeypatch.setattr(object_store, "_WAITS_S", (0.01, 0.01))
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    return server


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which copies this process uses, as a new process would."""
    monkeypatch.setattr(object_store, "_URLS", {})


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_these_texts_are_urls_of_stores() -> None:
    texts = ("s3://bucket/a", "gs://bucket", "s3://", "s3:/bucket", "http://host/a", "memory://a", "a", "S3://bucket")
    assert [is_url(text) for text in texts] == [True, True, False, False, False, False, False, False]


def test_a_folder_is_transferred_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"a": b"first", "below/b.bin": b"second" * 1000, "files.json": b"{}", "a.partial": b""}
    for name, content in files.items():
        server.put(f"data/set/{name}", content)
    server.put("data/set/below/", b"")  # a folder, as some programs write it
    server.put("data/settings", b"another")
    copy = local_copy("s3://bucket/data/set")
    assert copy.name == "set" and contents(copy) == files
    said = capsys.readouterr().err
    assert said.startswith("copying s3://bucket/data/set (4 objects, 0.0 MB) to ") and len(said.splitlines()) == 1
    forget(monkeypatch)
    assert local_copy("s3://bucket/data/set") == copy and not capsys.readouterr().err
    server.put("data/set/a", b"FIRST")
    assert local_copy("s3://bucket/data/set") == copy, "one process uses one version"
    forget(monkeypatch)
    assert contents(local_copy("s3://bucket/data/set")) == {**files, "a": b"FIRST"}
    assert contents(copy) == files


def test_one_object_is_a_file(server: Server) -> None:
    server.put("texts/story.txt", b"a story")
    copy = local_copy("s3://bucket/texts/story.txt")
    assert copy.name == "story.txt" and copy.read_bytes() == b"a story"


def test_slashes_at_the_end_of_a_url_have_no_effect(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.put("set/a", b"first")
    copy = local_copy("s3://bucket/set//")
    assert object_store.with_urls(str(copy)) == "s3://bucket/set"
    forget(monkeypatch)
    assert local_copy("s3://bucket/set") == copy == local_copy("s3://bucket/set/")


def test_an_object_that_is_also_a_folder_is_an_error(server: Server, tmp_path: Path) -> None:
    for name in ("set/a", "set/a.b", "set/a/b/c"):
        server.put(name, b"content")
    reason = "it has the objects a and a/b/c, but a file cannot also be a folder; rename one of them"
    with pytest.raises(StoreError, match=f"^{reason}$"):
        local_copy("s3://bucket/set")
    assert not (tmp_path / "cache").exists()


def test_credentials_in_a_url_are_refused() -> None:
    with pytest.raises(StoreError, match=r"^a URL must have no credentials; set them in the environment$"):
        local_copy("s3://user:secret@bucket/set")


def test_lost_connections_are_repeated(server: Server) -> None:
    content = bytes(range(256)) * 4000
    server.put("large", content)
    server.proxy.cut(up=False, after=300_000, times=2)
    assert local_copy("s3://bucket/large").read_bytes() == content


def test_a_server_that_neither_reads_nor_answers_is_an_error(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is larger than the buffers of the connection."""
    monkeypatch.setattr(object_store, "_STALLED_S", 0.3)
    file = tmp_path / "file"
    file.write_bytes(bytes(30_000_000))
    store = ObjectStore("s3://bucket/set")
    assert store.listing() == {}
    server.proxy.stalls = True
    with pytest.raises(StoreError, match=r"^the request failed \(TimeoutError: no bytes in 0.3 s\); check the "):
        store.put(file, "a")
    server.proxy.calm()
    monkeypatch.setattr(object_store, "_STALLED_S", 60.0)
    store.put(file, "a")
    assert store.listing()["a"].size == 30_000_000


def test_an_interrupted_transfer_goes_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcdef":
        server.put(f"set/{name}", name.encode() * 100_000)
    get, got = ObjectStore.get, list[str]()

    def get_until_the_network_fails(store: ObjectStore, name: str, target: Path) -> None:
        if got == [*"abc"]:
            server.proxy.cut_all()
        got.append(name)
        get(store, name, target)

    monkeypatch.setattr(ObjectStore, "get", get_until_the_network_fails)
    monkeypatch.setattr(object_store, "_CONNECTIONS", 1)
    with pytest.raises(StoreError, match=r"^the request failed \(\w+: "):
        local_copy("s3://bucket/set")
    server.proxy.calm()
    assert got[:4] == [*"abcd"]
    got.clear()
    assert sorted(contents(local_copy("s3://bucket/set"))) == [*"abcdef"]
    assert sorted(got) == [*"def"]


def test_an_object_that_arrives_with_other_bytes_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.put("set/a", b"12345678")
    listing = ObjectStore.listing
    for size, etag in ((9, "0" * 32), (8, "0" * 32)):
        other = StoredObject(size, etag)
        monkeypatch.setattr(ObjectStore, "listing", lambda store, other=other: dict.fromkeys(listing(store), other))
        if size == 8:  # two equal copies: the ETag is no MD5 digest
            assert contents(local_copy("s3://bucket/set")) == {"a": b"12345678"}
        else:
            with pytest.raises(StoreError, match=r"^a arrived damaged three times: .* \(last size: 8 of 9 bytes\); "):
                local_copy("s3://bucket/set")


def test_a_file_that_may_not_be_written_is_an_error_of_the_cache(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write every file, so the error is raised here."""

    async def refuse(files: Any, remote: str, local: str, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", local)

    server.put("set/a", b"content")
    monkeypatch.setattr("s3fs.S3FileSystem._get_file", refuse)
    reason = r"^the cache of prepared data cannot be written \(.*/partial/set/a: Permission denied\); set the "
    with pytest.raises(UserError, match=reason):
        local_copy("s3://bucket/set")


@pytest.mark.parametrize("name", ["../outside", "below/../../outside", "/absolute", "below//empty"])
def test_names_that_lead_out_of_the_folder_are_refused(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server may list any name, so the names are those of a changed answer."""
    monkeypatch.setattr(ObjectStore, "listing", lambda store: {name: StoredObject(1, "")})
    with pytest.raises(StoreError, match=f"^no file can have the name of the object {name}; rename the object$"):
        local_copy("s3://bucket/set")
    assert not (tmp_path / "cache").exists()


def job_file(folder: Path, **sections: Any) -> str:
    """Write a job file, and return its path."""
    path = folder / "job.json"
    path.write_text(json.dumps(sections))
    return str(path)


def error_of(path: str) -> str:
    """Return the error of a job."""
    with pytest.raises(UserError) as caught:
        load_job(path)
    return str(caught.value)


def test_a_job_has_local_copies_and_records_their_urls(server: Server, tmp_path: Path) -> None:
    server.put("texts/a.txt", b"text " * 1000)
    path = job_file(tmp_path, data={"kind": "text", "path": ["s3://bucket/texts", "s3://bucket/texts/a.txt"]})
    config = load_job(path, ["--checkpoint.store=s3://bucket/runs", "--job.name=first"]).config
    assert config.checkpoint.store == "s3://bucket/runs"
    first, second = config.data.path
    assert Path(first, "a.txt").read_bytes() == Path(second).read_bytes() == b"text " * 1000
    recorded = tmp_path / "config.json"
    recorded.write_text(dump_job(config))
    assert json.loads(recorded.read_text())["data"]["path"] == ["s3://bucket/texts", "s3://bucket/texts/a.txt"]
    assert load_job(str(recorded)).config == config
    server.put("empty/model.bin", b"")
    error = error_of(job_file(tmp_path, data={"kind": "jsonl", "path": "s3://bucket/empty"}))
    beginning = f'error: {path}: data.path = "s3://bucket/empty": this folder contains no files that end in '
    assert error.startswith(beginning)


NO_OBJECT = "there is no such object, and no object below it; check the name"
NO_BUCKET = "there is no such object or bucket; check the name"
WILDCARDS = "a URL must have no wildcards; name one object, or the folder of the objects"


@pytest.mark.parametrize(
    ("key", "url", "reason"),
    [
        ("model.weights", "s3://bucket/nothing", NO_OBJECT),
        ("model.weights", "s3://no-such-bucket/weights", NO_BUCKET),
        ("data.path", "s3://bucket/*.txt", WILDCARDS),
        (
            "job.dump_folder",
            "s3://bucket/runs",
            "must be a local folder, because the run writes to it; to copy checkpoints to an object store, set "
            "checkpoint.store",
        ),
        ("compile.cache_folder", "s3://bucket/kernels", "must be a local folder, because the run writes to it"),
        (
            "checkpoint.store",
            "bucket/runs",
            "must be the URL of a folder in an object store: s3://BUCKET/FOLDER or gs://BUCKET/FOLDER",
        ),
    ],
)
def test_a_bad_url_is_one_error(server: Server, tmp_path: Path, key: str, url: str, reason: str) -> None:
    section, name = key.split(".")
    path = job_file(tmp_path, data={"kind": "text", "path": "python-stdlib"})
    with pytest.raises(UserError) as caught:
        load_job(path, [f'--{section}.{name}="{url}"'])
    assert str(caught.value) == f'error: command line: --{key}="{url}": {key} = "{url}": {reason}'


def test_a_missing_package_is_named(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, url, extra in (("s3fs", "s3://bucket/a", "s3"), ("gcsfs", "gs://bucket/a", "gs")):
        monkeypatch.setitem(sys.modules, module, None)
        path = job_file(tmp_path, data={"kind": "text", "path": url})
        reason = f"needs the package {module}, which is not installed: pip install 'titan-launch[{extra}]'"
        assert error_of(path) == f'error: {path}: data.path = "{url}": {reason}'


def test_a_server_whose_name_does_not_resolve_is_named(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid:9")
    path = job_file(tmp_path, data={"kind": "text", "path": "s3://bucket/a"})
    error = error_of(path)
    start = f'error: {path}: data.path = "s3://bucket/a": the name of the server does not resolve ('
    assert error.startswith(start) and error.endswith("); check the endpoint and the network"), error


def test_a_server_that_refuses_connections_is_an_error(server: Server, tmp_path: Path) -> None:
    server.proxy.refuses = True
    path = job_file(tmp_path, data={"kind": "text", "path": "s3://bucket/a"})
    with pytest.raises(RunError, match=r"^data\.path = s3://bucket/a: the request failed \(.*\); check the URL and"):
        load_job(path)


def test_missing_credentials_are_named(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = job_file(tmp_path, data={"kind": "text", "path": "s3://bucket/a"})
    reason = "there are no credentials; set them in the environment, or in the files of the store's tools"
    assert error_of(path) == f'error: {path}: data.path = "s3://bucket/a": {reason}'


def test_missing_rights_are_named(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server checks the rights of a user that has none."""
    iam = server.client("iam")
    iam.create_user(UserName="nobody")
    key = iam.create_access_key(UserName="nobody")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])

    def check_rights(after: str) -> None:
        url, header = f"http://127.0.0.1:{server.port}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        request = urllib.request.Request(url, after.encode(), header)
        urllib.request.urlopen(request).read()

    path = job_file(tmp_path, data={"kind": "text", "path": "s3://bucket/a"})
    check_rights("0")
    try:
        error = error_of(path)
    finally:
        check_rights("inf")
    start = f'error: {path}: data.path = "s3://bucket/a": access is denied ('
    assert error.startswith(start) and error.endswith("); check the credentials, and the rights of their user"), error
