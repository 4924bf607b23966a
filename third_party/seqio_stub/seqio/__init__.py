"""Stand-in for seqio: the two names that JetStream imports, and nothing that works."""
