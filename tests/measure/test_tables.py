"""The papers' tables with measured numbers."""
import json

import timm

from timm_selfconv import weights
from timm_selfconv.measure import tables
from timm_selfconv.measure.published import PUBLISHED
from timm_selfconv.measure.tables import (
    format_results, format_tables, format_zoo, paper_tables, results_rows, zoo_rows,
)
from timm_selfconv.models import zoo_names


def digits(n, published):
    """A count in the unit and with the digits of a published one."""
    unit = {'M': 1e6, 'B': 1e9}[published[-1]]
    decimals = len(published[:-1].partition('.')[2])
    return f'{n / unit:.{decimals}f}{published[-1]}'


def test_measured_counts_round_to_the_published_ones():
    rows = paper_tables()
    assert len(rows) == len(PUBLISHED)
    for row in rows:
        if row['parameters'] != '-' and 'patchwise weights take more' not in row['note']:
            assert digits(row['measured']['parameters'], row['parameters']) == row['parameters']
        if row['flops'] != '-':
            assert digits(row['measured']['linear_conv_flops'], row['flops']) == row['flops']
        assert row['measured']['accuracy'] == weights.measured_accuracy(row['name'])
    json.dumps(rows)
    text = format_tables(rows)
    assert '12,086,844' in text and 'SA/HA' not in text  # without a measurement
    assert 'SAN patchwise, SA[3]' in text and '[3] The pub' in text  # the count that differs has a footnote
    line, = (line.split() for line in text.splitlines() if line.startswith('SAN patchwise, HA'))
    assert line[-1] == '7.419' and line[5] == f"{weights.measured_accuracy('san_patchwise_hier_cifar') - 0.912:+.3f}"


def test_hierarchical_nets_are_timed_with_plain_ones_of_their_kind(monkeypatch):
    timed = []

    def time_interleaved(steps):
        sizes = [sum(p.numel() for p in step.func.parameters()) for step in steps]
        timed.append([*sizes, list(steps[0].args[0].shape)])
        return [3., 2.]

    monkeypatch.setattr(tables, 'time_interleaved', time_interleaved)
    rows = {row['name']: row for row in paper_tables(time=True) if row['table'] == 'Table 3'}
    assert timed == [
        [29484282, 4754122, [4, 3, 32, 32]], [3737056, 352750, [4, 3, 32, 32]], [3851142, 356282, [4, 3, 32, 32]],
        [37394506, 6531946, [4, 3, 32, 32]]]
    assert {row['time_ratio'] for name, row in rows.items() if 'hier' in name} == {1.5}
    text = format_tables(list(rows.values()))
    assert 'SA/HA' in text and text.count('1.50') == 4


def test_the_zoo_is_listed_whole():
    assert zoo_names() == timm.list_models(module=['self_attention', 'resnet_cifar', 'san', 'resvit'])
    rows = zoo_rows()
    assert [row['name'] for row in rows] == zoo_names()
    for row in rows:
        card = weights.card_path(row['name']).is_file()
        assert row['weights'] == weights.weights_path(row['name']).is_file()
        assert (row['accuracy'] is not None) == (row['epochs'] is not None) == card
    assert '9,686,916' in format_zoo(rows)
    assert format_zoo(rows, 'github').startswith('| name')


def test_stored_counts_are_live_ones(tmp_path, monkeypatch):
    """Nets without stored counts get live ones; python -m timm_selfconv.measure.tables updates them."""
    stored = tables.zoo_counts()['resnet_tiny_cifar']
    (tmp_path / 'counts.json').write_text('{}')
    monkeypatch.setattr(tables, 'COUNTS', tmp_path / 'counts.json')
    monkeypatch.setattr(tables, 'zoo_names', lambda: ['resnet_tiny_cifar'])
    assert tables.zoo_counts.__wrapped__() == {'resnet_tiny_cifar': stored}


def test_tables_fit_100_columns():
    timed = [dict(row, time_ratio=1.5) for row in paper_tables()]
    for text in (format_tables(timed), format_zoo(zoo_rows()), format_results(results_rows())):
        assert max(map(len, text.splitlines())) <= 100


def test_results_have_every_shipped_net_and_both_papers_numbers():
    rows = {row['name']: row for row in results_rows()}
    shipped = {name for name in weights.checksums() if weights.card_facts(name)}
    assert set(rows) == {row.name for row in PUBLISHED} | shipped
    for name in shipped:
        assert rows[name]['here'] == weights.measured_accuracy(name)
        assert all(rows[name][key] for key in ('recipe', 'script', 'epochs', 'seed', 'hardware', 'time'))
    assert rows['sa_quadratic_cifar']['paper'] == 0.938 and rows['sa_quadratic_cifar']['report'] == 0.943
    assert rows['sa_learned_content_cifar']['report'] == 0.864  # its Table 1; Table 3 repeats the paper's number
    assert 'dist_cifar10' not in format_results([*rows.values()])  # tables show only weights from labels
