import pytest
import timm


@pytest.mark.parametrize('size', [(32, 32), (2, 2), (34, 18), (64, 32)])
def test_the_quadratic_net_takes_any_even_size(size, small_net, images):
    model = small_net('sa_quadratic_cifar').eval()
    assert model(images(1, 3, *size)).shape == (1, 10)
    assert model.forward_features(images(1, 3, *size)).shape == (1, size[0] // 2, size[1] // 2, 16)


@pytest.mark.parametrize('kwargs,match', [
    (dict(num_heads=(9, 9)), r'num_heads=\(9, 9\).*6 layers'),
    (dict(num_heads=(3, 3), hierarchical=True), r'num_heads=\(3, 3\): needs one number'),
    (dict(num_heads=(9, 9, 9, 9, 9, 0)), 'num_heads=0'),
    (dict(encoding='nearest'), "encoding='nearest'"),
    (dict(terms='position', encoding='sinusoid'), 'absolute'),
])
def test_arguments_that_make_no_sense_are_named(kwargs, match):
    with pytest.raises(ValueError, match=match):
        timm.create_model('sa_quadratic_cifar', **kwargs)
