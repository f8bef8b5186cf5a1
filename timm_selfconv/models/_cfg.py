"""Configurations of the zoo: CIFAR-10, the weights of each net, and how a net is built from them."""
from typing import Any, Dict, List, Optional, Type, TypeVar

import timm
import torch.nn as nn
from timm.models import PretrainedCfg, build_model_with_cfg
from timm.models._builder import resolve_pretrained_cfg

from ._base import ZooNet
from timm_selfconv.weights import LICENSE, checksums, default_weights, weights_path
from ._weights import WEIGHTS_FILE, hub_id, load_weights

__all__ = ['CIFAR10_CLASSES', 'CIFAR10_MEAN', 'CIFAR10_STD', 'build_net', 'cifar_cfgs', 'zoo_names']

CIFAR10_CLASSES = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')
# of the 50,000 training images
CIFAR10_MEAN = (0.49139968, 0.48215841, 0.44653091)
CIFAR10_STD = (0.24703223, 0.24348513, 0.26158784)

ModelT = TypeVar('ModelT', bound=nn.Module)


def weights_source(entry: str) -> Dict[str, Any]:
    """What timm's configurations say of weights: nothing where there are none, a file where they ship."""
    if entry not in checksums():
        return {}
    file = weights_path(entry)
    return dict(file=str(file) if file.is_file() else None, hf_hub_id=hub_id(entry), hf_hub_filename=WEIGHTS_FILE)


def cifar_cfgs(*names: str, **cfg: Any) -> Dict[str, Any]:
    """Pretrained configurations of CIFAR-10 nets, for timm's ``generate_default_cfgs``.

    Every net has the tag ``cifar10``; its weights are ``{name}`` in ``weights/SHA256SUMS``, if it has some. An entry
    ``{name}.{tag}`` there is one more tag of the net. The default tag is that of the most accurate weights. The file
    may lie in the package or on the Hub.

    Args:
        *names: Names of the nets.
        **cfg: What else timm's configurations hold, the same for all these nets.

    Returns:
        A configuration for each ``name.tag``.
    """
    weights: Dict[str, str] = {}  # timm takes the first that has weights for the default
    for name in names:
        default = default_weights(name)
        tagged = [entry for entry in checksums() if entry.partition('.')[0] == name]
        weights.update((entry if '.' in entry else f'{entry}.cifar10', entry) for entry in (default, *tagged, name))
    return {
        key: {
            **weights_source(entry),
            'num_classes': 10, 'input_size': (3, 32, 32),
            'crop_pct': 1.0, 'interpolation': 'bicubic',
            'mean': CIFAR10_MEAN, 'std': CIFAR10_STD,
            'label_names': CIFAR10_CLASSES, 'license': LICENSE,
            **cfg,
        }
        for key, entry in weights.items()
    }


def own_weights(cfg: PretrainedCfg) -> Optional[str]:
    """The entry of ``weights/SHA256SUMS`` that a configuration means; None if it means weights from elsewhere."""
    name = f'{cfg.architecture}.{cfg.tag}'.removesuffix('.cifar10')
    ours = (
        not cfg.state_dict and cfg.source in (None, '', 'timm') and cfg.file in (None, str(weights_path(name)))
        and cfg.hf_hub_id == hub_id(name))
    return name if ours else None


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
    own: Optional[str] = None
    if pretrained:
        cfg = resolve_pretrained_cfg(variant, kwargs.get('pretrained_cfg'), kwargs.get('pretrained_cfg_overlay'))
        if not (cfg.has_weights or cfg.state_dict):
            raise RuntimeError(
                f'{variant} has no trained weights yet. Train it (recipes/README.md says how), give weights of '
                f"your own (pretrained_cfg_overlay=dict(file='model.safetensors')), or take a net that has them: "
                "timm.list_models('*_cifar', pretrained=True)")
        own = own_weights(cfg)
        if own is not None:
            overlay = dict(kwargs.get('pretrained_cfg_overlay') or {}, state_dict=load_weights(own))
            kwargs['pretrained_cfg_overlay'] = overlay
    model = build_model_with_cfg(model_cls, variant, pretrained, **kwargs)
    if own is not None:
        for module in model.modules():  # timm keeps the configuration, and in it all weights once more
            getattr(module, 'pretrained_cfg', {}).pop('state_dict', None)
    return model


def zoo_names() -> List[str]:
    """Names of all nets that this package registers, sorted as timm does."""
    return [name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith(__package__)]
