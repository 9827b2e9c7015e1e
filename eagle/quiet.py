"""Third-party libraries' progress bars and notices, switched off so that a user reads only our lines."""

import os
import warnings


def quieten() -> None:
    """Silences transformers, datasets, the hub client and Python warnings; settings of the environment win."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    warnings.filterwarnings("ignore")
    import datasets
    import torch
    from transformers.utils import logging

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, where installed, warns that it found no GPU
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
