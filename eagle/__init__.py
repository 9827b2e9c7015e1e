"""eagle: train EAGLE draft heads for any Hugging Face causal language model, and prove what they are worth."""
