"""The papers' published tables."""
from dataclasses import dataclass
from functools import partial
from typing import Optional

__all__ = ['ACCURACIES', 'PAPER', 'PUBLISHED', 'REPORT', 'Published']

PAPER = 'Cordonnier, Loukas, Jaggi, ICLR 2020 (arXiv:1911.03584)'
REPORT = '[Re] On the Relationship between Self-Attention and Convolutional Layers, Varma T, Prabhu, 2021'

SECOND_VALUES = (
    'The net of the report has a second value projection per head and, in its released code, MLPs of 400 channels. '
    'The net here has no second projection and MLPs of 512 channels.')
NO_SECOND_LINEAR = (
    '29.5M is the net of the paper, as here. The net of the report has no second Linear(D -> D) (attn_proj=False) and '
    '28.5M parameters.')
PAIRWISE_COUNT = 'The published 3.74M is the count of the pairwise net; patchwise weights take more.'


@dataclass(frozen=True)
class Published:
    """A row of a published table: ``label`` is the name of the net there, ``name`` is its name here."""
    source: str
    table: str
    label: str
    name: str
    accuracy: float  # on CIFAR-10's test split, between 0 and 1
    parameters: str = '-'  # as printed
    flops: str = '-'  # as printed
    milliseconds: Optional[float] = None  # for one image on a GPU
    note: str = ''  # difference between the published net and the net here


PAPER_1, PAPER_4 = (partial(Published, PAPER, f'Table {number}') for number in (1, 4))
REPORT_1, REPORT_2, REPORT_3 = (partial(Published, REPORT, f'Table {number}') for number in (1, 2, 3))
PUBLISHED = (
    PAPER_1('ResNet18', 'resnet18_cifar', 0.938, '11.2M', '1.1B'),
    PAPER_1('SA quadratic emb.', 'sa_quadratic_cifar', 0.938, '12.1M', '6.2B'),
    PAPER_1('SA learned emb.', 'sa_learned_cifar', 0.918, '12.3M', '6.2B'),
    PAPER_1('SA learned emb. + content', 'sa_learned_content_cifar', 0.871, '29.5M', '15B'),
    PAPER_4('SA quadratic emb.', 'sa_quadratic_cifar', 0.938, '12.1M', '6.2B'),
    PAPER_4('SA quadratic emb. gen.', 'sa_quadratic_gen_cifar', 0.934, '12.1M', '6.2B'),
    PAPER_4('SA quadratic emb. gen. pruned', 'sa_quadratic_gen_pruned_cifar', 0.934, '9.7M', '4.9B'),

    REPORT_1('ResNet18', 'resnet18_cifar', 0.946, '11.2M'),
    REPORT_1('SA quadratic emb.', 'sa_quadratic_cifar', 0.943, '12.1M'),
    REPORT_1('SA quadratic emb. gen.', 'sa_quadratic_gen_cifar', 0.939, '12.1M'),
    REPORT_1('SA learned emb.', 'sa_learned_cifar', 0.904, '12.3M'),
    REPORT_1('SA learned emb. + content', 'sa_learned_content_cifar', 0.864, '29.5M'),
    REPORT_2('SA quadratic emb., 16 heads', 'sa_quadratic_h16_cifar', 0.931),
    REPORT_2('SA learned emb., 16 heads', 'sa_learned_h16_cifar', 0.912, note=SECOND_VALUES),
    REPORT_2('SA learned emb. + content, 16 heads', 'sa_learned_content_h16_cifar', 0.856, note=SECOND_VALUES),
    REPORT_3('SA learned emb. + content', 'sa_learned_content_cifar', 0.871, '29.5M', '-', 5.374, NO_SECOND_LINEAR),
    REPORT_3('HA learned emb. + content', 'sa_learned_content_hier_cifar', 0.910, '4.75M', '-', 4.703),
    REPORT_3('SAN pairwise, SA', 'san_pairwise_cifar', 0.818, '3.74M', '-', 16.586),
    REPORT_3('SAN pairwise, HA', 'san_pairwise_hier_cifar', 0.853, '0.35M', '-', 12.913),
    REPORT_3('SAN patchwise, SA', 'san_patchwise_cifar', 0.857, '3.74M', '-', 9.773, PAIRWISE_COUNT),
    REPORT_3('SAN patchwise, HA', 'san_patchwise_hier_cifar', 0.912, '0.36M', '-', 7.419),
    REPORT_3('ViT, SA', 'resvit_cifar', 0.843, '37.4M', '-', 7.094),
    REPORT_3('ViT, HA', 'resvit_hier_cifar', 0.877, '6.53M', '-', 6.302),
)
# published accuracy by source and net; the first table of a source counts
ACCURACIES = {(row.source, row.name): row.accuracy for row in reversed(PUBLISHED)}
