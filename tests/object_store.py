"""An S3 server on this machine (moto) behind a proxy that counts requests and makes them fail."""

import contextlib
import http.client
import http.server
import io
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

BUCKET = "data-bucket"
ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"


@dataclass(frozen=True)
class Request:
    """A request, as a fault sees it."""

    method: str
    path: str
    range: str
    agent: str


@dataclass
class Answer:
    """What the proxy sends in place of, or of, the server's answer."""

    status: int | None = None
    """None: that of the server."""
    code: str = ""
    message: str = "no"
    cut: int | None = None
    """Bytes after which the connection breaks."""
    seconds: float = 0.0
    """Before the answer."""


@dataclass
class ObjectStore:
    """The server, seen from a test."""

    url: str
    client: Any
    """Of boto3, past the proxy."""
    requests: list = field(default_factory=list)
    sent: list = field(default_factory=list)
    """The bytes of the body of each answer."""
    fault: Any = None
    """What to answer to a request instead; None: as the server does."""

    def put(self, key, content):
        if isinstance(content, str):
            content = content.encode()
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def put_folder(self, folder, prefix):
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.put(f"{prefix}/{file.relative_to(folder)}", file.read_bytes())

    def names(self, prefix=""):
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
        return [each["Key"] for each in found]

    def empty(self):
        """Removes all objects and the fault."""
        self.fault = None
        for key in self.names():
            self.client.delete_object(Bucket=BUCKET, Key=key)

    def variables(self):
        """The environment of a process that uses the store."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "hidden-word",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "NO_PROXY": "127.0.0.1",
        }


def once(times, answer, *, of=lambda request: True):
    """A fault of the first so many requests that `of` accepts."""
    left = [times]

    def fault(request):
        if of(request) and left[0] > 0:
            left[0] -= 1
            return answer
        return None

    return fault


def forget():
    """Lets this process ask a store again for what it knows."""
    from launcher.sources import stores

    stores.forget()
    stores._of_process.cache_clear()
    stores._content.cache_clear()


@contextlib.contextmanager
def object_store():
    """Yields an `ObjectStore` with an empty bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    store = ObjectStore("", client)

    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            headers = self.headers
            request = Request(
                self.command, self.path, headers.get("Range", ""), headers.get("User-Agent", "")
            )
            body = self.rfile.read(int(headers.get("Content-Length") or 0))
            store.requests.append(request)
            answer = (store.fault(request) if store.fault else None) or Answer()
            time.sleep(answer.seconds)
            if answer.status is not None:
                data = ERROR.format(answer.code, answer.message).encode()
                self._send(answer.status, {"Content-Type": "application/xml"}, data, len(data))
                return
            upstream = http.client.HTTPConnection(host, port)
            upstream.request(self.command, self.path, body, dict(headers))
            response = upstream.getresponse()
            data = response.read()
            upstream.close()
            length = int(response.headers.get("Content-Length") or len(data))
            kept = {
                key: value
                for key, value in response.headers.items()
                if key.lower() not in ("content-length", "transfer-encoding", "connection")
            }
            if answer.cut is not None:
                self.close_connection = True
                data = data[: answer.cut]
            self._send(response.status, kept, data, length)

        def _send(self, status, headers, data, length):
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                store.sent.append(len(data))
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *arguments):
            """Nothing is printed."""

    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    store.url = f"http://127.0.0.1:{proxy.server_port}"
    try:
        yield store
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.stop()


@contextlib.contextmanager
def web_server(files, *, ranges):
    """A web server with these files (bytes by path, or what returns them; False: it has answered). Yields
    its address and the requests."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            asked.append((self.command, self.path, self.headers.get("Range", "")))
            content = files.get(urlsplit(self.path).path.lstrip("/"))
            if callable(content):
                content = content(self)
            if content is False:
                return
            if content is None:
                self.send_error(404)
                return
            tag, status, extra = f'"{hash(content)}"', 200, {}
            if self.headers.get("If-Match", tag) != tag:
                self.send_error(412)
                return
            total = len(content)
            if ranges and (asked_range := self.headers.get("Range")):
                start, _, end = asked_range.removeprefix("bytes=").partition("-")
                first, last = int(start), min(int(end or total - 1), total - 1)
                content, status = content[first : last + 1], 206
                extra = {"Content-Range": f"bytes {first}-{last}/{total}"}
            self.send_response(status)
            for key, value in {"ETag": tag, **extra, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(OSError):
                    self.wfile.write(io.BytesIO(content).read())

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *arguments):
            """Nothing is printed."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
