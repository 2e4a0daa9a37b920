"""Cross-entropy of a linear head without its logits ever standing in memory at once.

Forward computes the gradients chunk by chunk, while a chunk's logits are there, so that nothing is
computed twice (the method of Liger Kernel's fused linear cross-entropy, Hsu et al. 2024).
"""

from typing import Any

import torch

CHUNK_BYTES = {"cpu": 64 << 20}
"""Memory for a chunk's logits; other devices take 512 MiB."""


def head_loss(
    hidden: torch.Tensor,
    head: torch.nn.Linear,
    tokens: torch.Tensor,
    weights: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the cross-entropies, in nats, and of the tokens that are predicted rightly.

    `hidden` [K, H] are the states that predict `tokens` [K]; `weights` [K] are 1 when None. Logits are
    computed in the autocast precision where autocast is on, and made fp32 (fp64 stays) before the
    softmax. `softcap` bounds them to `softcap * tanh(logits / softcap)`, as Gemma's
    `final_logit_softcapping` does. In half precision, where logits are often equal, the first largest one counts as
    predicted.
    """
    inputs: list[torch.Tensor | None] = [hidden, head.weight, head.bias]
    if not torch.is_grad_enabled():  # the function would compute gradients that nobody asks for
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
        # fp16: the loss is scaled up in the backward only, small gradients would be lost here
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
                states, target = hidden[part].to(compute), tokens[part]
                logits = torch.nn.functional.linear(states, matrix, offset).to(wide)
                squashed = None
                if softcap:
                    squashed = (logits / softcap).tanh_()
                    logits = squashed * softcap
                row = torch.arange(len(logits), device=logits.device)
                largest, wanted = logits.amax(-1), logits[row, target]
                # argmax takes ten times as long
                hits = wanted >= largest if compute is wide else logits.argmax(-1) == target
                probabilities = torch.softmax(logits, -1, out=logits)
                # the largest probability never underflows, so the logarithm of the sum follows from it
                losses = largest - probabilities.amax(-1).log() - wanted
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
                    grads[1].addmm_(grad.t(), states.to(backward), beta=float(first > 0))
                elif grads[1] is not None:
                    _accumulate(grads[1], grad.t() @ states.to(backward), first)
                if grads[2] is not None:
                    _accumulate(grads[2], grad.sum(0), first)
        ctx.grads = grads
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None  # the last reference: autograd then keeps these tensors, without a copy
        return *(None if g is None else g.mul_(grad) for g in grads), None, None, None


def _accumulate(total: torch.Tensor, part: torch.Tensor, first: int) -> None:
    """Add a chunk's part; the first chunk overwrites what was in memory."""
    total.add_(part) if first else total.copy_(part)
