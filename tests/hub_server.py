"""A small Hugging Face Hub: it serves files on 127.0.0.1, and keeps the uploads of a client."""
import hashlib
import http.server
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import unquote

import huggingface_hub


class Hub:
    """Repositories in memory.

    Attributes:
        repos: A list of commits per repository, each a dictionary from path to content; the last one is main.
        tags: Number of a commit, by repository and tag.
        private: Repositories that only their owner can see.
        requests: Method and path of each request, in order.
        status: Status of all answers, None if the files decide.
        api: A client of the Hub that writes here. Its methods have the signatures of the real ones.
    """

    def __init__(self, address):
        self.address, self.repos, self.tags, self.private, self.requests, self.status = address, {}, {}, set(), [], None
        self.api = mock.create_autospec(huggingface_hub.HfApi, instance=True)
        for method in (self.create_repo, self.upload_folder, self.list_repo_refs, self.create_tag, self.delete_tag):
            getattr(self.api, method.__name__).side_effect = method

    def create_repo(self, repo, private, exist_ok):
        self.repos.setdefault(repo, [])
        if private:
            self.private.add(repo)

    def upload_folder(self, repo_id, folder_path, commit_message):
        self.repos[repo_id].append({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})
        return SimpleNamespace(oid=len(self.repos[repo_id]) - 1)

    def list_repo_refs(self, repo):
        tags = [SimpleNamespace(name=tag, target_commit=n) for (name, tag), n in self.tags.items() if name == repo]
        return SimpleNamespace(tags=tags)

    def create_tag(self, repo, tag, revision, exist_ok):
        self.tags.setdefault((repo, tag), revision)

    def delete_tag(self, repo, tag):
        del self.tags[repo, tag]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    hub: Hub

    def do_GET(self):
        """Answer /OWNER/NAME/resolve/REVISION/FILE; other paths do not exist."""
        self.hub.requests.append(f'{self.command} {self.path}')
        owner, name, _, revision, file = (unquote(self.path)[1:].split('/', 4) + 4 * [''])[:5]
        repo = f'{owner}/{name}'
        number = -1 if revision == 'main' else self.hub.tags.get((repo, revision))
        if self.hub.status is not None:
            self.send(self.hub.status, b'', {})
        elif repo not in self.hub.repos or number is None or file not in self.hub.repos[repo][number]:
            self.send(404, b'', {'X-Error-Code': 'EntryNotFound' if repo in self.hub.repos else 'RepoNotFound'})
        else:
            content = self.hub.repos[repo][number][file]
            commit, etag = f'{len(self.hub.repos[repo]):040x}', hashlib.sha1(content).hexdigest()
            self.send(200, content, {'X-Repo-Commit': commit, 'ETag': f'"{etag}"'})

    do_HEAD = do_GET

    def send(self, status, content, headers):
        self.send_response(status)
        for name, value in {'Content-Length': len(content), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@contextmanager
def serve():
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), type('HubHandler', (Handler,), {})) as server:
        server.RequestHandlerClass.hub = hub = Hub(f'http://127.0.0.1:{server.server_port}')
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
