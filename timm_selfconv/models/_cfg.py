"""Configurations of the zoo: CIFAR-10, the weights of each net, and how a net is built from them."""
from typing import Any, Dict, List, Type, TypeVar

import timm
import torch.nn as nn
from timm.models import build_model_with_cfg
from timm.models._builder import resolve_pretrained_cfg

from timm_selfconv.layers.parameters import keep_from_decay, no_weight_decay
from ._base import ZooNet
from timm_selfconv.weights import LICENSE, provenance
from timm_selfconv.weights.loading import weight_sources, weights_file

__all__ = ['CIFAR10_CLASSES', 'CIFAR10_MEAN', 'CIFAR10_STD', 'build_net', 'cifar_cfgs', 'zoo_names']

CIFAR10_CLASSES = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')
# of the 50,000 training images
CIFAR10_MEAN = (0.49139968, 0.48215841, 0.44653091)
CIFAR10_STD = (0.24703223, 0.24348513, 0.26158784)

ModelT = TypeVar('ModelT', bound=nn.Module)


def cifar_cfgs(*names: str, **cfg: Any) -> Dict[str, Any]:
    """Pretrained configurations of nets by ``name.tag``, for timm's ``generate_default_cfgs``; all nets share ``cfg``.

    A net has a tag for each set of its weights, and always the tag ``cifar10``, the default even without weights.
    """
    return {
        f'{name}.{tag}' + ('*' if tag == 'cifar10' else ''): {  # timm's mark of a default, which has to come last
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
    """timm's builder, which also says what to do about a net that has no weights yet.

    Raises:
        RuntimeError: If pretrained weights are asked for and none are known, or those that are known can't be had.
        ValueError: If features are asked for in a way that would leave some of them out.
    """
    if issubclass(model_cls, ZooNet):
        feature_cls = kwargs.get('feature_cls', 'getter')
        if kwargs.get('features_only') and feature_cls != 'getter':
            raise ValueError(  # modules that layers share, or that are never called as a whole, have no hook each
                f"feature_cls={feature_cls!r}: {variant} needs 'getter', its default")
        kwargs['feature_cfg'] = dict(out_indices=kwargs.pop('out_indices', None), feature_cls='getter')  # None: all
    if pretrained:
        cfg = resolve_pretrained_cfg(variant, kwargs.get('pretrained_cfg'), kwargs.get('pretrained_cfg_overlay'))
        if not (cfg.has_weights or cfg.state_dict):
            others = ', '.join(
                f'{name!r} ({provenance(name)})' for name in timm.list_models(f'{variant}.*', pretrained=True))
            which = f' from labels only, but others by tag: {others}' if others else ''
            raise RuntimeError(
                f'{variant} has no trained weights yet{which}. Train it (recipes/README.md says how), give weights of '
                "your own (pretrained_cfg_overlay=dict(file='model.safetensors')), or take a net that has them: "
                "timm.list_models('*_cifar', pretrained=True)")
        file = weights_file(cfg, kwargs.get('cache_dir'))
        if file is not None:
            kwargs['pretrained_cfg_overlay'] = dict(kwargs.get('pretrained_cfg_overlay') or {}, file=str(file))
    model = build_model_with_cfg(model_cls, variant, pretrained, **kwargs)
    if kwargs.get('features_only'):  # timm's wrappers do not ask the net for these names
        net = getattr(model, 'model', None)
        keep_from_decay(model, no_weight_decay(model) if net is None else {f'model.{n}' for n in net.no_weight_decay()})
    return model


def zoo_names() -> List[str]:
    """Names of all nets that this package registers, sorted as timm does."""
    return [name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith(__package__)]
