"""One file per kind of drafter: the trained module, its loss, and how it is saved."""
