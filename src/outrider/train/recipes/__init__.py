"""One file per kind of drafter: what is trained, by which loss, and how it is saved."""
