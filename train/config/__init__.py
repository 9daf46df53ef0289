"""Every setting of a run: typed frozen dataclasses, what is refused, and the presets. No default lives elsewhere."""

from train.config._mesh import AXES as AXES
from train.config._mesh import parse_mesh as parse_mesh
from train.config._presets import PRESETS as PRESETS
from train.config._settings import BYTE_VOCABULARY as BYTE_VOCABULARY
from train.config._settings import GPT2_VOCABULARY as GPT2_VOCABULARY
from train.config._settings import AttentionName as AttentionName
from train.config._settings import DataConfig as DataConfig
from train.config._settings import ModelConfig as ModelConfig
from train.config._settings import OptimizerConfig as OptimizerConfig
from train.config._settings import SettingError as SettingError
from train.config._settings import TrainConfig as TrainConfig
