import json
from pathlib import Path

import pytest
import timm

from timm_selfconv import weights
from timm_selfconv.measure import bench, tables
from timm_selfconv.measure.published import PAPER, PUBLISHED, REPORT
from timm_selfconv.measure.tables import (
    format_results, format_tables, format_zoo, paper_tables, results_rows, zoo_rows,
)
from timm_selfconv.models import zoo_names

REPO = Path(__file__).resolve().parent.parent.parent


def digits(n, published):
    """A count in the published unit, rounded to the published digits."""
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
        assert row['measured']['accuracy'] == weights.measured_accuracy(weights.default_weights(row['name']))
    json.dumps(rows)
    text = format_tables(rows)
    assert 'Table 1' in text and 'Table 4' in text and '12,086,844' in text and '0.871' in text
    assert 'SA / HA' not in text  # without a measurement


def test_every_published_figure_of_the_papers_nets_stands_and_the_unmet_one_has_a_footnote():
    of = {source: [row for row in PUBLISHED if row.source == source] for source in (PAPER, REPORT)}
    assert len(of[PAPER]) == 7 and all('-' not in (row.parameters, row.flops) for row in of[PAPER])
    assert {row.table for row in of[REPORT]} == {'Table 1', 'Table 2', 'Table 3'}
    text = format_tables(paper_tables())
    unmet = [row for row in PUBLISHED if row.name == 'san_patchwise_cifar']
    assert [row.parameters for row in unmet] == ['3.74M'] and 'SAN patchwise, SA [3]' in text and '[3] The pub' in text
    net = timm.create_model('sa_learned_content_cifar', attn_proj=False)  # the report's net of "29.5M"
    assert f"{sum(p.numel() for p in net.parameters()) / 1e6:.1f}" == '28.5'


def test_hierarchical_nets_stand_against_plain_ones_of_the_same_kind(monkeypatch):
    timed = []

    def bench_nets(models, images):
        timed.append([sum(p.numel() for p in model.parameters()) for model in models] + [list(images.shape)])
        return [3., 2.]

    monkeypatch.setattr(bench, 'bench_nets', bench_nets)
    rows = {row['name']: row for row in paper_tables(time=True) if row['table'] == 'Table 3'}
    assert timed == [
        [29484282, 4754122, [4, 3, 32, 32]], [3737056, 352750, [4, 3, 32, 32]], [3851142, 356282, [4, 3, 32, 32]],
        [37394506, 6531946, [4, 3, 32, 32]]]
    assert {row['time_ratio'] for name, row in rows.items() if 'hier' in name} == {1.5}
    text = format_tables(list(rows.values()))
    assert 'SA / HA' in text and text.count('1.50') == 4


def test_the_zoo_is_listed_whole():
    assert zoo_names() == timm.list_models(module=['self_attention', 'resnet_cifar', 'san', 'resvit'])
    rows = zoo_rows()
    assert [row['name'] for row in rows] == zoo_names()
    for row in rows:
        shipped = weights.default_weights(row['name'])
        assert row['weights'] == weights.weights_path(shipped).is_file()
        assert (row['accuracy'] is not None) == weights.card_path(shipped).is_file()
        assert (row['epochs'] is not None) == weights.card_path(shipped).is_file()
    text = format_zoo(rows, wide=True)
    assert 'apache-2.0' in text and '9,686,916' in text
    assert format_zoo(rows, 'github').startswith('| name')


@pytest.mark.parametrize('name', ['resnet_tiny_cifar', 'sa_quadratic_tiny_cifar', 'san_patchwise_hier_cifar'])
def test_stored_counts_are_live_ones(name):
    """python -m timm_selfconv.measure.tables stores them anew."""
    assert tables.zoo_counts()[name] == tables.live_counts(name)


def test_a_net_that_has_no_stored_counts_is_listed_with_live_ones(tmp_path, monkeypatch):
    (tmp_path / 'measure').mkdir()
    (tmp_path / 'models').mkdir()
    (tmp_path / 'models' / 'family.py').write_text('@register_model\ndef resnet_tiny_cifar(pretrained=False): pass')
    (tmp_path / 'measure' / 'counts.json').write_text('{}')
    monkeypatch.setattr(tables, 'COUNTS', tmp_path / 'measure' / 'counts.json')
    assert tables.zoo_counts.__wrapped__() == {'resnet_tiny_cifar': tables.live_counts('resnet_tiny_cifar')}


def test_tables_fit_a_terminal_and_epochs_stand_beside_accuracies():
    for text in (format_tables(paper_tables()), format_zoo(zoo_rows()), format_results(results_rows())):
        assert max(map(len, text.splitlines())) <= 100
    line = next(line for line in format_tables(paper_tables()).splitlines() if line.startswith('SAN patchwise, HA'))
    epochs = weights.card_facts('san_patchwise_hier_cifar')['epochs']
    assert line.split()[3:6] == ['0.912', f"{weights.measured_accuracy('san_patchwise_hier_cifar'):.4f}", epochs]


def test_results_say_how_every_shipped_net_came_about():
    rows = {row['name']: row for row in results_rows()}
    shipped = {name for name in weights.checksums() if weights.card_facts(name)}
    assert set(rows) == {row.name for row in PUBLISHED if not row.differs} | shipped
    for name, row in rows.items():
        facts = [row[key] for key in ('recipe', 'script', 'epochs', 'seed', 'hardware', 'time')]
        if weights.card_path(name).is_file():
            assert row['here'] == weights.measured_accuracy(name) and all(facts)
            assert (REPO / row['recipe']).is_file() and int(row['seed']) >= 0
            images = weights.card_facts(name).get('images')  # of a training that saw fewer than all
            if images is None:
                assert int(row['epochs']) > 0
            else:
                assert float(row['epochs']) == round(int(images.split(':')[0].replace(',', '')) / 50000, 1) > 0
        else:
            assert row['here'] is None and not any(facts)
    assert rows['sa_quadratic_cifar']['paper'] == 0.938 and rows['sa_quadratic_cifar']['report'] == 0.943
    assert rows['sa_learned_content_cifar']['report'] == 0.864  # its Table 1; Table 3 repeats the paper's
    scratch = format_results([r for r in rows.values() if not (r['initialised_from'] or r['teacher'])])
    assert not {'*', '†'} & set(scratch)
    for name, row in rows.items():
        table = format_results(list(rows.values()), 'github', wide=True)
        line = next(text for text in table.splitlines() if text.startswith(f'| {name} '))
        assert row['here'] is None or (f"{row['here']:.4f}" in line and f"| {row['recipe']}" in line)
