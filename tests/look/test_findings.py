import json
from dataclasses import replace

import pytest

from timm_selfconv.cli import main
from timm_selfconv.look import findings

ROW = findings.Finding('A claim', 'yes', 'heads', '1 of 2', 'heads NET', lambda pictures, accuracy: '1 of 2')


def test_the_chapter_has_the_table(repo):
    assert findings.findings_table() in (repo / 'timm_selfconv' / 'theory' / 'README.md').read_text()
    cells = [cell for row in findings.FINDINGS for cell in (row.claim, row.ours, row.number, row.command)]
    assert all(0 < len(cell.split()) <= 20 for cell in cells)
    assert {row.answer for row in findings.FINDINGS} <= {'yes', 'partly', 'no'}


@pytest.mark.slow
def test_files_that_ship_give_every_number_again():
    assert [row for row in findings.measure_findings() if row['same'] != 'yes'] == []


def test_numbers_are_compared_and_rows_need_what_they_are_given(monkeypatch, capsys):
    def half(pictures, accuracy):
        return f'{len(pictures)}, {accuracy(None, "test"):.3f}'

    monkeypatch.setattr(findings, 'FINDINGS', [
        ROW, replace(ROW, number='2 of 2'), replace(ROW, needs='pictures'), replace(ROW, needs='data', measure=half)])
    assert [row['same'] for row in findings.measure_findings()] == ['yes', 'no']
    rows = findings.measure_findings(['a picture'], lambda model, split: 0.5)
    assert [row['found'] for row in rows] == ['1 of 2', '1 of 2', '1 of 2', '1, 0.500']
    main(['findings', '--json'])
    assert [row['claimed'] for row in json.loads(capsys.readouterr().out)] == ['1 of 2', '2 of 2']
    main(['findings'])
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == 'no'


def test_shifts_are_measured_without_training():
    seen = []

    def accuracy(model, split):
        seen.append((split, type(model.blocks[5].attn).__name__))
        return 0.9

    assert findings.shifted('sa_quadratic_tiny_cifar', 'test[:8]', 0.)([], accuracy) == '0.900, 0.900'
    assert seen == [('test[:8]', 'SelfAttention2d'), ('test[:8]', 'ShiftAttention2d')]
