"""A hub with one model, on this machine: what huggingface_hub asks of it."""

import contextlib
import hashlib
import http.server
import json
import threading
from collections import Counter
from pathlib import Path

COMMIT = "0123456789012345678901234567890123456789"


@contextlib.contextmanager
def hub(folder: Path, name: str):
    """Serves the files of a folder as a model. Yields its address, and how often each path was asked
    for."""
    asked: Counter[str] = Counter()
    files = {file.name: file.read_bytes() for file in folder.iterdir()}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked[f"{self.command} {self.path.partition('?')[0]}"] += 1
            head, _, file = self.path.partition("/resolve/")
            data, headers = None, {}
            if self.path.startswith(f"/api/models/{name}"):
                about: object = {"id": name, "sha": COMMIT, "siblings": []}
                if "/tree/" in self.path:
                    about = [
                        {"type": "file", "path": each, "size": len(content), "oid": COMMIT}
                        for each, content in files.items()
                    ]
                data = json.dumps(about).encode()
            elif head == f"/{name}":
                data = files.get(file.partition("/")[2])
            if data is None:
                self.send_response(404)
                headers["X-Error-Code"] = "EntryNotFound"
                data = b""
            else:
                self.send_response(200)
                headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
                headers["X-Repo-Commit"] = COMMIT
            for key, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_HEAD = do_GET  # noqa: N815 (the names are those of http.server)

        def log_message(self, *arguments):
            """Nothing is printed."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
