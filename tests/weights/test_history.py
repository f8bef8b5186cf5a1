"""Histories of runs are written and read; other files raise an error with their name."""
import json
from pathlib import Path

import pytest

from timm_selfconv.look.figures import shipped_curves
from timm_selfconv.weights.history import accuracies, find_history, read_history, write_history

ROWS = [
    dict(epochs=0, heads=[[[0., 1., 2., 3., 0.5]]]), dict(epochs=1, train_loss=2., lr=0.1, heads=None),
    dict(epochs=2, train_loss=1.5, lr=0., eval_top1=55.5, heads=[[[0., 1., 2., 3., 0.5]]])]


def test_a_history_is_read_back_and_found_by_run_or_net(tmp_path, monkeypatch):
    monkeypatch.setattr('timm_selfconv.weights.WEIGHTS_DIR', tmp_path / 'weights')
    assert find_history(tmp_path) is None and find_history('net') is None
    write_history(tmp_path / 'history.json', 'net', [8, 8], ROWS)
    write_history(tmp_path / 'weights' / 'net.history.json', 'net', [8, 8], ROWS[:2])
    assert read_history(find_history(tmp_path)) == dict(model='net', grid=[8, 8], rows=ROWS)
    assert read_history(find_history('net')) == read_history(find_history('net.cifar10')) == dict(
        model='net', grid=[8, 8], rows=ROWS[:2])
    monkeypatch.chdir(tmp_path)
    write_history(Path('net', 'history.json'), 'folder', [8, 8], ROWS)  # a folder with the name of a net
    models = [read_history(find_history(run))['model'] for run in ('net', './net', Path('net'))]
    assert models == ['net', 'folder', 'folder']
    assert accuracies(read_history(tmp_path / 'history.json')) == {2: 55.5}
    assert len((tmp_path / 'history.json').read_text().splitlines()) == 2 + len(ROWS)  # a row per line
    parts = [dict(row, epochs=0.25 * row['epochs']) for row in ROWS]  # each row has seen a quarter of the images
    write_history(tmp_path / 'history.json', 'net', [8, 8], parts)
    read = read_history(tmp_path / 'history.json')
    assert [row['epochs'] for row in read['rows']] == [0, 0.25, 0.5] and accuracies(read) == {0.5: 55.5}


def test_curves_that_ship_are_validated_after_each_of_twelve_epochs():
    for path in shipped_curves():
        history = read_history(path)
        assert path.name.startswith(f"{history['model']}.4") and list(accuracies(history)) == list(range(1, 13))


@pytest.mark.parametrize('text,message', [
    ('{"rows": 3}', 'is no history'),
    (json.dumps(dict(model='net', rows=ROWS)), 'needs model, grid and rows, has model, rows'),
    (json.dumps(dict(rows=[ROWS[0], dict(ROWS[1], epochs=0.25), dict(ROWS[2], epochs=1)])), r'has \[0, 0.25, 1\]'),
    (json.dumps(dict(rows=[ROWS[0], dict(epochs=1, heads=None)])), "is no history.*'train_loss'"),
    (json.dumps(dict(rows=[ROWS[0], dict(ROWS[1], eval_top1='n/a')])), 'is no history.*n/a'),
    (json.dumps(dict(rows=[ROWS[0], dict(ROWS[1], heads=[[[1., 2.]]])])), 'needs five numbers for each head'),
])
def test_other_files_are_refused(tmp_path, text, message):
    (tmp_path / 'history.json').write_text(text)
    with pytest.raises(ValueError, match=rf'history\.json: .*{message}'):
        read_history(tmp_path / 'history.json')
