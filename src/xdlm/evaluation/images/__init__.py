"""How good images are: features of the Inception network of 2015, and distances between sets of them."""

from xdlm.evaluation.images.features import (
    FeatureSet,
    Gaussian,
    Running,
    batch_on,
    features_of,
    reference_features,
)
from xdlm.evaluation.images.inception import Inception, default_weights, load_inception
from xdlm.evaluation.images.painting import (
    Drawn,
    Reference,
    measure,
    metrics_of,
    plan_painting,
    plan_real,
    real_images,
)
from xdlm.evaluation.images.scores import InceptionScore, fid, fid_error, kid, precision_recall

__all__ = [
    "Drawn",
    "FeatureSet",
    "Gaussian",
    "Inception",
    "InceptionScore",
    "Reference",
    "Running",
    "batch_on",
    "default_weights",
    "features_of",
    "fid",
    "fid_error",
    "kid",
    "load_inception",
    "measure",
    "metrics_of",
    "plan_painting",
    "plan_real",
    "precision_recall",
    "real_images",
    "reference_features",
]
