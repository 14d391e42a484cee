"""See, clip or skip gradients before ``optimizer.step()``, with the optimizer that you already have."""

import importlib as _importlib
import inspect as _inspect
import typing as _typing

from torchzero_clip.clipping.adagc import AdaGC as AdaGC
from torchzero_clip.clipping.adaptive_gradient_clip import AdaptiveGradientClip as AdaptiveGradientClip
from torchzero_clip.clipping.auto_clip import AutoClip as AutoClip
from torchzero_clip.clipping.by_ema import ClipNormByEMA as ClipNormByEMA
from torchzero_clip.clipping.by_ema import ClipValueByEMA as ClipValueByEMA
from torchzero_clip.clipping.by_ema import NormalizeByEMA as NormalizeByEMA
from torchzero_clip.clipping.centralize import Centralize as Centralize
from torchzero_clip.clipping.clip_by_max_ema import ClipByMaxEMA as ClipByMaxEMA
from torchzero_clip.clipping.clip_norm import ClipNorm as ClipNorm
from torchzero_clip.clipping.clip_rms import ClipRMS as ClipRMS
from torchzero_clip.clipping.clip_value import ClipValue as ClipValue
from torchzero_clip.clipping.gradient_stabilizer import GradientStabilizer as GradientStabilizer
from torchzero_clip.clipping.growth import ClipNormGrowth as ClipNormGrowth
from torchzero_clip.clipping.growth import ClipValueGrowth as ClipValueGrowth
from torchzero_clip.clipping.normalize import Normalize as Normalize
from torchzero_clip.clipping.skip_step import SkipStep as SkipStep
from torchzero_clip.clipping.soft_spectral_clip import SoftSpectralClip as SoftSpectralClip
from torchzero_clip.clipping.spike_aware_clip import SpikeAwareClip as SpikeAwareClip
from torchzero_clip.clipping.zclip import ZClip as ZClip
from torchzero_clip.core.chain import Chain as Chain
from torchzero_clip.core.elementwise import Elementwise as Elementwise
from torchzero_clip.core.kinds import Gate as Gate
from torchzero_clip.core.kinds import Scaling as Scaling
from torchzero_clip.core.kinds import UpdateRule as UpdateRule
from torchzero_clip.core.learning_rate import LR as LR
from torchzero_clip.core.step import Step as Step
from torchzero_clip.core.transform import TensorwiseTransform as TensorwiseTransform
from torchzero_clip.core.transform import Transform as Transform
from torchzero_clip.functional.bad import BadGradients as BadGradients
from torchzero_clip.functional.dtypes import set_norm_dtype as set_norm_dtype
from torchzero_clip.functional.grads import centralize_grads_ as centralize_grads_
from torchzero_clip.functional.grads import clip_grad_norm_ as clip_grad_norm_
from torchzero_clip.functional.grads import clip_grad_value_ as clip_grad_value_
from torchzero_clip.functional.grads import normalize_grads_ as normalize_grads_
from torchzero_clip.functional.norms import norm as norm
from torchzero_clip.functional.norms import rms as rms
from torchzero_clip.functional.shards import replicated as replicated
from torchzero_clip.functional.total import clip_grads_with_norm_ as clip_grads_with_norm_
from torchzero_clip.functional.total import get_total_norm as get_total_norm
from torchzero_clip.hints import did_you_mean as _did_you_mean
from torchzero_clip.migrating.as_lr import as_lr as as_lr
from torchzero_clip.migrating.moving import adapt_state_dict as adapt_state_dict
from torchzero_clip.migrating.moving import from_torch_optim as from_torch_optim
from torchzero_clip.migrating.moving import to_torch_optim as to_torch_optim
from torchzero_clip.modular.in_backward import step_in_backward as step_in_backward
from torchzero_clip.modular.modular import Modular as Modular
from torchzero_clip.optimizers.adam import Adam as Adam
from torchzero_clip.optimizers.adamw import AdamW as AdamW
from torchzero_clip.optimizers.hyperball import Hyperball as Hyperball
from torchzero_clip.optimizers.muon import Muon as Muon
from torchzero_clip.optimizers.rmsprop import RMSprop as RMSprop
from torchzero_clip.optimizers.sgd import SGD as SGD
from torchzero_clip.optimizers.weight_decay import WeightDecay as WeightDecay
from torchzero_clip.optimizers.wrap import Wrap as Wrap
from torchzero_clip.other_optimizer.before_step import before_step as before_step
from torchzero_clip.other_optimizer.captured import captured as captured

if _typing.TYPE_CHECKING:
    from torchzero_clip.late import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """A name that is imported late. Raise the error of the package for a name that it does not have."""
        if name == "__all__":
            return __dir__()
        names = [] if name.startswith("_") else __dir__()  # imports the late ones, and their modules
        if names and name in globals():
            return globals()[name]
        hint = _did_you_mean(name, names, listed=False)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")

    def __dir__() -> list[str]:
        """The public names, of which the late ones are imported now."""
        late = vars(_importlib.import_module("torchzero_clip.late"))
        globals().update({name: value for name, value in late.items() if not name.startswith("_")})
        return [name for name, value in globals().items() if name[0] != "_" and not _inspect.ismodule(value)]


__version__ = "0.1.0"
