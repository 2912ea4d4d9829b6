"""Several runs on one page: what differs, by how much, and whether they can be compared at all."""
