"""A causal language model as pure functions: its shape, its forward passes, its mesh, its folder and its tokenizer."""
