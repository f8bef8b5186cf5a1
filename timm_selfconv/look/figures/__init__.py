"""The papers' figures. Each is a function that returns a matplotlib Figure.

Pure functions compute the values to plot; each file has them above its figures.
"""
try:
    import matplotlib
except ImportError as e:
    raise ImportError("figures need matplotlib: pip install 'timm_selfconv[figures]'") from e

from .accuracy import figure_accuracy, read_curve, read_curves, shipped_curves
from .centers import figure_centers, figure_regions, figure_training, training_blobs
from .draw import draw_figures
from .kernels import figure_kernels, figure_shifts
from .maps import figure_average, figure_footprints, figure_query
from .style import check_ending, save_figure, save_figures
