import json
from pathlib import Path

import timm

from timm_selfconv import hub
from timm_selfconv.analysis.tables import (
    PUBLISHED, REPORTED, format_results, format_tables, format_zoo, paper_tables, results_rows, zoo_names, zoo_rows,
)

REPO = Path(__file__).resolve().parent.parent.parent


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
    assert zoo_names() == timm.list_models(module=['self_attention', 'resnet_cifar', 'san', 'resvit'])
    rows = zoo_rows()
    assert [row['name'] for row in rows] == zoo_names()
    for row in rows:
        assert row['weights'] == hub.weights_path(row['name']).is_file()
        assert (row['accuracy'] is not None) == hub.card_path(row['name']).is_file()
    text = format_zoo(rows)
    assert 'apache-2.0' in text and '9,686,916' in text
    assert format_zoo(rows, 'github').startswith('| name')


def test_results_say_how_every_shipped_net_came_about():
    rows = {row['name']: row for row in results_rows()}
    shipped = {name for name in zoo_names() if hub.card_facts(name)}
    assert set(rows) == {row.name for row in PUBLISHED} | set(REPORTED) | shipped
    for name, row in rows.items():
        facts = [row[key] for key in ('recipe', 'script', 'epochs', 'seed', 'hardware', 'time')]
        if hub.card_path(name).is_file():
            assert row['here'] == hub.measured_accuracy(name) and all(facts)
            assert (REPO / row['recipe']).is_file() and int(row['epochs']) > 0 and int(row['seed']) >= 0
        else:
            assert row['here'] is None and not any(facts)
    assert rows['sa_quadratic_cifar']['paper'] == 0.938 and rows['sa_quadratic_cifar']['report'] == 0.943
    for name, row in rows.items():
        line = next(text for text in format_results(list(rows.values()), 'github').splitlines() if f' {name} ' in text)
        assert row['here'] is None or f"{row['here']:.4f} | {row['recipe']}" in line
