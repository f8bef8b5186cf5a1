import json
from dataclasses import replace

import pytest

from drawn import quadratic_net, set_heads
from timm_selfconv import theory
from timm_selfconv.look import findings
from timm_selfconv.look.figures import figure_shifts

ROW = findings.Finding('A claim', 'yes', '{} heads', '1 of 2', 'heads NET', lambda *given: '1 of 2')


def test_the_chapter_has_the_table(repo):
    rows = [(x.claim, x.answer, x.words.format(*x.number.split(', '))) for x in findings.FINDINGS]
    table = [f'| {" | ".join(row)} |\n' for row in [('claim', '', 'here'), ('---',) * 3, *rows]]
    assert ''.join(table) in (repo / 'timm_selfconv' / 'theory' / 'README.md').read_text()


@pytest.mark.slow
def test_files_that_ship_give_every_number_again():
    assert [row for row in findings.measure_findings() if row['same'] != 'yes'] == []


def test_numbers_are_compared_and_rows_need_what_they_are_given(monkeypatch, output_of):
    monkeypatch.setattr(findings, 'FINDINGS', [
        ROW, replace(ROW, number='2 of 2'), replace(ROW, needs='pictures', measure=' and '.join),
        *(replace(ROW, needs='data', number=number, measure=lambda accuracy: f'{accuracy(None)}, 0.9')
          for number in ('0.501, 0.899', '0.5, 0.902'))])
    assert [row['same'] for row in findings.measure_findings()] == ['yes', 'no']
    rows = findings.measure_findings(['one', 'two'], lambda model: 0.5)
    assert [row['found'] for row in rows] == ['1 of 2', '1 of 2', 'one and two', '0.5, 0.9', '0.5, 0.9']
    assert [row['same'] for row in rows[-2:]] == ['yes', 'no']
    assert [row['here'] for row in json.loads(output_of('findings', '--json'))] == ['1 of 2 heads', '2 of 2 heads']
    assert output_of('findings').split()[-3:] == ['no', 'heads', 'NET']


def test_points_of_shifts_and_their_controls(monkeypatch, tmp_path, output_of, refused):
    net, seen = quadratic_net(), []
    set_heads(net.blocks[0], [[1., -2.], [3., 0.]], [9., 0.01])
    heads = [list(head.offset) for kernel in theory.learned_kernels(net) for head in kernel.heads]

    def accuracy(model):
        layers = [m for m in model.modules() if isinstance(m, theory.ShiftAttention2d)]
        seen.append([offset for layer in layers for offset in layer.offsets.tolist()])
        return len(seen) / 100

    monkeypatch.setattr(findings, 'net', lambda name: net)
    assert findings.shifted(accuracy, 'net', 0.9) == '0.010, 0.020' and seen == [[], [[1, -2]]]
    seen.clear()
    rows = list(findings.shift_points(net, accuracy, [0.9, 0.]))
    assert seen[:3] == [[], [[1, -2]], [[1, -2]]] and all(len(own) == 1 and own[0] in heads for own in seen[3:5])
    assert seen[5] == heads and len(seen[6]) == len(heads) and seen[6] != heads
    assert rows == [
        dict(heads=0, shifts=[0.01], mean=[0.01], random=[0.01, 0.01]),
        dict(heads=1, shifts=[0.02], mean=[0.03], random=[0.04, 0.05]),
        dict(heads=len(heads), shifts=[0.06], mean=[0.07], random=[])]

    lines = figure_shifts({'net': rows}).axes[0].lines
    assert [line.get_ydata().tolist() for line in lines] == [
        [0.01, 0.02, 0.06], [0.01, 0.03, 0.07], [0.01, 0.04], [0.01, 0.05]]
    monkeypatch.setattr('timm_selfconv.commands.findings.create_model', lambda name: net)
    monkeypatch.setattr('timm_selfconv.commands.findings.shift_points', lambda model, accuracy: rows)
    command, file = ['shifts', 'sa_quadratic_cifar', '--data', 'nowhere', '--output'], tmp_path / 'shifts.png'
    assert '"random": [0.04, 0.05]' in output_of(*command, file) and file.is_file()
    refused('shifts', [*command, tmp_path / 'shifts'])
