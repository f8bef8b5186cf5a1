"""Folders of pictures: validation splits and errors."""
from collections import Counter
from pathlib import Path

import pytest

import pictures
from timm_selfconv.training.picture_folder import open_picture_folder


def fill(folder, **classes):
    """Make a folder with this many pictures of each class; a class with 0 pictures gets an empty folder."""
    for name, count in classes.items():
        pictures.fill(folder, [name], count, size=(8, 8))


def files(dataset):
    return [file for file, _ in dataset.reader.samples]


@pytest.mark.parametrize('part', ['.', 'train'])
def test_a_fifth_of_each_class_is_held_out_by_the_seed(tmp_path, part):
    """Names that differ only in case or zeros have one order."""
    names = ['01', '1', '9', '10', 'Cat', 'cat', 'eel']
    fill(tmp_path / part, **dict(zip(names, (2, 2, 3, 2, 5, 10, 2))))
    train, held, told = open_picture_folder(tmp_path, 1)
    assert list(train.reader.class_to_idx) == list(held.reader.class_to_idx) == names
    assert Counter(Path(file).parent.name for file in files(held)) == dict(zip(names, (1, 1, 1, 1, 1, 2, 1)))
    assert all(names[label] == Path(file).parent.name for part in (train, held) for file, label in part.reader.samples)
    assert sorted(files(train) + files(held)) == sorted(map(str, tmp_path.rglob('*.png')))
    assert told == '20% of each class, drawn by seed 1'
    same, other = (files(open_picture_folder(tmp_path, seed)[1]) for seed in (1, 2))
    assert same == files(held) != other


@pytest.mark.parametrize('name', ['val', 'test'])
def test_pictures_to_validate_on_may_have_a_folder(tmp_path, name):
    fill(tmp_path / 'train', cat=2, dog=3)
    fill(tmp_path / name, dog=1, cat=4)
    train, held, told = open_picture_folder(tmp_path, 1)
    assert [label for _, label in train.reader.samples] == [0, 0, 1, 1, 1]
    assert [label for _, label in held.reader.samples] == [0] * 4 + [1] and told == f'all pictures in {name}'


@pytest.mark.parametrize('folders,message', [
    ({'.': dict(cat=3)}, r"needs at least 2 classes, has \['cat'\]"),
    ({'.': dict(cat=3, dog=0, eel=0)}, r"each class needs a picture \(.bmp.*these have no pictures: \['dog', 'eel'\]"),
    ({'.': dict(cat=0, dog=0)}, r"has no pictures \(.bmp, .jpeg, .jpg, .*\)"),
    ({'.': dict(cat=3, dog=1)}, r"needs 2 pictures of each class or more.*'dog' has 1"),
    ({'train': dict(cat=3, dog=3), 'val': dict(cat=3, cow=1)}, r"val': .*\['cat', 'dog'\], has \['cat', 'cow'"),
    ({'train': dict(cat=3, dog=3), 'val': dict(cat=3, dog=0)}, r"val': .*these have no pictures: \['dog'\]"),
    ({'val': dict(cat=3, dog=3)}, r"has a folder val, so it needs a folder train too"),
    ({'cat': dict(young=3), '.': dict(dog=3)}, r"but 3 are elsewhere, e.g. .*young"),
], ids=str)
def test_folders_that_make_no_net_are_refused(tmp_path, folders, message):
    for name, classes in folders.items():
        (tmp_path / 'own' / name).mkdir(parents=True, exist_ok=True)
        fill(tmp_path / 'own' / name, **classes)
    with pytest.raises(ValueError, match=message) as refused:
        open_picture_folder(tmp_path / 'own', 1)
    assert 'own' in str(refused.value) and '\n' not in str(refused.value)
