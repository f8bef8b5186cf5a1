"""The 15 corruptions of ImageNet-C (Hendrycks and Dietterich, 2019) on test images of CIFAR-10, by imagecorruptions.

    python corruptions.py CIFAR10 OUTPUT [COUNT]

writes a folder a corruption, its test split the first COUNT (1,000) test images at each of the five severities, for
`timm-selfconv eval NET --data hfds/OUTPUT/gaussian_noise`. imagecorruptions is of 2020 and wants an environment of its
own, Python 3.11 at most:

    pip install --no-deps imagecorruptions
    pip install 'numpy<2' 'scipy<1.12' scikit-image==0.20.0 'opencv-python-headless<4.11' numba
    pip install 'setuptools<81' 'pyarrow<21' pillow
"""
import io
import sys
from pathlib import Path

import imagecorruptions
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from skimage.filters import gaussian

# scikit-image renamed the argument
imagecorruptions.corruptions.gaussian = lambda *args, multichannel=False, **kwargs: gaussian(
    *args, channel_axis=-1 if multichannel else None, **kwargs)


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, 'png')
    return file.getvalue()


def main(source, output, count='1000'):
    table = pa.concat_tables(pq.read_table(path) for path in sorted(Path(source).rglob('test-*.parquet')))
    table = table.slice(0, int(count))
    column, field = table.column_names.index('img'), table.schema.field('img')
    images = [np.array(Image.open(io.BytesIO(row['bytes']))) for row in table['img'].to_pylist()]
    for name in imagecorruptions.get_corruption_names():
        np.random.seed(0)
        rows = [
            dict(bytes=png(imagecorruptions.corrupt(image, severity, name)), path=None)
            for severity in range(1, 6) for image in images]
        corrupted = pa.concat_tables([table] * 5)
        corrupted = corrupted.set_column(column, field, pa.array(rows, field.type))
        folder = Path(output, name, 'data')
        folder.mkdir(parents=True)
        pq.write_table(corrupted, folder / 'test-00000-of-00001.parquet')


if __name__ == '__main__':
    main(*sys.argv[1:])
