from timm_selfconv.weights import measured_accuracy
from timm_selfconv.look.captions import net_caption


def test_where_weights_are_from_and_how_good_they_are():
    accuracy = measured_accuracy('sa_learned_tiny_cifar')
    assert net_caption('sa_learned_tiny_cifar').endswith(f"{100 * accuracy:.1f} % of CIFAR-10's test images right")
    assert 'epochs, ' in net_caption('sa_learned_tiny_cifar')
    assert net_caption('san_patchwise_hier_cifar').startswith('from scratch, labels only, 1 epoch, ')
    taught = net_caption('sa_quadratic_cifar')
    assert taught.startswith('taught by resnet18_cifar, ') and taught == net_caption('sa_quadratic_cifar.dist_cifar10')
    assert net_caption('sa_quadratic_cifar.cifar10') == 'its own weights'  # that tag has none
    assert net_caption('sa_learned_tiny_cifar', 'folder/last.pth.tar') == 'weights of last.pth.tar'
    assert net_caption('sa_learned_cifar', untrained=True) == 'untrained'
    assert net_caption('local-dir:pruned') == 'its own weights'
