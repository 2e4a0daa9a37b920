"""Cross-entropy of a linear head that never holds all logits in memory.

The forward pass computes the gradients as well, one chunk of logits after the other, so that nothing is computed twice
(the method of Liger Kernel's fused linear cross-entropy, Hsu et al. 2024).
"""

from typing import Any

import torch

CHUNK_BYTES = {"cpu": 64 << 20}
"""Memory for the logits of a chunk; 512 MiB on other devices."""


def head_loss(
    hidden: torch.Tensor,
    head: torch.nn.Linear,
    tokens: torch.Tensor,
    weights: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted sum of the cross-entropies, in nats, and the weighted number of correct predictions.

    Args:
        hidden: [K, H] hidden states that predict `tokens`.
        head: The output layer, H to the size of the vocabulary.
        tokens: [K] token ids.
        weights: [K] weight of each prediction; 1 when None.
        softcap: Bounds the logits to `softcap * tanh(logits / softcap)`, as Gemma's `final_logit_softcapping` does.

    Logits are computed in the autocast precision where autocast is on, and converted to fp32 before the softmax (fp64
    stays). In half precision, where logits are often equal, the first of the largest logits counts as the prediction.
    """
    inputs: list[torch.Tensor | None] = [hidden, head.weight, head.bias]
    if not torch.is_grad_enabled():  # the function would compute gradients that are not needed
        inputs = [x if x is None else x.detach() for x in inputs]
    loss, correct = _HeadLoss.apply(*inputs, tokens, weights, softcap)
    return loss, correct


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        weights: torch.Tensor | None,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        wide = torch.promote_types(compute, torch.float32)
        # fp16: the loss is scaled up in the backward only, so small gradients would be lost here
        backward = torch.float32 if compute is torch.float16 else compute
        empty = torch.empty_like if len(hidden) else torch.zeros_like
        grads = [
            empty(x, dtype=torch.promote_types(x.dtype, backward)) if x is not None and needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        loss, correct = (torch.zeros((), dtype=wide, device=hidden.device) for _ in range(2))
        with torch.autocast(device, enabled=False):
            matrix = weight.to(compute)
            matrix_backward = weight.to(backward)
            offset = None if bias is None else bias.to(compute)
            size = max(1, CHUNK_BYTES.get(device, 512 << 20) // (4 * len(weight)))
            for first in range(0, len(hidden), size):
                part = slice(first, first + size)
                chunk, target = hidden[part].to(compute), tokens[part]
                logits = torch.nn.functional.linear(chunk, matrix, offset).to(wide)
                squashed = None
                if softcap:
                    squashed = (logits / softcap).tanh_()
                    logits = squashed * softcap
                row = torch.arange(len(logits), device=logits.device)
                largest, target_logits = logits.amax(-1), logits[row, target]
                # compare where possible, because argmax takes ten times as long
                hits = target_logits >= largest if compute is wide else logits.argmax(-1) == target
                probabilities = torch.softmax(logits, -1, out=logits)
                # log-sum-exp is the largest logit minus the logarithm of its probability, which never underflows
                losses = largest - probabilities.amax(-1).log() - target_logits
                scale = None if weights is None else weights[part].to(wide)
                loss += losses.sum() if scale is None else losses @ scale
                correct += hits.sum() if scale is None else hits.to(wide) @ scale
                if not any(ctx.needs_input_grad):
                    continue
                probabilities[row, target] -= 1
                if scale is not None:
                    probabilities.mul_(scale[:, None])
                if squashed is not None:
                    probabilities.mul_(1 - squashed.square_())
                grad = probabilities.to(backward)
                if grads[0] is not None:
                    grads[0][part] = grad @ matrix_backward
                if grads[1] is not None and grad.dtype == grads[1].dtype:
                    grads[1].addmm_(grad.t(), chunk.to(backward), beta=float(first > 0))
                elif grads[1] is not None:
                    _accumulate(grads[1], grad.t() @ chunk.to(backward), first)
                if grads[2] is not None:
                    _accumulate(grads[2], grad.sum(0), first)
        ctx.grads = grads
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        # drops the last reference, so that autograd keeps these tensors without copying them
        grads, ctx.grads = ctx.grads, None
        return *(None if g is None else g.mul_(grad) for g in grads), None, None, None


def _accumulate(total: torch.Tensor, part: torch.Tensor, first: int) -> None:
    """Add a chunk's part to the total; the first chunk overwrites the uninitialised memory."""
    total.add_(part) if first else total.copy_(part)
