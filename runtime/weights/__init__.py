"""Weights: what a folder holds (`index`), what we want of it (`table`), how it travels (`load`)."""

from ultraflash.runtime.weights.index import CheckpointIndex, TensorInfo, weights_digest
from ultraflash.runtime.weights.load import MappedRows, Weights, load_weights
from ultraflash.runtime.weights.table import Row, weight_table
from ultraflash.runtime.weights.token_map import build_token_map, check_special_ids

__all__ = [
    "CheckpointIndex",
    "MappedRows",
    "Row",
    "TensorInfo",
    "Weights",
    "build_token_map",
    "check_special_ids",
    "load_weights",
    "weight_table",
    "weights_digest",
]
