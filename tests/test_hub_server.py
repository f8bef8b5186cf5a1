"""Weights from the Hub: the real huggingface_hub client against a server on this machine."""
import hashlib
import http.server
import os
import subprocess
import sys
import threading

import pytest
import timm
import torch

import timm_selfconv  # noqa: F401

SMALL = dict(embed_dim=8, mlp_dim=8, depth=2, num_heads=(2, 3))
COMMIT = 'a' * 40


@pytest.fixture
def endpoint(tmp_path):
    """Serves the files of tmp_path / 'org' / 'net' as the Hub does; yields its address and what was asked for."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            requests.append(self.path)
            _, org, net, resolve, _, name = [*self.path.split('/'), *[''] * 6][:6]
            file = tmp_path / org / net / name
            if resolve != 'resolve' or not file.is_file():
                self.send_response(404)
                self.send_header('X-Error-Code', 'EntryNotFound')
                self.send_header('Content-Length', '0')
                self.end_headers()
                return
            content = file.read_bytes()
            self.send_response(200)
            self.send_header('ETag', f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header('X-Repo-Commit', COMMIT)
            self.send_header('Content-Length', str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f'http://127.0.0.1:{server.server_port}', requests
    finally:
        server.shutdown()
        server.server_close()


CODE = """
import sys, timm, timm_selfconv, torch
x = torch.load(sys.argv[1])
for model in (
    timm.create_model('hf-hub:org/net', pretrained=True),
    timm.create_model('sa_quadratic_gen_pruned_cifar', pretrained=True, embed_dim=8, mlp_dim=8, depth=2,
                      num_heads=(2, 3), pretrained_cfg_overlay=dict(hf_hub_id='org/net', file=None,
                                                                    hf_hub_filename='model.safetensors')),
):
    torch.testing.assert_close(model.eval()(x['images']), x['logits'])
"""


def test_nets_are_loaded_from_the_hub(endpoint, tmp_path):
    address, requests = endpoint
    model = timm.create_model('sa_quadratic_gen_pruned_cifar', **SMALL).eval()
    timm.models.save_for_hf(model, tmp_path / 'org' / 'net', safe_serialization=True)
    images = torch.randn(2, 3, 16, 16)
    torch.save(dict(images=images, logits=model(images).detach()), tmp_path / 'expected.pt')
    environment = dict(os.environ, HF_ENDPOINT=address, HF_HOME=str(tmp_path / 'cache'), HF_HUB_DISABLE_TELEMETRY='1')
    environment.pop('HF_HUB_OFFLINE', None)
    done = subprocess.run(
        [sys.executable, '-c', CODE, str(tmp_path / 'expected.pt')], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '/org/net/resolve/main/config.json' in requests
    assert '/org/net/resolve/main/model.safetensors' in requests
