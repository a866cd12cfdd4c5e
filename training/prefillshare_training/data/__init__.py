"""Training data: rows, how they are rendered, and what a run sees of them."""

from prefillshare_training.data.dataset import Dataset, load, progress_bar
from prefillshare_training.data.presets import PRESETS, Preset
from prefillshare_training.data.preview import preview
from prefillshare_training.data.rendering import Renderer

__all__ = ["PRESETS", "Dataset", "Preset", "Renderer", "load", "preview", "progress_bar"]
