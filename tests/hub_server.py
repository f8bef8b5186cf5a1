"""A small Hugging Face Hub on 127.0.0.1 with the API that its client needs to publish and download.

Commits contain all files. Separate uploads of large files are the matter of the client.
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
    """State of the server.

    Attributes:
        repos: A list of commits per repository, each a dictionary from path to content; the last one is main.
        tags: Number of a commit, by repository and tag.
        requests: Method and path of each request, in order.
        private: Repositories that only their owner can see.
        faults: Status to answer with, by a pattern of method and path.
    """
    address = ''

    def __init__(self):
        self.clear()

    def clear(self):
        self.repos, self.tags, self.requests, self.private, self.faults = {}, {}, [], set(), {}

    def number(self, repo, revision):
        """Number of a commit; None if there is no such revision."""
        if revision == 'main':
            return len(self.repos[repo]) - 1
        return int(revision, 16) if re.fullmatch('[0-9a-f]{40}', revision) else self.tags.get((repo, revision))

    def answer(self, method, words, lines):
        """Status and value for a request, by the words of its path and the JSON lines of its body."""
        repo, body = '/'.join(words[2:4]), lines[0] if lines else {}
        commits, head = self.repos.get(repo, []), f'{len(self.repos.get(repo, [])) - 1:040x}'
        match method, *words[1:2], *words[4:]:
            case 'POST', 'repos':
                repo = f'{body["organization"]}/{body["name"]}'
                status = 409 if repo in self.repos else 200
                self.repos.setdefault(repo, [{}])
                if body.get('private') or body.get('visibility') == 'private':
                    self.private.add(repo)
                return status, dict(url=f'{self.address}/{repo}', name=repo, id=repo)
            case 'POST', 'validate-yaml':
                return 200, dict(errors=[], warnings=[])
            case 'POST', 'models', 'preupload', 'main':
                return 200, dict(files=[
                    dict(path=path, shouldIgnore=False, uploadMode='regular',
                         oid=git_blob(commits[-1][path]) if path in commits[-1] else None)
                    for path in (file['path'] for file in body['files'])])
            case 'POST', 'models', 'commit', 'main':
                added = [line['value'] for line in lines if line['key'] == 'file']
                commits.append({**commits[-1], **{file['path']: base64.b64decode(file['content']) for file in added}})
                oid = f'{len(commits) - 1:040x}'
                return 200, dict(commitUrl=f'{self.address}/{repo}/commit/{oid}', commitOid=oid)
            case 'GET', 'models', 'revision', 'main':
                return 200, dict(id=repo, sha=head)
            case 'GET', 'models', 'refs':
                return 200, dict(branches=[], converts=[], tags=[
                    dict(name=tag, ref=f'refs/tags/{tag}', targetCommit=f'{number:040x}')
                    for (name, tag), number in self.tags.items() if name == repo])
            case 'POST', 'models', 'tag', revision:
                self.tags[repo, body['tag']] = self.number(repo, revision)
                return 200, {}
            case 'DELETE', 'models', 'tag', tag:
                del self.tags[repo, tag]
                return 200, {}
        return 404, {}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    hub: Hub

    def do_GET(self):
        path = self.path.partition('?')[0]
        words, request = unquote(path)[1:].split('/'), f'{self.command} {path}'
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        if self.headers.get('Transfer-Encoding') == 'chunked':
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        self.hub.requests.append(request)
        fault = next((fault for what, fault in self.hub.faults.items() if re.search(what, request)), None)
        if fault:
            self.send(fault, dict(error=f'fault {fault}'))
        elif self.command in ('POST', 'DELETE') and self.headers.get('Authorization') != f'Bearer {TOKEN}':
            self.send(401, dict(error='log in'))
        elif words[2:3] == ['resolve']:
            self.send_file('/'.join(words[:2]), words[3], '/'.join(words[4:]))
        else:
            self.send(*self.hub.answer(self.command, words, [json.loads(line) for line in body.splitlines()]))

    do_HEAD = do_POST = do_DELETE = do_GET

    def send_file(self, repo, revision, name):
        number = self.hub.number(repo, revision) if repo in self.hub.repos else None
        if number is None or name not in self.hub.repos[repo][number]:
            return self.send(404, {}, {'X-Error-Code': 'RepoNotFound' if number is None else 'EntryNotFound'})
        content = self.hub.repos[repo][number][name]
        self.send(200, content, {'X-Repo-Commit': f'{number:040x}', 'ETag': f'"{git_blob(content)}"'})

    def send(self, status, content, headers=()):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header('Content-Length', str(len(content)))
        for name, value in {'Content-Type': 'application/json', **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@contextmanager
def serve():
    hub = Hub()
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), type('HubHandler', (Handler,), dict(hub=hub))) as server:
        hub.address = f'http://127.0.0.1:{server.server_port}'
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
