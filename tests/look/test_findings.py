import json
from dataclasses import replace

import pytest

from timm_selfconv.cli import main
from timm_selfconv.look import findings

ROW = findings.Finding('A claim', 'yes', '{} heads', '1 of 2', 'heads NET', lambda *given: '1 of 2')


def test_the_chapter_has_the_table(repo):
    assert findings.findings_table() in (repo / 'timm_selfconv' / 'theory' / 'README.md').read_text()
    assert max(map(len, findings.findings_table().splitlines())) <= 100
    assert {row.answer for row in findings.FINDINGS} <= {'yes', 'partly', 'no'}


@pytest.mark.slow
def test_files_that_ship_give_every_number_again():
    assert [row for row in findings.measure_findings() if row['same'] != 'yes'] == []


def test_numbers_are_compared_and_rows_need_what_they_are_given(monkeypatch, capsys):
    monkeypatch.setattr(findings, 'FINDINGS', [
        ROW, replace(ROW, number='2 of 2'), replace(ROW, needs='pictures', measure=' and '.join),
        replace(ROW, needs='data', measure=lambda accuracy: f'{accuracy(None, "test")}')])
    assert [row['same'] for row in findings.measure_findings()] == ['yes', 'no']
    rows = findings.measure_findings(['one', 'two'], lambda model, split: 0.5)
    assert [row['found'] for row in rows] == ['1 of 2', '1 of 2', 'one and two', '0.5']
    main(['findings', '--json'])
    assert [row['here'] for row in json.loads(capsys.readouterr().out)] == ['1 of 2 heads', '2 of 2 heads']
    main(['findings'])
    assert capsys.readouterr().out.splitlines()[-1].split()[-3:] == ['no', 'heads', 'NET']


def test_shifts_are_measured_without_training():
    seen = []

    def accuracy(model, split):
        seen.append((split, type(model.blocks[5].attn).__name__))
        return 0.9

    assert findings.shifted(accuracy, 'sa_quadratic_tiny_cifar', 0., 'test[:8]') == '0.90, 0.90'
    assert seen == [('test[:8]', 'SelfAttention2d'), ('test[:8]', 'ShiftAttention2d')]
