"""One file per scheme that answers: what are the logits when each token's own state alone is replaced?"""
