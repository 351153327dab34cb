"""What runs on the device: paged attention and products, each in a plain form and in forms for one platform."""

from jaxllm.pallas_kernels.kernels import REFERENCE, Kernels, choose_kernels
from jaxllm.pallas_kernels.metadata import StateRows, StepMetadata
from jaxllm.pallas_kernels.mixture import Mixture
from jaxllm.pallas_kernels.norms import Norm, RootMeanSquare
from jaxllm.pallas_kernels.pages import Pages

__all__ = [
    "REFERENCE", "Kernels", "Mixture", "Norm", "Pages", "RootMeanSquare", "StateRows", "StepMetadata", "choose_kernels",
]  # fmt: skip
