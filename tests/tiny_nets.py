"""Keywords that make nets of every family tiny."""

NARROW = dict(embed_dim=8, mlp_dim=8, depth=2)
TINY = {
    'sa_quadratic_cifar': NARROW,
    'sa_quadratic_gen_cifar': NARROW,
    'sa_learned_cifar': NARROW,
    'sa_learned_content_cifar': NARROW,
    'sa_learned_content_hier_cifar': NARROW,
    'resvit_cifar': NARROW,
    'resvit_hier_cifar': NARROW,
    'san_pairwise_cifar': dict(channels=(32,) * 4),
    'san_patchwise_cifar': dict(channels=(32,) * 4),
    'san_pairwise_hier_cifar': dict(channels=(32,) * 4),
    'resnet_tiny_cifar': {},
}
