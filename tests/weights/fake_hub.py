"""As much of the Hugging Face hub's HTTP interface as downloads need, on loopback."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """`add` repositories as {file: bytes}; `status` other than 200 makes every answer that failure."""

    def __init__(self):
        self.repos: dict[str, dict[str, bytes]] = {}
        self.status = 200
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.answer()

            def do_GET(self):
                self.answer()

            def answer(self):
                status, headers, body = hub.respond(self.path)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args):
        self.server.shutdown()
        self.server.server_close()

    def add(self, repo, files):
        self.repos[repo] = files

    def respond(self, path):
        path = path.partition("?")[0]
        if path == "/":
            return 200, {}, b""
        if self.status != 200:
            return self.status, {}, b"broken"
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self.api("/".join(parts[2:4]), parts[4:])
        repo, file = "/".join(parts[:2]), "/".join(parts[4:])
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if file not in self.repos[repo]:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        body = self.repos[repo][file]
        return 200, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}, body

    def api(self, repo, rest):
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        files = self.repos[repo]
        if rest[:1] == ["tree"]:
            value = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in files.items()
            ]
        else:
            value = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
