"""A loss of one's own, for `draftsmith train ... --loss docs/examples/focal.py:focal`: hard tokens count more."""


def focal(draft_logits, target_prob, gamma=2.0):
    """Return the focal cross-entropy (Lin et al. 2017) of each of N tokens. Both tensors are [N, V]."""
    log_q = draft_logits.log_softmax(-1)
    return -(target_prob * (1 - log_q.exp()) ** gamma * log_q).sum(-1)
