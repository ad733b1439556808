"""The live page: speculation as it happens, in a browser. Static files and two streams for them."""
