"""Names the layers of the first step whose gradients were not finite."""

from torchzero_clip.recorder.record import Record

MOST = 5


def alarm(record: Record, since: int) -> str | None:
    """Describe the first step, from ``since`` on, that has a norm of inf or NaN. None if there is no such step."""
    lost = record.layer_norms.isfinite().logical_not()
    rows: list[int] = lost.any(dim=1).nonzero().flatten().tolist()
    # a gradient scaler tries large scales on purpose
    rows = [i for i in rows if record.steps[i] >= since and "found_inf" not in record.reasons[i]]
    if not rows:
        return None
    row = rows[0]
    names = [name for name, is_lost in zip(record.layers, lost[row].tolist(), strict=True) if is_lost]
    shown = ", ".join(names[:MOST]) + (", ..." if len(names) > MOST else "")
    text = (
        f"step {record.layer_steps[row]:,}: the gradients of {len(names):,} of {len(record.layers):,} layers are inf "
        f"or NaN. In the order of the optimizer: {shown}."
    )
    norms, usual = record.layer_norms[row], record.usual(record.layer_steps[row])
    order = [i for i in norms.argsort(descending=True).tolist() if norms[i].isfinite() and norms[i] >= 0][:MOST]
    if order:
        said = [f" (usual {number:.4g})" if number == number else "" for number in usual.tolist()]
        near = ", ".join(f"{record.layers[i]} {norms[i]:.4g}{said[i]}" for i in order)
        text += f" The largest finite norms of the other layers: {near}."
    return text
