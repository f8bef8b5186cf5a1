"""The papers' tables and the zoo with measured numbers."""
import json

import timm

from timm_selfconv import weights
from timm_selfconv.measure import tables


def digits(n, published):
    """Format a count with the unit and the digits of a published one."""
    unit = {'M': 1e6, 'B': 1e9}[published[-1]]
    decimals = len(published[:-1].partition('.')[2])
    return f'{n / unit:.{decimals}f}{published[-1]}'


def test_measured_counts_round_to_the_published_ones():
    rows = tables.paper_tables()
    assert len(rows) == len(tables.PUBLISHED)
    for row in rows:
        if row['parameters'] != '-' and 'patchwise weights take more' not in row['note']:
            assert digits(row['measured']['parameters'], row['parameters']) == row['parameters']
        if row['flops'] != '-':
            assert digits(row['measured']['linear_conv_flops'], row['flops']) == row['flops']
        assert row['measured']['accuracy'] == weights.measured_accuracy(row['name'])
    json.dumps(rows)
    text = tables.format_tables(rows)
    assert max(map(len, text.splitlines())) <= 100 and '12,086,844' in text
    assert 'SAN patchwise, SA[3]' in text and '[3] The pub' in text  # the count that differs has a footnote
    line, = (line.split() for line in text.splitlines() if line.startswith('SAN patchwise, HA'))
    assert line[-1] == '7.419' and line[5] == f"{weights.measured_accuracy('san_patchwise_hier_cifar') - 0.912:+.3f}"


def test_the_zoo_is_listed_with_both_papers_accuracies():
    assert tables.zoo_names() == timm.list_models(module=['self_attention', 'resnet_cifar', 'san', 'resvit'])
    rows = {row['name']: row for row in tables.zoo_rows()}
    assert list(rows) == tables.zoo_names()
    for name, row in rows.items():
        assert row['weights'] == weights.weights_path(name).is_file()
        assert (row['accuracy'] is not None) == (row['epochs'] is not None) == weights.card_path(name).is_file()
    assert rows['sa_quadratic_cifar']['paper'] == 0.938 and rows['sa_quadratic_cifar']['report'] == 0.943
    assert rows['sa_learned_content_cifar']['report'] == 0.864  # its Table 1; Table 3 repeats the paper's number
    text = tables.format_zoo(list(rows.values()))
    assert max(map(len, text.splitlines())) <= 100 and '9,686,916' in text


def test_stored_counts_are_live_ones(tmp_path, monkeypatch):
    """Nets without stored counts are counted now. python -m timm_selfconv.measure.tables updates the file."""
    stored = tables.zoo_counts()['resnet_tiny_cifar']
    (tmp_path / 'counts.json').write_text('{}')
    monkeypatch.setattr(tables, 'COUNTS', tmp_path / 'counts.json')
    monkeypatch.setattr(tables, 'zoo_names', lambda: ['resnet_tiny_cifar'])
    assert tables.zoo_counts.__wrapped__() == {'resnet_tiny_cifar': stored}
