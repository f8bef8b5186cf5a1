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

# every family and layer, shallow
ONE_LAYER = dict(NARROW, depth=1)
TWO_STAGES = dict(channels=(32,) * 2, depths=(1,) * 2)
SHALLOW = {
    'sa_quadratic_cifar': ONE_LAYER,
    'sa_quadratic_gen_cifar': ONE_LAYER,
    'sa_learned_cifar': ONE_LAYER,
    'sa_learned_content_cifar': ONE_LAYER,
    'sa_learned_content_hier_cifar': NARROW,
    'resvit_cifar': ONE_LAYER,
    'resvit_hier_cifar': NARROW,
    'san_pairwise_cifar': TWO_STAGES,
    'san_patchwise_cifar': TWO_STAGES,
    'san_pairwise_hier_cifar': TWO_STAGES,
    'san_patchwise_hier_cifar': TWO_STAGES,
    'resnet_tiny_cifar': dict(layers=(1,) * 4, channels=(8,) * 4),
}
