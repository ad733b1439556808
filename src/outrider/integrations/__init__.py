"""Other engines: started by our command line, or drafting with our proposers."""
