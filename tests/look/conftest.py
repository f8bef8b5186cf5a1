"""A real browser for tests of the pages."""
import shutil

import pytest
import torch

from drawn import PAINTED

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
FLAGS = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
         '--disable-background-networking', '--disable-component-update', '--disable-sync']


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope='package')
def browser():
    if CHROMIUM is None:
        pytest.skip('no chromium here: apt-get install chromium')
    with pytest.importorskip('playwright.sync_api').sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Open the text of a page as a file. Fail if the page reports an error or requests another file."""
    pages, complaints = [], []

    def open_text(text, hash='', **kwargs):
        file = tmp_path / 'page.html'
        file.write_text(text, encoding='utf-8')
        pages.append(page := browser.new_page(**kwargs))
        page.on('console', lambda message: complaints.append(message.text))
        page.on('pageerror', lambda error: complaints.append(str(error)))
        page.on('request', lambda request: complaints.append(request.url) if request.url.split('#')[0] != file.as_uri()
                and not request.url.startswith('data:') else None)
        page.goto(f'{file.as_uri()}#{hash}')
        if kwargs.get('java_script_enabled', True):
            page.evaluate(f'ready.then({PAINTED})')
        return page

    yield open_text
    for page in pages:
        page.close()
    assert complaints == []
