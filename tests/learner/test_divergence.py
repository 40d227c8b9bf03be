"""Estimates of the divergence, and the gradients that each has on average."""

import math

import pytest
import torch

from roost.config.train import KlEstimator
from roost.learner.losses import divergence

LOG2 = math.log(2.0)


@pytest.mark.parametrize(
    ("estimator", "expected", "gradient"),
    [
        # probabilities: 0.5 against 0.25, 0.25 against 0.5, equal
        pytest.param(KlEstimator.K1, [LOG2, -LOG2, 0.0], [1.0, 1.0, 1.0], id="k1"),
        pytest.param(KlEstimator.K2, [LOG2**2 / 2, LOG2**2 / 2, 0.0], [LOG2, -LOG2, 0.0], id="k2"),
        pytest.param(KlEstimator.K3, [0.5 + LOG2 - 1, 2 - LOG2 - 1, 0.0], [0.5, -1.0, 0.0], id="k3"),
    ],
)
def test_estimates_and_gradients(estimator, expected, gradient):
    logprobs = torch.tensor([0.5, 0.25, 0.3]).log().requires_grad_()
    found = divergence(logprobs, torch.tensor([0.25, 0.5, 0.3]).log(), estimator)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    found.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-6)


POLICY, REFERENCE = (0.7, 0.3), (0.4, 0.6)
SLOPE = 0.7 * 0.3  # of the first probability, by the first logit


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        pytest.param(KlEstimator.K1, 0.0, id="k1: none"),
        pytest.param(
            KlEstimator.K2, SLOPE * (math.log(0.7 / 0.4) - math.log(0.3 / 0.6)), id="k2: of KL(policy, reference)"
        ),
        pytest.param(KlEstimator.K3, 0.7 - 0.4, id="k3: of KL(reference, policy)"),
    ],
)
def test_gradients_on_average(estimator, expected):
    """Over a choice of two, exactly: by the first logit, each token counted as often as it is drawn."""
    logits = torch.tensor(POLICY, dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(0)
    found = divergence(logprobs, torch.tensor(REFERENCE, dtype=torch.float64).log(), estimator)
    (torch.tensor(POLICY, dtype=torch.float64) * found).sum().backward()
    assert logits.grad[0].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("logprob", "gradient"),
    [
        pytest.param(-1000.0, 0.0, id="far below: cut, and nothing pulls it further away"),
        pytest.param(999.0, 1.0, id="far above: pulled back"),
    ],
)
def test_k3_far_from_the_reference(logprob, gradient):
    logprobs = torch.tensor([logprob], requires_grad=True)
    found = divergence(logprobs, torch.tensor([-1.0]), KlEstimator.K3)
    assert torch.isfinite(found).all()
    found.sum().backward()
    assert logprobs.grad.item() == pytest.approx(gradient)


def test_k3_is_exact_where_policies_hardly_differ():
    found = divergence(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-12]), KlEstimator.K3)
    assert found.item() == pytest.approx(2**-25, rel=0.01)
