"""This project's own folders: `save_pretrained` of EagleHead and Eagle3Head."""

from eagle.eagle3_head import Eagle3HeadConfig
from eagle.formats.format import OWN_IDS, Format, HeadFiles
from eagle.heads import EagleHeadConfig

MODEL_TYPES = (EagleHeadConfig.model_type, Eagle3HeadConfig.model_type)


def _sign(files: HeadFiles) -> str | None:
    kind = files.values.get("model_type")
    return f"config.json has model_type {kind}" if kind in MODEL_TYPES else None


OWN = Format(
    name="eagle",
    title="this project's",
    source="eagle/heads.py, eagle/eagle3_head.py",
    sign=_sign,
    prefixes={},
    layer_ids=(OWN_IDS,),
)
