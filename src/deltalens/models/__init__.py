"""Everything that knows transformers: loading, blocks, capture, interventions and the checks behind them."""

from deltalens.models.architectures import ARCHITECTURES, Architecture
from deltalens.models.builtin_models import builtin_models
from deltalens.models.capture import States, capture, stream_states, watch_stream
from deltalens.models.checks import Check, check_chain, check_identity_patch
from deltalens.models.doctor import Diagnosis, check_needed, doctor
from deltalens.models.glance import Glance, glance
from deltalens.models.intervene import (
    Intervention,
    InterventionSession,
    LogitsChunk,
    Parity,
    check_parity,
    choose_scheme,
    intervene,
    isolated_outputs,
    trusted_scheme,
)
from deltalens.models.listing import Verification, models_table, verifications
from deltalens.models.load import load
from deltalens.models.model import Model, ModelIdentity
from deltalens.models.named import NAMED, NamedModel
from deltalens.models.opening import open_model
from deltalens.models.replacement import Replacement, ReplacementFacts, replaced_blocks

__all__ = [
    "ARCHITECTURES",
    "NAMED",
    "Architecture",
    "Check",
    "Diagnosis",
    "Glance",
    "Intervention",
    "InterventionSession",
    "LogitsChunk",
    "Model",
    "ModelIdentity",
    "NamedModel",
    "Parity",
    "Replacement",
    "ReplacementFacts",
    "States",
    "Verification",
    "builtin_models",
    "capture",
    "check_chain",
    "check_identity_patch",
    "check_needed",
    "check_parity",
    "choose_scheme",
    "doctor",
    "glance",
    "intervene",
    "isolated_outputs",
    "load",
    "models_table",
    "open_model",
    "replaced_blocks",
    "stream_states",
    "trusted_scheme",
    "verifications",
    "watch_stream",
]
