"""The APIs that the server speaks, one file each.

A dialect turns its JSON into `request.Request`, and a `Reply` into its JSON. Dialects do not import
each other.
"""
