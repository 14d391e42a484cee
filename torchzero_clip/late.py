"""The names of per-sample clipping and of records, imported when one is first asked for: a third of all code."""

from torchzero_clip.per_sample.clipper import PerSampleGradientClipper as PerSampleGradientClipper
from torchzero_clip.per_sample.norm_clippers import AutomaticClipper as AutomaticClipper
from torchzero_clip.per_sample.norm_clippers import ConstantFlatClipper as ConstantFlatClipper
from torchzero_clip.per_sample.norm_clippers import ConstantPerLayerClipper as ConstantPerLayerClipper
from torchzero_clip.per_sample.norm_clippers import NormClipper as NormClipper
from torchzero_clip.per_sample.opacus.fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping as GradSampleModuleFastGradientClipping,
)
from torchzero_clip.per_sample.opacus.two_passes import create_norm_sample as create_norm_sample
from torchzero_clip.per_sample.per_example import per_example_global_norm_clip as per_example_global_norm_clip
from torchzero_clip.per_sample.per_example import per_example_layer_norm_clip as per_example_layer_norm_clip
from torchzero_clip.per_sample.private.private_clipper import PrivateGradientClipper as PrivateGradientClipper
from torchzero_clip.per_sample.rules.registry import register_rule as register_rule
from torchzero_clip.per_sample.verify import check_per_sample as check_per_sample
from torchzero_clip.per_sample.weighting import ClippingResult as ClippingResult
from torchzero_clip.recorder.reading import read_record as read_record
from torchzero_clip.recorder.record import Record as Record
from torchzero_clip.recorder.recorder import Recorder as Recorder
from torchzero_clip.recorder.suggestion import Suggestion as Suggestion
