"""What all nets of the zoo share: their CIFAR-10 configuration and how they are built."""
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Optional, Type, TypeVar

import torch
import torch.nn as nn

from timm.layers import ClassifierHead, get_device_dtype
from timm.models import build_model_with_cfg
from timm.models._builder import resolve_pretrained_cfg

__all__ = [
    'CIFAR10_CLASSES', 'CIFAR10_MEAN', 'CIFAR10_STD', 'ZooNet', 'WEIGHTS_DIR', 'build_cifar_model', 'cifar_cfg',
]

CIFAR10_CLASSES = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')
# of the 50,000 training images
CIFAR10_MEAN = (0.49139968, 0.48215841, 0.44653091)
CIFAR10_STD = (0.24703223, 0.24348513, 0.26158784)

ModelT = TypeVar('ModelT', bound=nn.Module)

WEIGHTS_DIR = Path(__file__).resolve().parent.parent / 'weights'


class ZooNet(nn.Module):
    """What timm asks of any model and all of our own classifiers answer alike.

    Attributes:
        head: The classifier, with its pooling.
        num_classes: Its number of classes.
        grad_checkpointing: Whether intermediate results are computed anew in the backward pass.
    """
    if TYPE_CHECKING:  # torchscript knows these by their values
        head: ClassifierHead
        num_classes: int
        grad_checkpointing: bool

    @property
    def global_pool(self) -> str:
        return self.head.global_pool.pool_type

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Initialise all parameters anew, every module its own way (torch's defaults, like the released code)."""
        for module in self.modules():
            reset_parameters = getattr(module, 'reset_parameters', None)
            if reset_parameters is not None:
                reset_parameters()

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool)
        self.head.to(**get_device_dtype(self))
        self.head.train(self.training)


def cifar_cfg(name: str, **kwargs: Any) -> Dict[str, Any]:
    """Pretrained configuration of a CIFAR-10 net; its weights are the file of its name that ships, if one does."""
    file = WEIGHTS_DIR / f'{name}.safetensors'
    return {
        'file': str(file) if file.is_file() else None,
        'num_classes': 10, 'input_size': (3, 32, 32),
        'crop_pct': 1.0, 'interpolation': 'bicubic',
        'mean': CIFAR10_MEAN, 'std': CIFAR10_STD,
        'label_names': CIFAR10_CLASSES, 'license': 'apache-2.0',
        **kwargs,
    }


def build_cifar_model(model_cls: Type[ModelT], variant: str, pretrained: bool, **kwargs: Any) -> ModelT:
    """timm's builder, with an answer to the question what to do about a net that has no weights yet.

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
