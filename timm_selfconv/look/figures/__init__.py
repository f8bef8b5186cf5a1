"""The papers' figures. Each is a function that returns a matplotlib Figure.

Pure functions compute the values to plot; each file has them above its figures.
"""
try:
    import matplotlib
except ImportError as e:
    raise ImportError("figures need matplotlib: pip install 'timm_selfconv[figures]'") from e

from .accuracy import figure_accuracy, read_curve, read_curves, shipped_curves
from .centers import density_level, figure_centers, figure_regions, figure_training, mass_ellipse, mass_radius, \
    training_blobs
from .draw import draw_figures, mean_maps
from .footprints import figure_footprints
from .kernels import figure_kernels, figure_shifts
from .maps import average_attention, by_locality, figure_average, figure_query, query_attention
from .style import check_ending, save_figure, save_figures
