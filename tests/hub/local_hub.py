"""A local server with the part of the Hub's HTTP API that pushing and loading a model use.

Repositories are stored in memory: commits with their files, branches, and LFS objects by sha256. `fail` makes requests
fail.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_local"
USER = "me"
LFS_BYTES = 10_000  # the real Hub uses a list of suffixes and sizes


@dataclass
class Repository:
    """A model repository: the files of each commit, and the branches."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    log: list[tuple[str, str, str]] = field(default_factory=list)  # (branch, commit, message)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.log)}{branch}{sorted(files)}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        self.log.append((branch, oid, message))
        return oid

    def resolve(self, revision: str) -> str | None:
        oid = self.branches.get(revision, revision)
        return oid if oid in self.commits else None


class LocalHub:
    """A server that runs while its context is entered.

    Attributes:
        url: The value for HF_ENDPOINT.
        repositories: The repositories, {"user/name": repository}.
        requests: Every request, as "METHOD path".
    """

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.failures: list[tuple[re.Pattern, int | None]] = []
        self.before_commit = None
        self.lock = threading.Lock()

    def __enter__(self) -> "LocalHub":
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def create(self, repo_id: str, private: bool = False, files: dict[str, bytes] | None = None) -> Repository:
        self.repositories[repo_id] = repository = Repository(private)
        repository.commit("main", files or {".gitattributes": b""}, "initial commit")
        return repository

    def fail(self, pattern: str, status: int | None) -> None:
        """Answer requests ("METHOD path") that match with a status, or drop the connection if it is None."""
        self.failures.append((re.compile(pattern), status))

    def head(self, repo_id: str, branch: str = "main") -> str:
        return self.repositories[repo_id].branches[branch]

    def files(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        repository = self.repositories[repo_id]
        return repository.commits[repository.branches[branch]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self):
        path = unquote(urlsplit(self.path).path)
        self.body = (
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "Content-Length" in self.headers
            else self._chunked()
        )
        request = f"{self.command} {path}"
        with self.hub.lock:
            self.hub.requests.append(request)
            failure = next(((p, status) for p, status in self.hub.failures if p.search(request)), None)
        if failure is not None:
            if failure[1] is None:
                self.close_connection = True
                return
            return self._json({"error": "made to fail"}, failure[1])
        for method, pattern, handle in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method.split():
                return handle(self, *match.groups())
        return self._json({"error": f"no such route: {request}"}, 404)

    def _chunked(self) -> bytes:
        body = b""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return body

    def _json(self, value, status=200, **headers):
        self._send(json.dumps(value).encode(), status, **{"Content-Type": "application/json"} | headers)

    def _send(self, body, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _allowed(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._json({"error": "Invalid username or password."}, 401)
        return False

    def _repository(self, repo_id):
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            self._json({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
            return None
        return repository

    def whoami(self):
        if self._allowed():
            self._json({"name": USER, "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def validate_yaml(self):
        is_valid = "\nlicense: not-a-licence\n" not in json.loads(self.body)["content"]
        errors = [] if is_valid else [{"message": '"license" must be one of [...]'}]
        self._json({"errors": errors, "warnings": []}, 200 if is_valid else 400)

    def create_repo(self):
        if not self._allowed():
            return
        requested = json.loads(self.body)
        repo_id = f"{requested.get('organization') or USER}/{requested['name']}"
        url = f"{self.hub.url}/{repo_id}"
        if repo_id in self.hub.repositories:
            return self._json({"error": "You already created this model repo", "url": url}, 409)
        private = requested.get("visibility") == "private" or bool(requested.get("private"))
        self.hub.create(repo_id, private)
        self._json({"url": url, "name": repo_id, "id": repo_id})

    def info(self, repo_id, revision=None):
        repository = self._repository(repo_id)
        if repository is None:
            return
        oid = repository.resolve(revision or "main")
        if oid is None:
            return self._json({"error": "Invalid rev id"}, 404, **{"X-Error-Code": "RevisionNotFound"})
        files = [{"rfilename": name} for name in sorted(repository.commits[oid])]
        names = {"id": repo_id, "modelId": repo_id, "sha": oid}
        self._json(names | {"private": repository.private, "siblings": files, "tags": []})

    def tree(self, repo_id, revision, folder=None):
        repository = self._repository(repo_id)
        if repository is None:
            return
        files = repository.commits.get(repository.resolve(revision) or "", {})
        prefix = f"{folder.strip('/')}/" if folder else ""
        result = [
            {"type": "file", "path": name, "size": len(content), "oid": _compute_blob_id(content)}
            for name, content in sorted(files.items())
            if name.startswith(prefix)
        ]
        if prefix and not result:
            return self._json({"error": "no such folder"}, 404, **{"X-Error-Code": "EntryNotFound"})
        self._json(result)

    def branch(self, repo_id, name):
        repository = self._allowed() and self._repository(repo_id)
        if repository:
            if name in repository.branches:
                return self._json({"error": "Reference already exists"}, 409)
            repository.branches[name] = repository.branches["main"]
            self._json({})

    def preupload(self, repo_id, revision):
        repository = self._allowed() and self._repository(repo_id)
        if not repository:
            return
        existing = repository.commits[repository.resolve(revision)]
        files = []
        for item in json.loads(self.body)["files"]:
            is_lfs = item["size"] > LFS_BYTES or item["path"].endswith(".safetensors")
            content = existing.get(item["path"])
            oid = (
                None
                if content is None
                else hashlib.sha256(content).hexdigest()
                if is_lfs
                else _compute_blob_id(content)
            )
            mode = "lfs" if is_lfs else "regular"
            files.append({"path": item["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": files})

    def lfs_batch(self, repo_id):
        if not self._allowed():
            return
        objects = []
        for item in json.loads(self.body)["objects"]:
            known = item["oid"] in self.hub.objects
            actions = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}", "header": {}}}
            objects.append(item if known else item | {"actions": actions})
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self._json({"error": "the content is not what its name says"}, 400)
        self.hub.objects[oid] = self.body
        self._json({})

    def commit(self, repo_id, revision):
        repository = self._allowed() and self._repository(repo_id)
        if not repository:
            return
        if self.hub.before_commit is not None:
            self.hub.before_commit(repository)
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        parent = repository.branches[revision]
        if header.get("parentCommit") not in (None, parent):
            return self._json({"error": "A commit has happened since. Please refresh and try again."}, 412)
        files = dict(repository.commits[parent])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = repository.commit(revision, files, header["summary"])
        self._json({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}", "commitOid": oid, "success": True})

    def resolve(self, repo_id, revision, name):
        repository = self._repository(repo_id)
        if repository is None:
            return
        oid = repository.resolve(revision)
        if oid is None:
            return self._json({"error": "no such revision"}, 404, **{"X-Error-Code": "RevisionNotFound"})
        content = repository.commits[oid].get(name)
        headers = {"X-Repo-Commit": oid}
        if content is None:
            return self._json({"error": "no such file"}, 404, **headers, **{"X-Error-Code": "EntryNotFound"})
        self._send(content, ETag=f'"{hashlib.sha256(content).hexdigest()}"', **headers)


def _compute_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/validate-yaml", _Handler.validate_yaml),
    ("POST", r"/api/repos/create", _Handler.create_repo),
    ("GET", rf"/api/models/{REPO}/revision/(.+)", _Handler.info),
    ("GET", rf"/api/models/{REPO}/tree/([^/]+)(/.+)?", _Handler.tree),
    ("GET", rf"/api/models/{REPO}", _Handler.info),
    ("POST", rf"/api/models/{REPO}/branch/(.+)", _Handler.branch),
    ("POST", rf"/api/models/{REPO}/preupload/(.+)", _Handler.preupload),
    ("POST", rf"/api/models/{REPO}/commit/(.+)", _Handler.commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/([0-9a-f]{64})", _Handler.lfs_put),
    ("GET HEAD", rf"/{REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
)
