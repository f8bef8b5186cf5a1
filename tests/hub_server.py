"""A small Hugging Face Hub: it serves files on 127.0.0.1, and keeps the uploads of a client."""
import hashlib
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from wsgiref.simple_server import WSGIRequestHandler, make_server

import huggingface_hub


class Hub:
    """Repositories in memory.

    Attributes:
        repos: A list of commits per repository, each a dictionary from path to content; the last one is main.
        tags: Number of a commit, by repository and tag.
        requests: Path of each request, in order.
        status: Status of all answers, None if the files decide.
        api: A client of the Hub that writes here. Its methods have the signatures of the real ones.
    """

    def __init__(self):
        self.repos, self.tags, self.requests, self.status = {}, {}, [], None
        self.api = mock.create_autospec(huggingface_hub.HfApi, instance=True)
        for method in (self.create_repo, self.upload_folder, self.list_repo_refs, self.create_tag, self.delete_tag):
            getattr(self.api, method.__name__).side_effect = method

    def create_repo(self, repo, private, exist_ok):
        self.repos.setdefault(repo, [])

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

    def answer(self, environ, start_response):
        """Answer /OWNER/NAME/resolve/REVISION/FILE by WSGI; other paths do not exist."""
        self.requests.append(environ['PATH_INFO'])
        owner, name, _, revision, file = (environ['PATH_INFO'][1:].split('/', 4) + 4 * [''])[:5]
        repo, content = f'{owner}/{name}', b''
        number = -1 if revision == 'main' else self.tags.get((repo, revision))
        if self.status is not None:
            status, headers = self.status, {}
        elif repo not in self.repos or number is None or file not in self.repos[repo][number]:
            status, headers = 404, {'X-Error-Code': 'EntryNotFound' if repo in self.repos else 'RepoNotFound'}
        else:
            status, content = 200, self.repos[repo][number][file]
            commit, etag = f'{len(self.repos[repo]):040x}', hashlib.sha1(content).hexdigest()
            headers = {'X-Repo-Commit': commit, 'ETag': f'"{etag}"'}
        start_response(f'{status} -', [('Content-Length', str(len(content))), *headers.items()])
        return [b'' if environ['REQUEST_METHOD'] == 'HEAD' else content]


class Quiet(WSGIRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def serve():
    """Serve an empty Hub in a thread, and yield it and its address."""
    hub = Hub()
    with make_server('127.0.0.1', 0, hub.answer, handler_class=Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub, f'http://127.0.0.1:{server.server_port}'
        server.shutdown()
