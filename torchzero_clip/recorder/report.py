"""A report of a run: one HTML page about what happened to the gradients."""

from pathlib import Path

from torchzero_clip.recorder import words
from torchzero_clip.recorder.arithmetic import median_of
from torchzero_clip.recorder.binning import Events
from torchzero_clip.recorder.figures import draw_record, png_of
from torchzero_clip.recorder.files import FilePath, not_a_record
from torchzero_clip.recorder.page import code, page, paragraph, picture, section
from torchzero_clip.recorder.record import Record
from torchzero_clip.recorder.worst import Worst, ratio_table, sign_table

GUIDE = {
    "Norm": "The square root of the sum of squares of the gradients, before the first transform. The norm of a step is "
    "the joint norm of all gradients. The norm of a layer is the norm of the gradients of this layer.",
    "Usual norm": "The median of the finite norms in the steps before. In a file, the usual norm of a layer is found "
    "from the medians of blocks of steps. The picture of layers uses the median over the run instead, so that the "
    "first steps have a color too.",
    "Ratio": "The norm divided by the usual norm, or by the rounding of the step if that is larger. A norm that "
    "rounding alone explains, such as that of a bias before a batch normalization, has no ratio.",
    "Limit": "If the norm is above this number, a transform scales the gradients down. If several transforms have a "
    "limit, the pictures show the lowest one.",
    "Factor": "The number by which a transform multiplied the gradients. With 1, they are unchanged.",
    "Clipped": "The share of the gradients that a transform changed.",
    "Spike": "A norm far above the others. Its logarithm exceeds the median of the logarithms by more than 6 standard "
    "deviations, which are estimated from the median distance to this median, and the norm is more than twice the "
    "median. A norm that is inf or NaN is also a spike.",
    "Early sign": "A layer whose norm or update is far above those before, though the joint norm may be usual. A norm "
    "is listed if it is more than ten times the rounding of the step, and ten times all but one of the last twenty "
    "norms. The norm of an update is divided by that of the weights. This ratio is listed if it is far above those "
    "before, by the same rule as a spike, and more than twice each of the last three.",
    "Skipped step": "A step that a transform or the gradient scaler refused, or that raised an error.",
}


def write_report(record: Record, path: FilePath) -> None:
    """Write one HTML page with pictures, the worst steps and layers, and a suggested limit. It loads no other files."""
    if not record.steps:
        raise ValueError("the record has no steps")
    not_a_record(path)
    Path(path).write_text(_Report(record).page(), encoding="utf-8", errors="replace")


class _Report:
    def __init__(self, record: Record) -> None:
        self._record = record
        self._events = Events.of(record)
        self._norms = record.norm[self._events.norm.isfinite()]
        self._worst = Worst(record, self._events)

    def page(self) -> str:
        guide = [f"<dt>{term}</dt><dd>{text}</dd>" for term, text in GUIDE.items()]
        sections = [
            ("limit", "Suggested limit", self._limit()),
            ("norms", "Norms and layers by step", self._picture()),
            ("steps", "Worst steps", self._worst.step_table()),
            ("step-layers", "Layers in the worst steps", self._worst.layer_table()),
            ("signs", "Early signs", sign_table(self._record)),
            ("ratios", "Updates relative to parameters", ratio_table(self._record)),
            ("guide", "How to read this page", ["<dl>", *guide, "</dl>"]),
        ]
        sections = [(name, title, content) for name, title, content in sections if content]
        links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in sections)
        return page(
            "What happened to the gradients",
            paragraph(self._summary()),
            f'<nav aria-label="Sections"><ul>{links}</ul></nav>',
            *(section(name, title, *content) for name, title, content in sections),
        )

    def _summary(self) -> str:
        steps, events, norms = self._record.steps, self._events, self._norms
        place = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
        text = [f"{words.counted(len(steps), 'step')} {words.was(len(steps))} recorded: {place}."]
        if len(norms):
            top = steps[int(self._record.norm.nan_to_num(nan=-1.0, posinf=-1.0).argmax())]
            text.append(
                f"The joint norm of all gradients had the median {words.number_text(median_of(norms))}. The largest "
                f"was {words.number_text(float(norms.max()))}, in step {top:,}."
            )
        else:
            text.append("Every joint norm was 0, inf or NaN, or there was no gradient.")
        if bool(events.clipped.isfinite().any()):
            clipped = int((events.clipped > 0).sum())
            share = words.as_percent(clipped / len(steps))
            text.append(f"Gradients were clipped in {words.counted(clipped, 'step')} ({share}).")
        else:
            text.append("No transform reported how much it clipped.")
        lost = int((events.spikes & ~events.norm.isfinite()).sum())
        more = f" ({lost:,} with a norm that is inf or NaN)" if lost else ""
        skipped, spikes = int(events.skipped.sum()), int(events.spikes.sum())
        text.append(f"{words.counted(skipped, 'step')} {words.was(skipped)} skipped.")
        text.append(f"There {words.was(spikes)} {words.counted(spikes, 'spike')}{more}.")
        if signs := int(events.signs.sum()):
            text.append(f"{words.counted(signs, 'step')} had an early sign of a spike.")
        return " ".join(text)

    def _limit(self) -> list[str]:
        try:
            suggestion = self._record.suggest_max_norm()
        except ValueError as error:
            return [paragraph(f"There is no suggestion: {error}.")]
        limit = suggestion.limits["joint"]
        sentences = [paragraph(line) for line in str(suggestion).split("\n")]
        lines = (
            "# in a chain of torchzero_clip:",
            f'ClipNorm({limit:.4g}, dim="global")',
            "# in any other training loop:",
            f"torch.nn.utils.clip_grad_norm_(model.parameters(), {limit:.4g})",
        )
        alt = f"The {words.counted(len(self._norms), 'norm')} in the order of steps, and how often each was seen"
        caption = "The norms that the limit is found from, and how often each was seen. The axes are logarithmic."
        return [*sentences, code("\n".join(lines)), picture("limit-picture", png_of(suggestion.plot()), alt, caption)]

    def _picture(self) -> list[str]:
        shown = ", ".join(f"{step:,}" for step in self._worst.steps[:6]) or "none"
        alt = f"Line of the joint norm over {words.counted(len(self._record.steps), 'step')}. Worst steps: {shown}."
        caption = (
            "The joint norm of all gradients before the first transform, and the share that was clipped and the loss, "
            "if they are known. Below, each row is a layer, and each column is one or more steps. The color shows the "
            "largest norm in these steps divided by the median norm of the layer over the run. In spikes, skipped "
            "steps and early signs, a mark shows the layer with the largest ratio."
        )
        return [picture("norms-picture", png_of(draw_record(self._record)), alt, caption)]
