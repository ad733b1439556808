"""Other people's engines, driven by ours or drafting with ours."""
