"""This project's own folders: `save_pretrained` of EagleHead and Eagle3Head."""

from eagle.formats.format import OWN_IDS, Format, HeadFiles
from eagle.heads.eagle1 import EagleHeadConfig
from eagle.heads.eagle3 import Eagle3HeadConfig

MODEL_TYPES = (EagleHeadConfig.model_type, Eagle3HeadConfig.model_type)


def _sign(files: HeadFiles) -> str | None:
    kind = files.values.get("model_type")
    return f"config.json has model_type {kind}" if kind in MODEL_TYPES else None


OWN = Format(
    name="eagle",
    title="this project's",
    source="eagle/heads/eagle1.py, eagle/heads/eagle3.py",
    sign=_sign,
    prefixes={},
    layer_ids=(OWN_IDS,),
)
