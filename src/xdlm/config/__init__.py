"""What a run is made of: typed dataclasses, read from YAML, overridden by dotted flags.

The resolved configuration is saved with every checkpoint, so a folder says how it came to be. An
unknown key, a wrong type or a setting that the chosen kind would ignore is an error.
"""

from xdlm.config.process import AUTOREGRESSIVE, ProcessConfig
from xdlm.config.reading import dump_config, from_tree, load_config, parse_config
from xdlm.config.run import RunConfig
from xdlm.config.sections import DataConfig, LoraConfig, LossConfig, OptimConfig, TrainConfig

__all__ = [
    "AUTOREGRESSIVE",
    "DataConfig",
    "LoraConfig",
    "LossConfig",
    "OptimConfig",
    "ProcessConfig",
    "RunConfig",
    "TrainConfig",
    "dump_config",
    "from_tree",
    "load_config",
    "parse_config",
]
