"""A server of S3 on the loopback interface, and a proxy in front of it that cuts connections."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any


class Proxy:
    """A proxy of TCP connections to a port of this host. It counts bytes and the connections that it cuts."""

    def __init__(self, target: int):
        self.refuses = False
        """True closes each new connection at once."""
        self.stalls = False
        """True holds back all bytes."""
        self.bytes_up = self.bytes_down = self.cuts = 0
        self._target = target
        self._lock = threading.Lock()
        self._plans: dict[bool, list[int]] = {True: [], False: []}
        self._act: Callable[[], None] | None = None
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, *, up: bool, after: int, times: int = 1) -> None:
        """Cut the connection that transfers the byte number `after` from now on to the server (`up`) or from it; then
        count anew, `times` times in all."""
        with self._lock:
            self._plans[up] = [after] * times

    def at_upload(self, after: int, act: Callable[[], None]) -> None:
        """Call `act` once when `after` more bytes have been transferred to the server."""
        with self._lock:
            self._plans[True], self._act = [after], act

    def calm(self) -> None:
        """Disturb no more."""
        with self._lock:
            self.refuses = self.stalls = False
            self._act = None
            self._plans = {True: [], False: []}

    def cut_all(self) -> None:
        """Cut the open connections, and refuse new ones."""
        self.refuses = True
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                if self.refuses:
                    raise OSError
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # also after the end of the server
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            for source, sink, up in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=(source, sink, up), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                while self.stalls:
                    time.sleep(0.01)
                length, act = self._allowed(len(data), up)
                sink.sendall(data[:length])
                if act is not None:
                    act()
                if length < len(data):
                    break
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            is_second = source not in self._open
            self._open -= {source, sink}
        if is_second:  # the thread of the other direction has ended
            source.close()
            sink.close()

    def _allowed(self, length: int, up: bool) -> tuple[int, Callable[[], None] | None]:
        """Return how many of the next bytes may pass, and the action that is due after them."""
        with self._lock:
            plan, act = self._plans[up], None
            if plan:
                plan[0] -= length
                if plan[0] <= 0:
                    length += plan.pop(0) - 1
                    self.cuts += 1
                    act, self._act = (self._act, None) if up else (None, self._act)
            length = max(length, 0)
            if up:
                self.bytes_up += length
            else:
                self.bytes_down += length
            return length, act


class Server:
    """A server of S3 in a process of its own, behind a proxy in threads of this process. It has an empty bucket."""

    bucket = "bucket"

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait_until_it_listens()
        self.proxy = Proxy(self.port)
        self.s3 = self.client("s3")
        self.s3.create_bucket(Bucket=self.bucket)

    def client(self, service: str) -> Any:
        """Return a client that does not use the proxy."""
        import boto3

        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        return boto3.client(service, endpoint_url=f"http://127.0.0.1:{self.port}", **keys)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a process that uses the server. Failed requests are repeated by the launcher
        only."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def put(self, name: str, content: bytes) -> None:
        """Write an object."""
        self.s3.put_object(Bucket=self.bucket, Key=name, Body=content)

    def get(self, name: str) -> bytes:
        """Return the content of an object."""
        content: bytes = self.s3.get_object(Bucket=self.bucket, Key=name)["Body"].read()
        return content

    def delete(self, name: str) -> None:
        """Delete an object."""
        self.s3.delete_object(Bucket=self.bucket, Key=name)

    def names(self, below: str = "") -> list[str]:
        """Return the names of all objects whose names begin with `below`, without this beginning."""
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=below)
        return [found["Key"].removeprefix(below) for page in pages for found in page.get("Contents", [])]

    def stop(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionRefusedError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.05)


@contextmanager
def running() -> Iterator[Server]:
    """Run a server during the block."""
    server = Server()
    try:
        yield server
    finally:
        server.stop()


def with_variables(environment: Mapping[str, str], fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function on a rank with further environment variables."""
    os.environ.update(environment)
    return fn(*args)
