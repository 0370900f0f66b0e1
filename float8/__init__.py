"""FP8 training for PyTorch: one tensor, one dispatch table, one recipe object."""

from . import ops as ops
from .cache import cached_weights as cached_weights
from .convert import KEEP as KEEP
from .convert import Report as Report
from .convert import convert as convert
from .convert import revert as revert
from .convert import summary as summary
from .devices import assume_device as assume_device
from .devices import device_profile as device_profile
from .devices import format_for as format_for
from .dispatch import copy as _copy  # noqa: F401 (fills the table)
from .dispatch import grouped as _grouped  # noqa: F401
from .dispatch import matmul as _matmul  # noqa: F401
from .dispatch import shape as _shape  # noqa: F401
from .dispatch import value as _value  # noqa: F401
from .dispatch.table import implements as implements
from .experts import swiglu_experts as swiglu_experts
from .formats import E4M3FN as E4M3FN
from .formats import E4M3FNUZ as E4M3FNUZ
from .formats import E5M2 as E5M2
from .formats import E5M2FNUZ as E5M2FNUZ
from .formats import E8M0 as E8M0
from .formats import Float8Format as Float8Format
from .grouped import grouped_mm as grouped_mm
from .linear import Float8Linear as Float8Linear
from .linear import linear as linear
from .mlp import SwiGLU as SwiGLU
from .mlp import swiglu_mlp as swiglu_mlp
from .moe import MoE as MoE
from .permute import Routing as Routing
from .permute import permute as permute
from .permute import route as route
from .permute import unpermute as unpermute
from .recipe import BLOCKWISE as BLOCKWISE
from .recipe import MXFP8 as MXFP8
from .recipe import RECIPES as RECIPES
from .recipe import ROWWISE as ROWWISE
from .recipe import ROWWISE_WGRAD_HP as ROWWISE_WGRAD_HP
from .recipe import TENSORWISE as TENSORWISE
from .recipe import Cast as Cast
from .recipe import Gemm as Gemm
from .recipe import Recipe as Recipe
from .scaling import FULL as FULL
from .tensor import Float8TrainingTensor as Float8TrainingTensor
from .tensor import convert_format as convert_format
from .tensor import quantize as quantize
from .weight import Float8Weight as Float8Weight
