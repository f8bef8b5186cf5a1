"""A small Hugging Face Hub on 127.0.0.1: enough of its API for the real client to publish and to download.

It takes every file as a small one, in the commit itself: where large ones go is the client's own matter.
"""
import base64
import hashlib
import http.server
import json
import re
import threading
from contextlib import contextmanager
from urllib.parse import unquote

TOKEN = 'hf_of_the_test'


def git_blob(content):
    return hashlib.sha1(b'blob %d\0' % len(content) + content).hexdigest()


class Hub:
    """What the server knows.

    Attributes:
        repos: A list of commits per repository, each a dictionary from path to content; the last one is main.
        tags: Number of a commit, by repository and tag.
        requests: Method and path of each request, in order.
        faults: What goes wrong: a pattern of method and path, with the status to answer with, or 'cut' to close the
            connection in the middle of the body.
        etags: ETag of a repository's files, in the place of the right one.
    """

    def __init__(self):
        self.address = ''
        self.clear()

    def clear(self):
        self.repos, self.tags, self.requests, self.faults, self.etags = {}, {}, [], {}, {}

    def number(self, repo, revision):
        """Of a commit; None if there is no such revision."""
        if revision == 'main':
            return len(self.repos[repo]) - 1
        return int(revision, 16) if re.fullmatch('[0-9a-f]{40}', revision) else self.tags.get((repo, revision))

    def oid(self, repo, revision='main'):
        return f'{self.number(repo, revision):040x}'

    # what a request changes, and what it is answered with
    def create(self, body):
        repo = f'{body["organization"]}/{body["name"]}'
        status = 409 if repo in self.repos else 200
        self.repos.setdefault(repo, [{}])
        return status, dict(url=f'{self.address}/{repo}', name=repo, id=repo)

    def validate(self, body):
        return 200, dict(errors=[], warnings=[])

    def preupload(self, body, repo):
        there = {path: git_blob(content) for path, content in self.repos[repo][-1].items()}
        return 200, dict(files=[
            dict(path=file['path'], shouldIgnore=False, oid=there.get(file['path']), uploadMode='regular')
            for file in body['files']])

    def commit(self, body, repo):
        added = [line['value'] for line in body if line['key'] == 'file']
        files = {file['path']: base64.b64decode(file['content']) for file in added}
        self.repos[repo].append({**self.repos[repo][-1], **files})
        return 200, dict(commitUrl=f'{self.address}/{repo}/commit/{self.oid(repo)}', commitOid=self.oid(repo))

    def info(self, body, repo):
        return 200, dict(id=repo, sha=self.oid(repo))

    def refs(self, body, repo):
        tags = [dict(name=tag, ref=f'refs/tags/{tag}', targetCommit=self.oid(repo, tag))
                for name, tag in self.tags if name == repo]
        return 200, dict(branches=[], converts=[], tags=tags)

    def tag(self, body, repo, revision):
        self.tags[repo, body['tag']] = self.number(repo, revision)
        return 200, {}

    def untag(self, body, repo, tag):
        del self.tags[repo, tag]
        return 200, {}


ROUTES = [(re.compile(pattern.replace('REPO', r'([\w.-]+/[\w.-]+)')), answer) for pattern, answer in (
    ('POST /api/repos/create', Hub.create),
    ('POST /api/validate-yaml', Hub.validate),
    ('POST /api/models/REPO/preupload/main', Hub.preupload),
    ('POST /api/models/REPO/commit/main', Hub.commit),
    ('GET /api/models/REPO/revision/main', Hub.info),
    ('GET /api/models/REPO/refs', Hub.refs),
    ('POST /api/models/REPO/tag/(.+)', Hub.tag),
    ('DELETE /api/models/REPO/tag/(.+)', Hub.untag),
)]
FILE = re.compile(r'(?:GET|HEAD) /([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)')


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    hub: Hub

    def do_GET(self):
        request = f'{self.command} {self.path.partition("?")[0]}'
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        if self.headers.get('Transfer-Encoding') == 'chunked':
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        self.hub.requests.append(request)
        fault = next((fault for what, fault in self.hub.faults.items() if re.search(what, request)), None)
        if isinstance(fault, int):
            return self.answer(fault, dict(error=f'fault {fault}'))
        if self.command in ('POST', 'DELETE') and self.headers.get('Authorization') != f'Bearer {TOKEN}':
            return self.answer(401, dict(error='log in'))
        for pattern, answer in ROUTES:
            if match := pattern.fullmatch(request):
                lines = [json.loads(line) for line in body.splitlines()] or [None]
                body = lines if answer is Hub.commit else lines[0]
                return self.answer(*answer(self.hub, body, *map(unquote, match.groups())))
        match = FILE.fullmatch(request)
        return self.file(*map(unquote, match.groups()), fault) if match else self.answer(404, {})

    do_HEAD = do_POST = do_DELETE = do_GET

    def file(self, repo, revision, name, fault):
        number = self.hub.number(repo, revision) if repo in self.hub.repos else None
        if number is None or name not in self.hub.repos[repo][number]:
            return self.answer(404, {}, 'RepoNotFound' if number is None else 'EntryNotFound')
        content = self.hub.repos[repo][number][name]
        etag = self.hub.etags.get(repo, git_blob(content))
        self.send(200, content, {'X-Repo-Commit': f'{number:040x}', 'ETag': f'"{etag}"'}, fault == 'cut')

    def answer(self, status, value, code=''):
        self.send(status, json.dumps(value).encode(), {'X-Error-Code': code, 'Content-Type': 'application/json'})

    def send(self, status, content, headers, cut=False):
        self.send_response(status)
        for name, value in {**headers, 'Content-Length': len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content[:len(content) // 2] if cut else content)
        self.close_connection = self.close_connection or cut

    def log_message(self, *args):
        pass


@contextmanager
def serve():
    """A Hub that lives as long as the block."""
    hub = Hub()
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), type('HubHandler', (Handler,), dict(hub=hub))) as server:
        hub.address = f'http://127.0.0.1:{server.server_port}'
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
