"""A small Hugging Face Hub on 127.0.0.1: enough of its API for the real client to publish and to download."""
import base64
import hashlib
import http.server
import json
import re
import threading
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

TOKEN = 'hf_of_the_test'


def git_blob(content):
    return hashlib.sha1(b'blob %d\0' % len(content) + content).hexdigest()


class Hub:
    """What the server knows.

    Attributes:
        repos: A list of commits per repository, each a dictionary from path to content; the last one is main.
        tags: Index of a commit, by repository and tag.
        objects: Large files, by SHA-256.
        requests: Method and path of each request, in order.
        faults: What goes wrong: a method and a pattern of the path, with the status to answer with, or 'cut' to close
            the connection in the middle of the body.
        etags: ETag of a repository's files, in the place of the right one.
    """

    def __init__(self):
        self.address = ''
        self.clear()

    def clear(self):
        self.repos, self.tags, self.objects = {}, {}, {}
        self.requests, self.faults, self.etags = [], {}, {}

    def files(self, repo, revision):
        commits = self.repos.get(repo)
        if not commits:
            return None
        if revision == 'main':
            return commits[-1]
        if re.fullmatch('[0-9a-f]{40}', revision):
            return commits[int(revision, 16) - 1]
        return commits[self.tags[repo, revision]] if (repo, revision) in self.tags else None

    def commit_id(self, repo, revision):
        if re.fullmatch('[0-9a-f]{40}', revision):
            return revision
        index = len(self.repos[repo]) - 1 if revision == 'main' else self.tags[repo, revision]
        return f'{index + 1:040x}'

    # each handler returns a status and what to answer with, as JSON
    def create_repo(self, body):
        repo = f'{body["organization"]}/{body["name"]}'
        if repo in self.repos:
            return 409, {'error': 'exists', 'url': f'{self.address}/{repo}'}
        self.repos[repo] = [{}]
        return 200, {'url': f'{self.address}/{repo}', 'name': repo, 'id': repo}

    def validate_yaml(self, body):
        return 200, {'errors': [], 'warnings': []}

    def preupload(self, body, repo, revision):
        if repo not in self.repos:
            return 404, {'error': 'no such repository'}
        there = {row['path']: row.get('lfs', row)['oid'] for row in self.tree(None, repo, revision)[1]}
        return 200, {'files': [
            {'path': file['path'], 'shouldIgnore': False, 'oid': there.get(file['path']),
             'uploadMode': 'lfs' if file['path'].endswith('.safetensors') else 'regular'} for file in body['files']]}

    def info(self, body, repo, revision):
        return 200, {'id': repo, 'sha': self.commit_id(repo, revision)}

    def lfs_batch(self, body, repo):
        def describe(o):
            if o['oid'] in self.objects:
                return dict(o)
            href = f'{self.address}/lfs/{o["oid"]}'
            return dict(o, actions={'upload': {'href': href}, 'verify': {'href': f'{href}/verify'}})
        return 200, {'transfer': 'basic', 'objects': [describe(o) for o in body['objects']]}

    def lfs_verify(self, body, oid):
        return (200, {}) if len(self.objects.get(oid, b'')) == body['size'] else (404, {'error': 'not here'})

    def commit(self, lines, repo, revision):
        files = dict(self.repos[repo][-1])
        for line in lines[1:]:
            key, value = line['key'], line['value']
            if key == 'file':
                files[value['path']] = base64.b64decode(value['content'])
            elif key == 'lfsFile':
                files[value['path']] = self.objects[value['oid']]
            elif key == 'deletedFile':
                del files[value['path']]
        self.repos[repo].append(files)
        oid = self.commit_id(repo, 'main')
        return 200, {'commitUrl': f'{self.address}/{repo}/commit/{oid}', 'commitOid': oid}

    def tree(self, body, repo, revision):
        files = self.files(repo, revision)
        if files is None:
            return 404, {'error': 'no such repository'}
        rows = []
        for path, content in sorted(files.items()):
            row = {'type': 'file', 'path': path, 'size': len(content), 'oid': git_blob(content)}
            if path.endswith('.safetensors'):
                row['lfs'] = {'oid': hashlib.sha256(content).hexdigest(), 'size': len(content), 'pointerSize': 134}
            rows.append(row)
        return 200, rows

    def refs(self, body, repo):
        def ref(kind, name):
            return {'name': name, 'ref': f'refs/{kind}/{name}', 'targetCommit': self.commit_id(repo, name)}
        tags = [ref('tags', tag) for name, tag in self.tags if name == repo]
        return 200, {'branches': [ref('heads', 'main')], 'converts': [], 'tags': tags}

    def tag(self, body, repo, revision):
        if (repo, body['tag']) in self.tags:
            return 409, {'error': 'exists'}
        self.tags[repo, body['tag']] = int(self.commit_id(repo, unquote(revision)), 16) - 1
        return 200, {}

    def untag(self, body, repo, tag):
        del self.tags[repo, tag]
        return 200, {}


REPO = r'([\w.-]+/[\w.-]+)'
ROUTES = [(method, re.compile(pattern), name) for method, pattern, name in (
    ('POST', '/api/repos/create', 'create_repo'),
    ('POST', '/api/validate-yaml', 'validate_yaml'),
    ('POST', f'/api/models/{REPO}/preupload/(.+)', 'preupload'),
    ('POST', rf'/{REPO}\.git/info/lfs/objects/batch', 'lfs_batch'),
    ('POST', '/lfs/([0-9a-f]{64})/verify', 'lfs_verify'),
    ('POST', f'/api/models/{REPO}/commit/(.+)', 'commit'),
    ('GET', f'/api/models/{REPO}/tree/(.+)', 'tree'),
    ('GET', f'/api/models/{REPO}/revision/(.+)', 'info'),
    ('GET', f'/api/models/{REPO}/refs', 'refs'),
    ('POST', f'/api/models/{REPO}/tag/(.+)', 'tag'),
    ('DELETE', f'/api/models/{REPO}/tag/(.+)', 'untag'),
)]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    hub: Hub

    def do_GET(self):
        self.serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def serve(self):
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        if self.headers.get('Transfer-Encoding') == 'chunked':
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        self.hub.requests.append(f'{self.command} {path}')
        fault = next((f for what, f in self.hub.faults.items() if re.search(what, f'{self.command} {path}')), None)
        if isinstance(fault, int):
            return self.answer(fault, {'error': f'fault {fault}'})
        if self.command in ('POST', 'DELETE') and self.headers.get('Authorization') != f'Bearer {TOKEN}':
            return self.answer(401, {'error': 'log in'})
        if self.command == 'PUT':
            oid = path.rsplit('/', 1)[1]
            if hashlib.sha256(body).hexdigest() != oid:
                return self.answer(400, {'error': 'other bytes'})
            self.hub.objects[oid] = body
            return self.answer(200, {})
        for method, pattern, name in ROUTES:
            match = pattern.fullmatch(path)
            if match and method == self.command:
                lines = [json.loads(line) for line in body.splitlines()] or [None]
                return self.answer(*getattr(self.hub, name)(lines if name == 'commit' else lines[0], *match.groups()))
        match = re.fullmatch(f'/{REPO}/resolve/([^/]+)/(.+)', path)
        if match:
            return self.resolve(match[1], unquote(match[2]), unquote(match[3]), fault == 'cut')
        match = re.fullmatch('/cdn/([0-9a-f]{64})', path)
        if match:
            return self.send(200, self.hub.objects[match[1]], {}, fault == 'cut')
        self.answer(404, {'error': 'no such page'})

    def resolve(self, repo, revision, name, cut):
        files = self.hub.files(repo, revision)
        if files is None or name not in files:
            code = 'RepoNotFound' if repo not in self.hub.repos else 'RevisionNotFound' if files is None \
                else 'EntryNotFound'
            return self.send(404, b'', {'X-Error-Code': code})
        content, headers = files[name], {'X-Repo-Commit': self.hub.commit_id(repo, revision)}
        sha256 = hashlib.sha256(content).hexdigest()
        if repo in self.hub.etags:
            return self.send(200, content, dict(headers, ETag=f'"{self.hub.etags[repo]}"'))
        if sha256 in self.hub.objects:  # large files lie on another host
            host = self.hub.address.replace('127.0.0.1', 'localhost')
            headers.update({
                'X-Linked-Etag': f'"{sha256}"', 'X-Linked-Size': str(len(content)),
                'Location': f'{host}/cdn/{sha256}'})
            return self.send(302, b'', headers)
        self.send(200, content, dict(headers, ETag=f'"{git_blob(content)}"'), cut)

    def answer(self, status, value):
        code = {'X-Error-Code': 'RepoNotFound'} if status == 404 else {}
        self.send(status, json.dumps(value).encode(), dict(code, **{'Content-Type': 'application/json'}))

    def send(self, status, content, headers, cut=False):
        self.send_response(status)
        for name, value in dict(headers, **{'Content-Length': str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content[:len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True

    def log_message(self, *args):
        pass


@contextmanager
def serve():
    """A Hub that lives as long as the block; its ``address`` is what HF_ENDPOINT takes."""
    hub = Hub()
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), type('HubHandler', (Handler,), {'hub': hub}))
    hub.address = f'http://127.0.0.1:{server.server_port}'
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
