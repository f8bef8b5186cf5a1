"""Pretrained configurations of the models, and the function that builds a model."""
from typing import Any, Dict, List, Type, TypeVar

import timm
import torch.nn as nn
from timm.models import build_model_with_cfg
from timm.models._builder import resolve_pretrained_cfg

from timm_selfconv.layers.parameters import keep_from_decay
from timm_selfconv.weights import LICENSE
from timm_selfconv.weights.loading import weight_sources, weights_file
from ._base import ZooNet

__all__ = ['CIFAR10_CLASSES', 'CIFAR10_MEAN', 'CIFAR10_STD', 'build_net', 'cifar_cfgs', 'zoo_names']

CIFAR10_CLASSES = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')
# of the 50,000 training images
CIFAR10_MEAN = (0.49139968, 0.48215841, 0.44653091)
CIFAR10_STD = (0.24703223, 0.24348513, 0.26158784)

ModelT = TypeVar('ModelT', bound=nn.Module)


def cifar_cfgs(*names: str, **cfg: Any) -> Dict[str, Any]:
    """Return configurations by ``name.tag`` for timm's ``generate_default_cfgs``; all share ``cfg``.

    There is a tag for each weight file. The default tag, ``cifar10``, exists even without weights.
    """
    return {
        f'{name}.{tag}' + ('*' if tag == 'cifar10' else ''): {  # "*" marks the default in timm
            **source,
            'num_classes': 10, 'input_size': (3, 32, 32),
            'crop_pct': 1.0, 'interpolation': 'bicubic',
            'mean': CIFAR10_MEAN, 'std': CIFAR10_STD,
            'label_names': CIFAR10_CLASSES, 'license': LICENSE,
            **cfg,
        }
        for name in names for tag, source in weight_sources(name).items()
    }


def build_net(model_cls: Type[ModelT], variant: str, pretrained: bool, **kwargs: Any) -> ModelT:
    """Build a model by timm's ``build_model_with_cfg``, with weights from the package, the cache or the Hub.

    Raises:
        RuntimeError: If pretrained weights do not exist or cannot be downloaded.
        ValueError: If ``feature_cls`` would miss features.
    """
    features = kwargs.get('features_only') and issubclass(model_cls, ZooNet)
    if features:
        kwargs.setdefault('out_indices', None)
        if kwargs.setdefault('feature_cls', 'getter') != 'getter':
            raise ValueError(  # hooks fail for modules that are shared or never called
                f"feature_cls={kwargs['feature_cls']!r}: {variant} needs 'getter', its default")
    if pretrained:
        cfg = resolve_pretrained_cfg(variant, kwargs.get('pretrained_cfg'), kwargs.get('pretrained_cfg_overlay'))
        if not (cfg.has_weights or cfg.state_dict):
            raise RuntimeError(
                f'{variant} has no trained weights yet. Train it (see recipes/README.md), load a file '
                "(pretrained_cfg_overlay=dict(file='model.safetensors')), or choose a model with weights: "
                "timm.list_models('*_cifar', pretrained=True)")
        file = weights_file(cfg, kwargs.get('cache_dir'))
        if file is not None:
            kwargs['pretrained_cfg_overlay'] = dict(kwargs.get('pretrained_cfg_overlay') or {}, file=str(file))
    model = build_model_with_cfg(model_cls, variant, pretrained, **kwargs)
    if features:
        net: Any = model.model  # timm's wrapper does not forward no_weight_decay
        keep_from_decay(model, {f'model.{name}' for name in net.no_weight_decay()})
    return model


def zoo_names() -> List[str]:
    """Names of all models in this package, in timm's order."""
    return [name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith(__package__)]
