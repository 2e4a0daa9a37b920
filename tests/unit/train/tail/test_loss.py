"""The head's loss, compared with PyTorch's cross-entropy."""

import pytest
import torch

from tailtune.train.tail.loss import head_loss


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_chunked_loss_is_cross_entropy(
    softcap: float | None, bias: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailtune.train.tail.loss.CHUNK_BYTES", {"cpu": 4 * 50 * 3})  # three positions at once
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=bias, dtype=torch.float64)
    hidden = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    tokens, weights = torch.randint(0, 50, (10,)), torch.rand(10, dtype=torch.float64) if weighted else None

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(3 * loss, [hidden, *head.parameters()]))

    logits = head(hidden)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    each = torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
    expected = (each * (1 if weights is None else weights)).sum()
    num_correct = (logits.argmax(-1) == tokens).double() @ (torch.ones(10).double() if weights is None else weights)
    loss, correct = head_loss(hidden, head, tokens, weights, softcap)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert correct.item() == pytest.approx(num_correct.item(), rel=1e-12)
    for expected_gradient, gradient in zip(gradients(expected), gradients(loss), strict=True):
        torch.testing.assert_close(expected_gradient, gradient, rtol=1e-11, atol=1e-13)


def test_the_first_of_equal_logits_counts_as_predicted() -> None:
    """In half precision, many logits are equal."""
    head, tokens = torch.nn.Linear(4, 9), torch.tensor([0, 3, 8])
    torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert head_loss(torch.randn(3, 4), head, tokens)[1].item() == 1


def test_the_loss_of_an_impossible_token_is_finite_and_correct() -> None:
    head = torch.nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0], [200.0], [-200.0]]))
    loss, _ = head_loss(torch.ones(1, 1), head, torch.tensor([2]))
    assert loss.item() == pytest.approx(400.0)


def test_evaluation_computes_no_gradient_for_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden = torch.nn.Linear(4, 9), torch.randn(5, 4)
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: pytest.fail("a gradient is computed"))
    with torch.no_grad():
        head_loss(hidden, head, torch.arange(5))


def test_the_loss_of_nothing_is_zero() -> None:
    head, hidden = torch.nn.Linear(4, 9), torch.empty(0, 4, requires_grad=True)
    loss, correct = head_loss(hidden, head, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == correct.item() == 0 and head.weight.grad is not None and not head.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_small_gradients(dtype: torch.dtype) -> None:
    """Most of 4,000 words get a gradient of 1/4000, which fp16 loses after the division by the number of labels."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, 4000, bias=False), (0.1 * torch.randn(20, 16)).requires_grad_()
    tokens = torch.randint(0, 4000, (20,))
    exact = torch.autograd.grad(torch.nn.functional.cross_entropy(head(hidden), tokens), [hidden, head.weight])
    with torch.autocast("cpu", dtype):
        loss, _ = head_loss(hidden, head, tokens)
        gradients = torch.autograd.grad(loss / 20, [hidden, head.weight])
    assert gradients[0].dtype is gradients[1].dtype is torch.float32
    for expected, gradient in zip(exact, gradients, strict=True):
        assert (expected - gradient).norm() / expected.norm() < 1e-2
