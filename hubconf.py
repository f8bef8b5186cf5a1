"""Entrypoints for torch.hub: ``torch.hub.load(repo, 'sa_quadratic_tiny_cifar', pretrained=True)``."""
dependencies = ['torch', 'torchvision', 'timm', 'fvcore', 'huggingface_hub', 'safetensors']


def _entrypoint(name, summary):
    def create(pretrained=False, **kwargs):
        import timm  # torch.hub imports this file before it looks at the dependencies

        import timm_selfconv  # noqa: F401  registers the models
        return timm.create_model(name, pretrained=pretrained, **kwargs)

    create.__name__ = name
    create.__doc__ = f"""{summary}

    Args:
        pretrained: Load trained weights.
        **kwargs: Arguments of timm.create_model, e.g. num_classes, in_chans, img_size, features_only.
    """
    return create


sa_quadratic_cifar = _entrypoint('sa_quadratic_cifar', 'Quadratic encoding: every head is an isotropic Gaussian.')
sa_quadratic_gen_cifar = _entrypoint('sa_quadratic_gen_cifar', 'Quadratic encoding with a full precision a head.')
sa_quadratic_gen_pruned_cifar = _entrypoint(
    'sa_quadratic_gen_pruned_cifar', 'The general quadratic net without its degenerate heads.')
sa_learned_cifar = _entrypoint('sa_learned_cifar', 'Learned relative encoding, positions alone.')
sa_learned_content_cifar = _entrypoint('sa_learned_content_cifar', 'Learned relative encoding and content.')
sa_quadratic_h16_cifar = _entrypoint('sa_quadratic_h16_cifar', 'Quadratic encoding, 16 heads a layer.')
sa_learned_h16_cifar = _entrypoint('sa_learned_h16_cifar', 'Learned relative encoding, 16 heads a layer.')
sa_learned_content_h16_cifar = _entrypoint(
    'sa_learned_content_h16_cifar', 'Learned relative encoding and content, 16 heads a layer.')
sa_learned_content_hier_cifar = _entrypoint(
    'sa_learned_content_hier_cifar', 'Learned relative encoding and content, one layer shared by six passes.')
sa_learned_content_hier_h16_cifar = _entrypoint(
    'sa_learned_content_hier_h16_cifar', 'Learned relative encoding and content, one shared layer of 16 heads.')
sa_quadratic_tiny_cifar = _entrypoint('sa_quadratic_tiny_cifar', 'A small quadratic net that trains on a CPU.')
sa_learned_tiny_cifar = _entrypoint('sa_learned_tiny_cifar', 'A small learned net that trains on a CPU.')
sa_learned_content_tiny_cifar = _entrypoint(
    'sa_learned_content_tiny_cifar', 'A small net with content that trains on a CPU.')
sa_learned_content_hier_tiny_cifar = _entrypoint(
    'sa_learned_content_hier_tiny_cifar', 'A small net with content and one shared layer that trains on a CPU.')
san_pairwise_cifar = _entrypoint('san_pairwise_cifar', 'Vector self-attention over 3 x 3 pixels, pairwise weights.')
san_patchwise_cifar = _entrypoint('san_patchwise_cifar', 'Vector self-attention over 3 x 3 pixels, patchwise weights.')
san_pairwise_hier_cifar = _entrypoint(
    'san_pairwise_hier_cifar', 'Pairwise vector self-attention, two bottlenecks shared by four passes.')
san_patchwise_hier_cifar = _entrypoint(
    'san_patchwise_hier_cifar', 'Patchwise vector self-attention, two bottlenecks shared by four passes.')
resvit_cifar = _entrypoint('resvit_cifar', "A vision transformer on a ResNet's first stage.")
resvit_hier_cifar = _entrypoint(
    'resvit_hier_cifar', "A vision transformer on a ResNet's first stage, one layer shared by six passes.")
resnet18_cifar = _entrypoint('resnet18_cifar', 'ResNet-18 with a 3x3 stem, the convolutional baseline.')
resnet_tiny_cifar = _entrypoint('resnet_tiny_cifar', 'A ResNet of the size of the small attention nets.')
