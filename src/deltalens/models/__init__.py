"""Everything that knows transformers: loading, blocks, capture, interventions and the checks behind them."""

from deltalens.models.architectures import ARCHITECTURES, Architecture
from deltalens.models.builtin_models import builtin_models
from deltalens.models.capture import States, capture, stream_states
from deltalens.models.checks import Check, check_chain, check_identity_patch
from deltalens.models.doctor import Diagnosis, doctor
from deltalens.models.load import load
from deltalens.models.model import Model, ModelIdentity
from deltalens.models.named import NAMED, NamedModel

__all__ = [
    "ARCHITECTURES",
    "NAMED",
    "Architecture",
    "Check",
    "Diagnosis",
    "Model",
    "ModelIdentity",
    "NamedModel",
    "States",
    "builtin_models",
    "capture",
    "check_chain",
    "check_identity_patch",
    "doctor",
    "load",
    "stream_states",
]
