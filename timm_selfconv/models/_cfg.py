"""Configurations of the zoo: CIFAR-10, the weights that ship, and how a net is built from them."""
from pathlib import Path
from typing import Any, Dict, List, Type, TypeVar

import timm
import torch.nn as nn
from timm.models import build_model_with_cfg
from timm.models._builder import resolve_pretrained_cfg

__all__ = ['CIFAR10_CLASSES', 'CIFAR10_MEAN', 'CIFAR10_STD', 'WEIGHTS_DIR', 'build_net', 'cifar_cfgs', 'zoo_names']

CIFAR10_CLASSES = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')
# of the 50,000 training images
CIFAR10_MEAN = (0.49139968, 0.48215841, 0.44653091)
CIFAR10_STD = (0.24703223, 0.24348513, 0.26158784)

WEIGHTS_DIR = Path(__file__).resolve().parent.parent / 'weights'

ModelT = TypeVar('ModelT', bound=nn.Module)


def cifar_cfgs(*names: str, **cfg: Any) -> Dict[str, Any]:
    """Pretrained configurations of CIFAR-10 nets, for timm's ``generate_default_cfgs``.

    Every net has the tag ``cifar10``, whose weights are ``weights/{name}.safetensors`` if that file ships. A file
    ``weights/{name}.{tag}.safetensors`` is one more tag of the net. Who names no tag gets the first that has weights.

    Args:
        *names: Names of the nets.
        **cfg: What else timm's configurations hold, the same for all these nets.

    Returns:
        A configuration for each ``name.tag``.
    """
    files = {f'{name}.cifar10': WEIGHTS_DIR / f'{name}.safetensors' for name in names}
    files.update((path.stem, path) for name in names for path in sorted(WEIGHTS_DIR.glob(f'{name}.*.safetensors')))
    return {
        key: {
            'file': str(file) if file.is_file() else None,
            'num_classes': 10, 'input_size': (3, 32, 32),
            'crop_pct': 1.0, 'interpolation': 'bicubic',
            'mean': CIFAR10_MEAN, 'std': CIFAR10_STD,
            'label_names': CIFAR10_CLASSES, 'license': 'apache-2.0',
            **cfg,
        }
        for key, file in files.items()
    }


def build_net(model_cls: Type[ModelT], variant: str, pretrained: bool, **kwargs: Any) -> ModelT:
    """timm's builder, which also says what to do about a net that has no weights yet.

    Raises:
        RuntimeError: If pretrained weights are asked for and none are known.
    """
    if pretrained:
        cfg = resolve_pretrained_cfg(variant, kwargs.get('pretrained_cfg'), kwargs.get('pretrained_cfg_overlay'))
        if not (cfg.has_weights or cfg.state_dict):
            raise RuntimeError(
                f'{variant} has no trained weights yet. Train it (recipes/README.md says how), give weights of '
                f"your own (pretrained_cfg_overlay=dict(file='model.safetensors')), or take a net that has them: "
                "timm.list_models('*_cifar', pretrained=True)")
    return build_model_with_cfg(model_cls, variant, pretrained, **kwargs)


def zoo_names() -> List[str]:
    """Names of all nets that this package registers, sorted as timm does."""
    return [name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith(__package__)]
