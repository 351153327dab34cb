"""What runs on the device: paged attention and products, each in a plain form and in forms for one platform."""

from jaxllm.cpu_kernels import AdapterArrays, AdapterUses
from jaxllm.pallas_kernels.kernels import REFERENCE, Kernels, choose_kernels
from jaxllm.pallas_kernels.metadata import ImageRows, StateRows, StepMetadata
from jaxllm.pallas_kernels.pages import Pages
from jaxllm.pallas_kernels.products import (
    LATER,
    Late,
    Later,
    Mixture,
    Norm,
    Residual,
    RootMeanSquare,
    Unsummed,
    late_sum,
    with_late,
)
from jaxllm.pallas_kernels.ssd import SSDInputs
from jaxllm.pallas_kernels.states import Tentative, run_states, settle, staying

__all__ = [
    "LATER", "REFERENCE", "AdapterArrays", "AdapterUses", "ImageRows", "Kernels", "Late", "Later", "Mixture", "Norm",
    "Pages", "Residual", "RootMeanSquare", "SSDInputs", "StateRows", "StepMetadata", "Tentative", "Unsummed",
    "choose_kernels", "late_sum", "run_states", "settle", "staying", "with_late",
]  # fmt: skip
