import json

import timm

from timm_selfconv import hub
from timm_selfconv.analysis.tables import PUBLISHED, format_tables, format_zoo, paper_tables, zoo_names, zoo_rows


def digits(n, published):
    """A count in the published unit, rounded to the published digits."""
    unit = {'M': 1e6, 'B': 1e9}[published[-1]]
    decimals = len(published[:-1].partition('.')[2])
    return f'{n / unit:.{decimals}f}{published[-1]}'


def test_measured_counts_round_to_the_published_ones():
    rows = paper_tables()
    assert len(rows) == len(PUBLISHED) == 7
    for row in rows:
        assert digits(row['measured']['parameters'], row['parameters']) == row['parameters']
        assert digits(row['measured']['linear_conv_flops'], row['flops']) == row['flops']
        assert row['measured']['accuracy'] == hub.measured_accuracy(row['name'])
    json.dumps(rows)
    text = format_tables(rows)
    assert 'Table 1' in text and 'Table 4' in text and '12,086,844' in text and '0.871' in text


def test_the_zoo_is_listed_whole():
    assert zoo_names() == timm.list_models(module=['self_attention', 'resnet_cifar'])
    rows = zoo_rows()
    assert [row['name'] for row in rows] == zoo_names()
    for row in rows:
        assert row['weights'] == hub.weights_path(row['name']).is_file()
        assert (row['accuracy'] is not None) == hub.card_path(row['name']).is_file()
    text = format_zoo(rows)
    assert 'apache-2.0' in text and '9,686,916' in text
    assert format_zoo(rows, 'github').startswith('| name')
