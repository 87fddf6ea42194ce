"""Built-in callbacks, one per file, and reporters. Imports no tensor library."""

from paceline.callbacks.early_stopping import EarlyStoppingCallback
from paceline.callbacks.flow import DefaultFlowCallback
from paceline.callbacks.notebook import NotebookProgressCallback
from paceline.callbacks.printer import PrinterCallback
from paceline.callbacks.progress import ProgressCallback
from paceline.callbacks.reporters import find_reporters

__all__ = [
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "NotebookProgressCallback",
    "PrinterCallback",
    "ProgressCallback",
    "find_reporters",
]
